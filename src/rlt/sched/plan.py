"""What one tick does: the messages from the scheduler to the runner. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rlt.sched.request import Request
from rlt_protocols.text import TokenLogprob


class PromptSegment(NamedTuple):
    """Consecutive prompt tokens of one request at one loop.

    `rows` index the hidden-state buffer. `tokens` are given at loop 0 only. `samples` marks the segment whose last
    row is the prompt's last token at its last loop: the first output token comes from it.
    """

    request: Request
    slot: int
    loop: int
    first: int
    rows: list[int]
    tokens: list[int]
    samples: bool


class PageGrant(NamedTuple):
    """Page `page` now holds positions `place * page_size ...` of page list `page_list` of a slot."""

    slot: int
    page_list: int
    place: int
    page: int


class Suspension(NamedTuple):
    """Copy the state of `slot`, these pages and these hidden rows to host memory, into `request.snapshot`."""

    request: Request
    slot: int
    pages: list[int]
    rows: list[int]


class Resumption(NamedTuple):
    """Bring `request.snapshot` back: into its new slot, these pages and rows, in the order they were copied out."""

    request: Request
    slot: int
    pages: list[int]
    rows: list[int]


class DecodeRows(NamedTuple):
    """One row each, at whatever loop the slot's state on the device says. Kept from tick to tick until it changes."""

    requests: tuple[Request, ...]
    slots: list[int]
    #: the most alternatives whose log-probabilities one of them asks for; None: no log-probabilities
    logprobs: int | None = None


NO_ROWS = DecodeRows((), [])


def most_logprobs(requests: Iterable[Request], most: int | None = None) -> int | None:
    """The largest `logprobs` of `requests` and `most`; None where all are None."""
    for request in requests:
        asked = request.params.logprobs
        if asked is not None and (most is None or asked > most):
            most = asked
    return most


@dataclass(slots=True)
class TickPlan:
    """One launch: suspensions, then resumptions and admissions, then page grants, then the rows."""

    number: int
    suspensions: list[Suspension] = field(default_factory=list)
    resumptions: list[Resumption] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    decode: DecodeRows = NO_ROWS
    prompts: list[PromptSegment] = field(default_factory=list)
    prompt_rows: int = 0

    def add_prompt(self, segment: PromptSegment) -> None:
        self.prompts.append(segment)
        self.prompt_rows += len(segment.rows)

    @property
    def rows(self) -> int:
        return len(self.decode.slots) + self.prompt_rows

    @property
    def sampling(self) -> list[Request]:
        """The requests whose first token comes from this tick, in order."""
        return [segment.request for segment in self.prompts if segment.samples]

    @property
    def logprobs(self) -> int | None:
        """The most alternatives whose log-probabilities are asked for; None: no log-probabilities."""
        if self.decode.logprobs is None and not self.prompts:
            return None
        return most_logprobs(self.sampling, self.decode.logprobs)

    def __bool__(self) -> bool:
        rows = self.decode.slots or self.prompts
        return bool(rows or self.suspensions or self.resumptions or self.admitted or self.grants)


class RowResult(NamedTuple):
    """A token that left the loop after `depth` loops; `end` says whether its request ended with it.

    `place` counts the plan's decode rows, then its sampling prompt segments.
    """

    place: int
    token: int
    depth: int
    end: int
    #: when one of the tick's requests asks for it
    logprob: TokenLogprob | None = None


#: values of `RowResult.end`, written by the device
END_NONE, END_STOP, END_LENGTH, END_NOT_FINITE = 0, 1, 2, 3
