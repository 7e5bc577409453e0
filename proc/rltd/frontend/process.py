"""The frontend's life under the supervisor: orders in, reports out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rlt_protocols.control import (
    AbortAnswer,
    Done,
    Drain,
    Drained,
    FromChild,
    PeerDown,
    PeerUp,
    StatusQuery,
    StatusReply,
    Stop,
)
from rlt_protocols.engine import EngineStats
from rlt_protocols.text import FrontendInbox
from rltd.frontend.engine_client import EngineClient
from rltd.frontend.job import Failure
from rltd.link.child import Order

log = logging.getLogger(__name__)

#: What the client of an answer is told that `rltctl abort` ended.
ABORTED = Failure("the operator of the server aborted this request", "aborted")


class Frontend:
    """Carries out the supervisor's orders and passes on what the other processes send."""

    def __init__(
        self,
        client: EngineClient,
        report: Callable[[FromChild], None],
        stop_serving: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._client = client
        self._report = report
        #: closes the HTTP server and returns when all answers are written
        self._stop_serving = stop_serving
        self._stop = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    def on_message(self, message: FrontendInbox) -> None:
        if isinstance(message, EngineStats):
            self._client.on_stats(message)
        else:
            self._client.on_text(message)

    def on_order(self, order: Order) -> None:
        match order:
            case PeerUp():
                self._client.on_peer_up(order)
            case PeerDown():
                self._client.on_peer_down(order)
            case StatusQuery(query):
                self._report(StatusReply(query, {"active": float(self._client.active)}))
            case AbortAnswer(query, answer_id):
                self._report(Done(query, self._client.end_answer(answer_id, ABORTED)))
            case Drain(timeout_s):
                if self._draining is None:
                    self._draining = asyncio.create_task(self._drain(timeout_s))
            case Stop():
                self._stop.set()

    async def run(self) -> None:
        """Return when the supervisor says stop, with the server closed."""
        await self._stop.wait()
        self._client.end_all(Failure("the server is shutting down", "draining"))
        if self._draining is not None:
            await self._draining
        else:
            await self._stop_serving()

    async def _drain(self, timeout_s: float) -> None:
        log.info("draining: %d requests are running", self._client.active)
        await self._client.drain(timeout_s)
        await self._stop_serving()
        self._report(Drained())
