"""The sending side of the inboxes: PUSH sockets, opened when a process is announced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import zmq

from rlt_protocols.control import Role
from rltd.link.address import Peer, inbox_address


class Outboxes:
    """Sends to the inboxes of other processes. All calls must come from one thread (or one event loop).

    A send never blocks and never drops while the peer lives: the high-water mark is off, since what can be under way
    is bounded by `server.max_queue` and a dropped message would break "exactly one final event".
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: str | Path) -> None:
        self._context = context
        self._run_dir = run_dir
        self._sockets: dict[Peer, zmq.Socket[bytes]] = {}
        self._dead: dict[tuple[Role, int], int] = {}

    def send(self, role: Role, index: int, generation: int, frames: Sequence[bytes]) -> bool:
        """Queue `frames` as one message; False when that generation is known to be dead."""
        if generation <= self._dead.get((role, index), -1):
            return False
        self._open(Peer(role, index, generation)).send_multipart(frames, flags=zmq.DONTWAIT)
        return True

    def connect(self, role: Role, index: int, generation: int) -> None:
        """Open the socket to a process that is up, before there is something to send.

        From then on a message reaches it also when its socket's file is gone. Without this call the first send opens.
        """
        if generation > self._dead.get((role, index), -1):
            self._open(Peer(role, index, generation))

    def drop(self, role: Role, index: int, generation: int) -> None:
        """Close the sockets of this generation and older ones; later sends to them do nothing."""
        self._dead[role, index] = max(generation, self._dead.get((role, index), -1))
        for peer in [p for p in self._sockets if (p.role, p.index) == (role, index) and p.generation <= generation]:
            self._sockets.pop(peer).close(linger=0)

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._sockets.clear()

    def _open(self, peer: Peer) -> zmq.Socket[bytes]:
        if peer in self._sockets:
            return self._sockets[peer]
        socket = self._sockets[peer] = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(inbox_address(self._run_dir, peer))
        return socket

    def __enter__(self) -> Outboxes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
