"""One request in the engine, and the stages of its life."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from rlt_protocols.params import ResolvedParams


class Stage(Enum):
    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


#: The only moves there are. Leaving the engine is possible from everywhere, and final.
TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset({Stage.PREFILL, Stage.FINISHED}),
    Stage.PREFILL: frozenset({Stage.DECODE, Stage.FINISHED}),
    Stage.DECODE: frozenset({Stage.FINISHED}),
    Stage.FINISHED: frozenset(),
}


@dataclass(slots=True)
class Chunk:
    """Consecutive prompt tokens on their way through the loops.

    `rows` are the rows of the hidden-state buffer in which they live between ticks.
    """

    first: int
    rows: list[int]
    loop: int = 0

    @property
    def count(self) -> int:
        return len(self.rows)


@dataclass(slots=True, eq=False)
class Request:
    id: str
    prompt: list[int]
    params: ResolvedParams
    stage: Stage = Stage.WAITING
    slot: int = -1
    #: prompt tokens whose chunk was started
    started: int = 0
    chunk: Chunk | None = None
    #: position of the token that runs next (decode): tokens before it have all their keys and values
    position: int = 0
    generated: int = 0
    #: pages[plane][i] holds positions i * page_size ... of that plane
    pages: list[list[int]] = field(default_factory=list)
    #: pages that this request may need at most, promised to it at admission
    promised: int = 0

    def move(self, stage: Stage) -> None:
        assert stage in TRANSITIONS[self.stage], (
            f"request {self.id}: {self.stage.name} -> {stage.name} is no transition"
        )
        self.stage = stage

    @property
    def planes(self) -> int:
        return self.params.max_loops

    @property
    def owned_pages(self) -> int:
        return sum(len(plane) for plane in self.pages)
