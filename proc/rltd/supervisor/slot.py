"""The processes that a daemon consists of, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlt_protocols.control import Role
from rltd.supervisor.child import Child
from rltd.supervisor.restart import Backoff

Commands = Mapping[Role, Sequence[str]]

#: How each process is started. The order is that of `rltctl status`.
COMMANDS: Commands = {
    "frontend": (sys.executable, "-m", "rltd.frontend.main"),
    "engine": (sys.executable, "-m", "rltd.engine_core.main"),
    "detokenizer": (sys.executable, "-m", "rltd.detokenizer.main"),
}


@dataclass(slots=True)
class Slot:
    """A process that the daemon keeps running, over all its lives."""

    role: Role
    index: int
    backoff: Backoff
    generation: int = 0
    child: Child | None = None
    #: some life of it was ready once
    was_ready: bool = False

    @property
    def is_ready(self) -> bool:
        return self.child is not None and self.child.is_ready


@dataclass(frozen=True, slots=True)
class Ending:
    """Why and how the daemon ends. Without `drain_s` it stops at once."""

    code: int
    drain_s: float | None = None
