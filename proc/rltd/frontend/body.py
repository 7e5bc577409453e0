"""Reading a request's body within its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import Receive

from rltd.frontend.errors import ApiError, ClientGone, too_busy

BODY_TIMEOUT_S = 60
#: held by all bodies together that are being read or prepared; more are refused like a request too many
MAX_BODIES_BYTES = 256 << 20


class BodyMemory:
    """Memory for bodies, `MAX_BODIES_BYTES` or the largest body that may come alone."""

    def __init__(self, max_body_bytes: int) -> None:
        self._free_bytes = max(MAX_BODIES_BYTES, max_body_bytes)

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes bytes until the end of the context, or raises `ApiError` 429."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if size > self._free_bytes:
                raise too_busy()
            self._free_bytes -= size
            taken += size

        try:
            yield take
        finally:
            self._free_bytes += taken


async def read_json_body(headers: Headers, receive: Receive, limit: int, take: Callable[[int], None]) -> bytes:
    """Return the body of a JSON request, whose memory comes from `take`.

    Raises `ApiError` 415, 408 or 413, the last as soon as the limit is passed: no more than `limit` bytes and one piece
    are ever held. Raises `ClientGone` when the client leaves first.
    """
    media_type, _, parameters = headers.get("content-type", "").partition(";")
    media_type = media_type.strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise ApiError(415, "the Content-Type must be application/json", code="unsupported_media_type")
    charset = next((value for name, value in _parameters(parameters) if name == "charset"), "utf-8")
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, f"the charset {charset[:100]} is not supported; send UTF-8", code="unsupported_media_type")
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            415,
            f"the Content-Encoding {coding[:100]} is not supported; send the body as it is",
            code="unsupported_media_type",
        )
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(receive, limit, take)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S} seconds", code="body_timeout") from error


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    for part in text.lower().split(";"):
        name, _, value = part.partition("=")
        yield name.strip(), value.strip().strip('"')


async def _read(receive: Receive, limit: int, take: Callable[[int], None]) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        if len(body) + len(piece) > limit:
            raise _too_large(limit)
        take(len(piece))
        body += piece
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than the limit of {limit} bytes", code="body_too_large")
