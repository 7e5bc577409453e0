"""The engine core's two socket threads, which leave nothing but queue operations to the main loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import zmq

from rlt_protocols.codec import ProtocolError, encode, unpack_ids
from rlt_protocols.control import Done, StatusReply
from rlt_protocols.engine import AbortRequest, AddRequest, engine_inbox
from rltd.engine_core.core import Command, Forget, Meet, NewRequest, Outgoing, ToDetokenizer, ToFrontend, ToSupervisor
from rltd.link.address import Peer
from rltd.link.inbox import bind_inbox
from rltd.link.outbox import Outboxes

log = logging.getLogger(__name__)


def decode_inbox(frames: Sequence[bytes]) -> NewRequest | AbortRequest:
    """Decode one message of the engine's inbox; raises `ProtocolError`."""
    message = engine_inbox.decode(frames[0])
    wanted = 2 if isinstance(message, AddRequest) else 1
    if len(frames) != wanted:
        raise ProtocolError(f"{type(message).__name__} came with {len(frames)} frames instead of {wanted}")
    return NewRequest(message, unpack_ids(frames[1])) if isinstance(message, AddRequest) else message


class EngineWire:
    """Binds the inbox and moves messages between it, the command queue and the other processes' inboxes."""

    def __init__(
        self, run_dir: str, peer: Peer, commands: SimpleQueue[Command], report: Callable[[StatusReply | Done], None]
    ) -> None:
        self._context = zmq.Context()
        self._run_dir = run_dir
        self._commands = commands
        self._report = report
        self._outgoing: SimpleQueue[Outgoing | None] = SimpleQueue()
        inbox = bind_inbox(self._context, run_dir, peer)
        self._threads = [
            threading.Thread(target=self._receive, args=(inbox,), name="engine-input", daemon=True),
            threading.Thread(target=self._send, name="engine-output", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def emit(self, outgoing: Outgoing) -> None:
        """Queue something for the output thread."""
        self._outgoing.put(outgoing)

    def close(self) -> None:
        """Send what is queued, then end both threads."""
        self._outgoing.put(None)
        self._threads[1].join()
        self._context.term()  # wakes the input thread, which closes the inbox
        self._threads[0].join()

    def _receive(self, inbox: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = inbox.recv_multipart()
            except zmq.ContextTerminated:
                inbox.close()
                return
            try:
                self._commands.put(decode_inbox(frames))
            except ProtocolError as error:
                log.warning("dropped a message that is not for an engine: %s", error)

    def _send(self) -> None:
        with Outboxes(self._context, self._run_dir) as outboxes:
            while (outgoing := self._outgoing.get()) is not None:
                match outgoing:
                    case ToDetokenizer(generation, batch):
                        outboxes.send("detokenizer", 0, generation, [encode(batch)])
                    case ToFrontend(generation, stats):
                        outboxes.send("frontend", 0, generation, [encode(stats)])
                    case ToSupervisor(reply):
                        self._report(reply)
                    case Meet(peer):
                        outboxes.connect(peer.role, peer.index, peer.generation)
                    case Forget(peer):
                        outboxes.drop(peer.role, peer.index, peer.generation)
