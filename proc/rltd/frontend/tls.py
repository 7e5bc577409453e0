"""The server's certificate. The supervisor loads it too, to tell about mistakes before anything starts."""

from __future__ import annotations

import ssl
from typing import NoReturn

from rlt.config import ServerConfig
from rlt.errors import ConfigError


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """Return the context for `server.tls_cert` and `tls_key`, or None where they are not set.

    Raises `ConfigError` with one line that names the key and the file.
    """
    if server.tls_cert is None or server.tls_key is None:
        return None
    for key, file in (("server.tls_cert", server.tls_cert), ("server.tls_key", server.tls_key)):
        try:
            # The library does not say which of its two files it could not read.
            with open(file, "rb") as stream:
                stream.read(1)
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ConfigError([f"{key}: {file} cannot be read: {reason}"]) from error

    def refuse_password() -> NoReturn:
        raise ConfigError([f"server.tls_key: {server.tls_key} needs a password; store the key without one"])

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(server.tls_cert, server.tls_key, refuse_password)
    except ssl.SSLError as error:
        files = f"{server.tls_cert} and {server.tls_key} (server.tls_cert, server.tls_key)"
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = "the key is not the certificate's"
        else:
            reason = f"not a PEM certificate and its PEM key ({error.reason or error})"
        raise ConfigError([f"{files} cannot be used: {reason}"]) from error
    return context
