"""One request in the engine, and the stages of its life. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from rlt.kv.prefix import Block, Chain
from rlt_protocols.params import ResolvedParams


class Stage(Enum):
    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    #: preempted: its state is in host memory, and it waits to come back to PREFILL or DECODE
    SUSPENDED = auto()
    FINISHED = auto()


#: The only moves there are. Leaving the engine is possible from everywhere, and final.
TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset({Stage.PREFILL, Stage.FINISHED}),
    Stage.PREFILL: frozenset({Stage.DECODE, Stage.SUSPENDED, Stage.FINISHED}),
    Stage.DECODE: frozenset({Stage.SUSPENDED, Stage.FINISHED}),
    Stage.SUSPENDED: frozenset({Stage.PREFILL, Stage.DECODE, Stage.FINISHED}),
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

    @property
    def end(self) -> int:
        return self.first + len(self.rows)


@dataclass(slots=True, eq=False)
class Request:
    """What the scheduler knows. It lags behind the device by the ticks whose results are not read yet."""

    id: str
    prompt: list[int]
    params: ResolvedParams
    #: order of arrival in the engine
    number: int
    stage: Stage = Stage.WAITING
    slot: int = -1
    #: prompt tokens whose chunk was started (or whose pages came from the prefix cache)
    started: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    #: output tokens known
    generated: int = 0
    #: lists[l] are the pages of page list l in order
    lists: list[list[int]] = field(default_factory=list)
    #: as many lists, from the first on, may have pages of `blocks`; the others hold output tokens alone
    prompt_lists: int = 0
    #: keys under which the prompt's full blocks are found in the prefix cache, if there is one
    chain: Chain | None = None
    #: blocks of the cache by their place in the prompt: read, or given to the cache, by this request
    blocks: dict[int, Block] = field(default_factory=dict)
    #: prompt blocks offered to the cache so far
    offered: int = 0
    #: the blocks' pages that decode tokens do not read were given up after the prompt
    tail: bool = False
    #: tokens taken from the prefix cache at admission
    cached_tokens: int = 0
    #: requests that arrived later and were admitted before this one
    passed: int = 0
    urgent: bool = False
    #: tick in which it last got a slot
    placed_at: int = 0
    #: the runner's copy of the state of a suspended request
    snapshot: object | None = None
    suspended_at: int = 0
    #: pages, and positions used while decoding, that each list had
    sizes: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    resumes_in: Stage = Stage.DECODE

    @property
    def loops(self) -> int:
        """Loops at most per token, and of every prompt token."""
        return self.params.max_loops

    def move(self, stage: Stage) -> None:
        assert stage in TRANSITIONS[self.stage], (
            f"request {self.id}: {self.stage.name} -> {stage.name} is no transition"
        )
        self.stage = stage

    def own_pages(self) -> list[int]:
        """Pages that belong to this request alone, not to blocks of the prefix cache."""
        if not self.blocks:
            return [page for pages in self.lists for page in pages]
        # In a list with prompt tokens a block has the page of its place.
        return [
            page
            for index, pages in enumerate(self.lists)
            for place, page in enumerate(pages)
            if index >= self.prompt_lists or place not in self.blocks
        ]
