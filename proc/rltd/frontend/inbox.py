"""The inbox on the event loop: it watches ZeroMQ's descriptor, which costs no task and no thread per message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from rlt_protocols.codec import ProtocolError
from rlt_protocols.text import FrontendInbox, frontend_inbox

log = logging.getLogger(__name__)

#: Messages taken in one go before other work on the loop gets its turn.
_BURST = 64


class InboxReader:
    """Calls `handle` on the event loop for every message."""

    def __init__(self, socket: zmq.Socket[bytes], handle: Callable[[FrontendInbox], None]) -> None:
        self._socket = socket
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._open = True
        self._loop.add_reader(self._fd, self._read)
        # The descriptor signals changes only: what came before must be looked for once.
        self._loop.call_soon(self._read)

    def close(self) -> None:
        """Stop reading; the socket stays open."""
        self._open = False
        self._loop.remove_reader(self._fd)

    def _read(self) -> None:
        if not self._open:
            return
        for _ in range(_BURST):
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                message = frontend_inbox.decode(data)
            except ProtocolError as error:
                log.warning("dropped a message that is not for a frontend: %s", error)
                continue
            try:
                self._handle(message)
            except Exception:
                # One message that we cannot handle must not hold up those behind it.
                log.exception("handling a %s failed", type(message).__name__)
        self._loop.call_soon(self._read)
