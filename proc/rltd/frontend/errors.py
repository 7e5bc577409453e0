"""What a client can be told, and the JSON form of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from rlt_protocols.answers import ErrorBody, ErrorDetail

JSON = "application/json"
#: Most characters of a name that an error repeats.
MAX_SHOWN_CHARS = 100

_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}


class ApiError(Exception):
    """Ends a request with an HTTP error. The message is for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        """The error as JSON."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, kind, self.param, self.code)))

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, JSON)


def shorten(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    """A client's own words, short enough to be repeated."""
    return text if len(text) <= limit else f"{text[:limit]}…"


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def invalid(param: str | None, message: str) -> ApiError:
    """A request that cannot be served whatever the server's state."""
    return ApiError(400, message, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """A field that other servers have, or other models, asks for what cannot be done here."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def unavailable(message: str, code: str, retry_after_s: int) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def too_busy() -> ApiError:
    return ApiError(429, "too many requests are queued", code="queue_full", headers={"Retry-After": "1"})


def internal(request_id: str) -> ApiError:
    """Our own fault; the id is the one in the log."""
    return ApiError(500, f"internal error; the request id is {request_id}", code="internal_error")
