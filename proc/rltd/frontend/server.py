"""uvicorn, set up for a child process: an inherited socket, no signals, limits on what a client can make it hold."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from rltd.frontend.errors import ApiError

KEEP_ALIVE_S = 30
#: for connections that are still writing when the server stops
GRACE_S = 5
#: from the connection, or the first byte of a later request, to the end of its headers
HEADER_TIMEOUT_S = 30
MAX_HEADER_BYTES = 64 << 10
#: What a client may still send after its request was refused, e.g. the rest of a body that is too large. Reading it,
#: without keeping it, is what lets the client see the answer instead of a reset connection.
MAX_DISCARDED_BYTES = 256 << 20


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits that it has for its other parser only."""

    _reading_headers = True
    _header_bytes = 0
    _discarded_bytes = 0
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._reading_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._reading_headers and self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse_headers()

    def on_message_begin(self) -> None:
        self._reading_headers = True
        self._header_bytes = 0
        self._discarded_bytes = 0
        self._start_header_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._reading_headers = False
        self._stop_header_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # Until the next request begins, further bytes count towards its headers.
        self._reading_headers = True
        self._header_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the form of every other error."""
        self._close_with(ApiError(400, msg, code="bad_http"))

    def _start_header_timer(self) -> None:
        self._stop_header_timer()
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse_headers(self) -> None:
        self._close_with(
            ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes", code="headers_too_large")
        )

    def _close_with(self, error: ApiError) -> None:
        """Answer and close; in the middle of another answer, only close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error.body()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


class Server(uvicorn.Server):
    """Stops when told through `should_exit`; signals are the supervisor's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp) -> Server:
    """A server for `app`; run it with `serve(sockets=[...])`."""
    return Server(
        uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            # Its lower levels tell about its own start and about every client that speaks no HTTP.
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )


def listening_socket(fd: int) -> socket.socket:
    """The inherited HTTP socket; the supervisor has bound it and listens on it."""
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener
