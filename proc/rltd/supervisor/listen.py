"""The HTTP socket, bound before anything else starts and kept over restarts of the frontend."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlt.config import ServerConfig
from rlt.errors import ConfigError
from rltd.frontend.tls import tls_context

BACKLOG = 2048


@contextmanager
def http_socket(server: ServerConfig) -> Iterator[socket.socket]:
    """The listening socket that is configured; a Unix socket's file is removed afterwards.

    Raises `ConfigError` with one line when the certificate cannot be used or the address cannot be listened on.
    """
    tls_context(server)
    if server.uds is None:
        with bind_http(server.host, server.port) as listener:
            yield listener
        return
    path = Path(server.uds).absolute()
    with bind_uds(path) as listener:
        facts = path.lstat()
        try:
            yield listener
        finally:
            # Another daemon may have taken the path over, e.g. after somebody removed the file.
            with suppress(OSError):
                if os.path.samestat(path.lstat(), facts):
                    path.unlink()


def bind_http(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; raises `ConfigError` with one line that names the address."""
    return _bind(host, port, f"{host}:{port} (server.host, server.port)")


def bind_uds(path: Path) -> socket.socket:
    """Return a listening Unix socket that only this user can open; raises `ConfigError` with one line.

    A file that a dead daemon left is replaced, any other file is left alone.
    """
    where = f"cannot listen on {path} (server.uds)"
    _remove_stale(path, where)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mode must be right from the first moment; no other thread makes files yet.
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError([f"{where}: {error.strerror or error}"]) from error
    finally:
        os.umask(mask)
    return listener


def check_listen(server: ServerConfig) -> None:
    """Raise `ConfigError` when a start would: for the certificate, the host, or what is in the Unix socket's place."""
    tls_context(server)
    if server.uds is None:
        _bind(server.host, 0, f"{server.host} (server.host)").close()
        return
    path = Path(server.uds).absolute()
    if not path.parent.is_dir():
        raise ConfigError([f"cannot listen on {path} (server.uds): {path.parent} is not a directory"])
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError([f"cannot listen on {path} (server.uds): it exists and is not a socket"])


def _remove_stale(path: Path, where: str) -> None:
    """Remove the socket of a daemon that is dead; raises `ConfigError` for anything else that is there."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError([f"{where}: it exists and is not a socket; remove it or choose another path"])
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(5)
            probe.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError([f"{where}: {error.strerror or error}"]) from error
    else:
        raise ConfigError([f"{where}: another program listens there; stop it or choose another path"])


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


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL of a bound socket, with the port that the system chose for port 0; `unix:<path>` of a file."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    scheme = "https" if tls else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
