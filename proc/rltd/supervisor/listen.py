"""The HTTP socket, bound before anything else starts and kept over restarts of the frontend."""

from __future__ import annotations

import errno
import socket

from rlt.errors import ConfigError

BACKLOG = 2048


def bind_http(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; raises `ConfigError` with one line that names the address."""
    return _bind(host, port, f"{host}:{port} (server.host, server.port)")


def check_host(host: str) -> None:
    """Raise `ConfigError` when `host` is no address of this machine."""
    _bind(host, 0, f"{host} (server.host)").close()


def _bind(host: str, port: int, where: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError([f"cannot listen on {where}: the host is not known: {error}"]) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            reason = "the port is in use; stop the other program or choose another server.port (0 takes any free one)"
        else:
            reason = error.strerror or str(error)
        raise ConfigError([f"cannot listen on {where}: {reason}"]) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket, with the port that the system chose for port 0."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
