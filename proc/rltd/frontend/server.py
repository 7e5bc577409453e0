"""uvicorn, set up for a child process: an inherited socket, no signals, limits on what a client can make it hold."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rltd.frontend.errors import ApiError
from rltd.frontend.request_id import choose_request_id

KEEP_ALIVE_S = 30
#: for connections that are still writing when the server stops
GRACE_S = 5
#: from the connection, or the first byte of a later request, to the end of its headers
HEADER_TIMEOUT_S = 30
MAX_HEADER_BYTES = 64 << 10
#: What a client may still send after its request was refused, e.g. the rest of a body that is too large. Reading it,
#: without keeping it, is what lets the client see the answer instead of a reset connection.
MAX_DISCARDED_BYTES = 256 << 20
#: the same in time, from the end of the answer
DISCARD_TIMEOUT_S = 30
#: a client that takes nothing of its answer for so long is cut off
STALL_TIMEOUT_S = 120


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits that it has for its other parser only, and without upgrades."""

    _reading_headers = True
    #: received while headers are incomplete, which may include more than headers
    _header_bytes = 0
    #: of the headers that are parsed
    _parsed_bytes = 0
    _discarded_bytes = 0
    #: the parser has met a request that asks for another protocol, and skips what follows
    _upgrading = False
    _header_timer: asyncio.TimerHandle | None = None
    _discard_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_discard_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _watch_stall(self) -> None:
        self._stall_timer = self.loop.call_later(
            STALL_TIMEOUT_S, self._end_stall, self.transport.get_write_buffer_size()
        )

    def _end_stall(self, unsent_before: int) -> None:
        # While writing is paused nothing is added, so any progress makes the buffer smaller.
        if self.transport.get_write_buffer_size() < unsent_before:
            self._watch_stall()
        else:
            self.transport.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._reading_headers:
            self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self.transport.is_closing() or not self._reading_headers:
            return
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()
        elif self.cycle is not None and self.cycle.response_complete and self._header_timer is None:
            # Bytes between two requests have stopped the timer of idle connections.
            self._start_header_timer()

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserError:
                if not self.transport.is_closing():
                    self.send_400_response("Invalid HTTP request received.")
                return
            except httptools.HttpParserUpgrade as upgrade:
                self._upgrading = False
                if self.parser.get_method() == b"CONNECT":
                    self._close_with(ApiError(405, "CONNECT is not allowed", code="method_not_allowed"))
                    return
                # The parser leaves what follows to the other protocol. We go on with HTTP, as a server may, and the
                # only way is a new parser that gets the request without its wish.
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                data = head + data[upgrade.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                kept = [token for token in value.split(b",") if token.strip().lower() != b"upgrade"]
                lines.append(b"connection: " + b",".join(kept))
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        self._reading_headers = True
        self._header_bytes = 0
        self._parsed_bytes = 0
        self._discarded_bytes = 0
        self._start_header_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_parsed(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_parsed(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._upgrading = True
            return
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
        if self._upgrading:
            return
        self._stop_discard_timer()
        super().on_message_complete()
        # Until the next request begins, further bytes count towards its headers.
        self._reading_headers = True
        self._header_bytes = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self._reading_headers and not self.transport.is_closing():
            # Its request's body has not ended, and nobody reads it.
            self._discard_timer = self.loop.call_later(DISCARD_TIMEOUT_S, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = _Unframed(app, cycle)
        super()._start_asgi_task(cycle, app)

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

    def _stop_discard_timer(self) -> None:
        if self._discard_timer is not None:
            self._discard_timer.cancel()
            self._discard_timer = None

    def _count_parsed(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()
            raise ValueError("the headers are too large")  # ends the parser's work

    def _refuse_headers(self) -> None:
        self._close_with(
            ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes", code="headers_too_large")
        )

    def _close_with(self, error: ApiError) -> None:
        """Answer and close; in the middle of another answer, only close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error.body()
            given = dict(self.headers or ()).get(b"x-request-id", b"").decode("latin-1")
            head = (
                b"content-type: application/json\r\nconnection: close\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n"
            )
            request_id = choose_request_id(given).encode()
            self.transport.write(STATUS_LINE[error.status] + head % (request_id, len(body)) + body)
        self.transport.close()


class _Unframed:
    """An app's answer to a client of HTTP/1.0, which knows no chunks: a body without a length ends with the connection.

    uvicorn closes such a connection anyway, but would send chunks.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self._cycle
        unframed = False

        async def send_unframed(message: Message) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if unframed else None
            elif unframed:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unframed)


class Server(uvicorn.Server):
    """Stops when told through `should_exit`; signals are the supervisor's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, tls: ssl.SSLContext | None = None) -> Server:
    """A server for `app`; run it with `serve(sockets=[...])`."""
    config = uvicorn.Config(
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
    config.load()
    config.ssl = tls
    return Server(config)


def listening_socket(fd: int) -> socket.socket:
    """The inherited HTTP socket; the supervisor has bound it and listens on it."""
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener
