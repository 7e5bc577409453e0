"""Every request has an id: the client's own, if it is harmless, or a new one. It comes back in the answer's headers."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HARMLESS = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def choose_request_id(given: str) -> str:
    """`given`, if it can stand in a header and in the log, or a new id."""
    return given if _HARMLESS.fullmatch(given) else uuid.uuid4().hex


class RequestIds:
    """ASGI middleware; the id is in `scope["state"]["request_id"]` for the log and for error messages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = choose_request_id(Headers(scope=scope).get("x-request-id", ""))
        scope.setdefault("state", {})["request_id"] = request_id
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, send_with_id)
