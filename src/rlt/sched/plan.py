"""What one tick does: the messages from the scheduler to the runner. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rlt.sched.request import Request


class PromptSegment(NamedTuple):
    """Consecutive prompt tokens of one request at one loop.

    `rows` index the hidden-state buffer. `tokens` are given at loop 0 only. `samples` marks the segment whose last
    row is the prompt's last token at its last loop: the first output token comes from it.
    """

    request: Request
    loop: int
    first: int
    rows: list[int]
    tokens: list[int]
    samples: bool


class PageGrant(NamedTuple):
    """Page `page` now holds positions `place * page_size ...` of (slot, plane)."""

    slot: int
    plane: int
    place: int
    page: int


@dataclass(slots=True)
class TickPlan:
    """One launch. Decode rows take token, position and loop from the slot's state on the device."""

    number: int
    #: requests that get a slot before anything runs
    admitted: list[Request] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    #: one row each, at whatever loop the slot's state says
    decode: list[Request] = field(default_factory=list)
    prompts: list[PromptSegment] = field(default_factory=list)

    @property
    def sampling(self) -> list[Request]:
        """Every request of which this tick may produce a token, in the order of the results."""
        return [*self.decode, *(segment.request for segment in self.prompts if segment.samples)]

    @property
    def prompt_rows(self) -> int:
        return sum(len(segment.rows) for segment in self.prompts)

    @property
    def rows(self) -> int:
        return len(self.decode) + self.prompt_rows

    def __bool__(self) -> bool:
        return bool(self.decode or self.prompts)


class SlotResult(NamedTuple):
    """A token that left the loop: `depth` loops ran for it. `end` says whether the request ended with it."""

    token: int
    depth: int
    end: int


#: values of `SlotResult.end`, written by the device
END_NONE, END_STOP, END_LENGTH, END_NOT_FINITE = 0, 1, 2, 3
