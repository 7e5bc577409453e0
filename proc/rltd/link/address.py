"""Where a process listens: one ipc address per (role, index, generation)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rlt_protocols.control import Role

#: `sockaddr_un.sun_path` has 108 bytes with its closing NUL.
MAX_SOCKET_PATH_BYTES = 107

_SHORT: dict[Role, str] = {"frontend": "front", "engine": "engine", "detokenizer": "detok"}


class AddressError(Exception):
    """A socket path does not fit into a Unix socket address."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One life of one process. A restart has the next generation, hence another address."""

    role: Role
    index: int
    generation: int


def socket_path(run_dir: str | Path, name: str) -> Path:
    """Return the path of a socket in `run_dir`; raises `AddressError` when the system could not bind it."""
    path = Path(run_dir) / name
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise AddressError(
            f"the socket path {path} has {size} bytes, the system's limit is {MAX_SOCKET_PATH_BYTES}; "
            "set XDG_RUNTIME_DIR to a shorter directory"
        )
    return path


def inbox_path(run_dir: str | Path, peer: Peer) -> Path:
    """Return the file of the peer's inbox socket."""
    return socket_path(run_dir, f"{_SHORT[peer.role]}{peer.index}.{peer.generation}")


def inbox_address(run_dir: str | Path, peer: Peer) -> str:
    """Return the ZeroMQ address of the peer's inbox."""
    return f"ipc://{inbox_path(run_dir, peer)}"
