"""Who may use the server: ASGI middleware for names of hosts, browsers' origins and access keys."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from rlt.config import KEY_HASH, ServerConfig
from rltd.frontend.errors import ApiError, shorten

#: For load balancers and restarters, which have neither a key nor the right name; they tell nothing but a state.
OPEN_PATHS = frozenset({"/health", "/ready"})

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")


def guarded(app: ASGIApp, server: ServerConfig) -> ASGIApp:
    """`app` behind the checks that are configured.

    Keys come last: a browser asks whether it may call before it sends one.
    """
    if server.api_keys:
        app = Keys(app, server.api_keys)
    if server.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=server.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    if server.allowed_hosts:
        app = Hosts(app, server.allowed_hosts)
    return app


class Keys:
    """Lets requests through that bear one of the keys, given as `rlt.config.hash_key` makes them."""

    def __init__(self, app: ASGIApp, hashed: Sequence[str]) -> None:
        self._app = app
        self._digests = [bytes.fromhex(key.removeprefix(KEY_HASH)) for key in hashed]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        kind, _, token = Headers(scope=scope).get("authorization", "").strip().partition(" ")
        if kind.lower() != "bearer" or not token:
            await _refused("an access key is needed: send it as Authorization: Bearer KEY")(scope, receive, send)
        elif not self._knows(token.strip()):
            await _refused("the access key is not known")(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _knows(self, token: str) -> bool:
        """Compare with every key, each in constant time, so that the time tells nothing about any of them."""
        digest = hashlib.sha256(token.encode("latin-1")).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _refused(message: str) -> ASGIApp:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}).response()


class Hosts:
    """Lets requests through whose Host is known.

    A page whose own name was made to point here (DNS rebinding) passes every check of origins, but not this one.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "").strip().lower()
        match = _HOST.fullmatch(host)
        if scope["path"] in OPEN_PATHS or (match is not None and match[1] in self._names):
            await self._app(scope, receive, send)
            return
        message = f"the host {shorten(host)!r} is not served here"
        await ApiError(400, message, code="host_not_allowed").response()(scope, receive, send)
