"""The one socket on which a process receives: a PULL bound to its own address."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import zmq

from rltd.link.address import Peer, inbox_address

S = TypeVar("S", bound="zmq.Socket[Any]")


def bind_inbox(context: zmq.Context[S], run_dir: str | Path, peer: Peer) -> S:
    """Bind and return the inbox of `peer`; `context` may be a `zmq.asyncio.Context`. Bind before saying ready."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(inbox_address(run_dir, peer))
    return socket
