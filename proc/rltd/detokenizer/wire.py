"""The detokenizer's sockets: one thread polls the inbox and the supervisor's orders and does all the work."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import TracebackType

import zmq

from rlt_protocols.codec import ProtocolError, encode
from rlt_protocols.control import FromChild, PeerDown, PeerUp, StatusQuery, StatusReply, Stop
from rlt_protocols.engine import AbortRequest
from rlt_protocols.text import TextBatch, detokenizer_inbox
from rltd.detokenizer.detokenizer import Detokenizer
from rltd.link.address import Peer
from rltd.link.child import Order
from rltd.link.inbox import bind_inbox
from rltd.link.outbox import Outboxes

log = logging.getLogger(__name__)

#: Messages taken before the orders are looked at again.
_BURST = 64


class DetokenizerWire:
    """`put_order` may be called from any thread; everything else belongs to the one that calls `run`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: str, peer: Peer) -> None:
        self._inbox = bind_inbox(context, run_dir, peer)
        self._outboxes = Outboxes(context, run_dir)
        self._orders: SimpleQueue[Order] = SimpleQueue()
        # A byte in this pipe wakes the poll when there is an order.
        self._wake_read, self._wake_write = os.pipe()

    def put_order(self, order: Order) -> None:
        self._orders.put(order)
        os.write(self._wake_write, b"!")

    def to_frontend(self, generation: int, batch: TextBatch) -> None:
        self._outboxes.send("frontend", 0, generation, [encode(batch)])

    def to_engine(self, engine: int, generation: int, abort: AbortRequest) -> None:
        self._outboxes.send("engine", engine, generation, [encode(abort)])

    def run(self, detokenizer: Detokenizer, report: Callable[[FromChild], None]) -> None:
        """Work until a `Stop` comes."""
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                if not self._carry_out(detokenizer, report):
                    return
            if self._inbox in ready:
                self._receive(detokenizer)

    def _carry_out(self, detokenizer: Detokenizer, report: Callable[[FromChild], None]) -> bool:
        """Do what the supervisor ordered; False at a `Stop`."""
        while True:
            try:
                order = self._orders.get_nowait()
            except Empty:
                return True
            match order:
                case PeerUp(role, index, generation):
                    self._outboxes.connect(role, index, generation)
                case PeerDown(role, index, generation):
                    detokenizer.on_peer_down(order)
                    self._outboxes.drop(role, index, generation)
                case StatusQuery(query):
                    report(StatusReply(query, {"active": float(detokenizer.active)}))
                case Stop():
                    return False
                case _:
                    pass

    def _receive(self, detokenizer: Detokenizer) -> None:
        for _ in range(_BURST):
            try:
                data = self._inbox.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                batch = detokenizer_inbox.decode(data)
            except ProtocolError as error:
                log.warning("dropped a message that is not for a detokenizer: %s", error)
                continue
            detokenizer.on_batch(batch)

    def __enter__(self) -> DetokenizerWire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._outboxes.close()
        self._inbox.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
