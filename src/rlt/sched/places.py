"""Who runs, in which slot, and which rows of the hidden-state buffer prompt chunks have. No torch here."""

from __future__ import annotations

from collections.abc import Container, Mapping

from rlt.sched.plan import NO_ROWS, DecodeRows, most_logprobs
from rlt.sched.request import Chunk, Request, Stage


class Places:
    """Slots for requests and rows for prompt chunks: row s is slot s's decode token, the rows after are chunks'.

    Rows always fit. A chunk keeps its rows from its first loop to its last, and a prompt that turns to decoding gives
    up at least the one row that it then takes; so decode rows and chunks under way never exceed the budget, and only
    new chunks and resumed requests have to be measured against `room`.
    """

    def __init__(self, max_seqs: int, max_tick_tokens: int) -> None:
        self._max_seqs = max_seqs
        self._budget = max_tick_tokens
        self._slots = list(range(max_seqs - 1, -1, -1))
        self._rows = list(range(max_seqs + max_tick_tokens - 1, max_seqs - 1, -1))
        self.running: list[Request] = []
        #: requests past their prompts, by slot
        self.decoding: dict[int, Request] = {}
        self.prefilling: dict[Request, None] = {}
        self._decode_rows: DecodeRows | None = NO_ROWS

    @property
    def has_slot(self) -> bool:
        return bool(self._slots)

    @property
    def room(self) -> int:
        """Rows that a tick has left beside all decode rows and all chunks under way."""
        return len(self._rows) - len(self.decoding)

    def enter(self, request: Request, stage: Stage, tick: int) -> None:
        """Give a request a slot; it takes part in tick `tick`."""
        request.slot = self._slots.pop()
        request.placed_at = tick
        request.move(stage)
        self.running.append(request)
        if stage is Stage.DECODE:
            self._add_decoding(request)
        else:
            self.prefilling[request] = None

    def begin_decode(self, request: Request) -> None:
        request.move(Stage.DECODE)
        del self.prefilling[request]
        self._add_decoding(request)

    def _add_decoding(self, request: Request) -> None:
        self.decoding[request.slot] = request
        self._decode_rows = None

    def leave(self, request: Request) -> None:
        """Take slot and rows back. The request keeps its chunks, whose rows are void."""
        self.running.remove(request)
        self._slots.append(request.slot)
        for chunk in request.chunks:
            self._rows.extend(chunk.rows)
        self.prefilling.pop(request, None)
        if self.decoding.get(request.slot) is request:
            del self.decoding[request.slot]
            self._decode_rows = None

    def take_rows(self, count: int) -> list[int]:
        return [self._rows.pop() for _ in range(count)]

    def end_chunk(self, request: Request, chunk: Chunk) -> None:
        request.chunks.remove(chunk)
        self._rows.extend(chunk.rows)

    def decode_rows(self, without: Container[Request]) -> DecodeRows:
        """The rows of all decoding requests but some; built anew only when they changed."""
        if without:
            chosen = {slot: request for slot, request in self.decoding.items() if request not in without}
            return _rows_of(chosen)
        if self._decode_rows is None:
            self._decode_rows = _rows_of(self.decoding)
        return self._decode_rows

    def check_integrity(self) -> None:
        """Assert that every slot and row is in one place."""
        rows = [row for request in self.running for chunk in request.chunks for row in chunk.rows]
        assert len(set(rows)) == len(rows) == self._budget - len(self._rows)
        assert len(self.decoding) + len(rows) <= self._budget
        slots = [request.slot for request in self.running]
        assert len(set(slots)) == len(slots) == self._max_seqs - len(self._slots)
        stages = {Stage.DECODE: set(self.decoding.values()), Stage.PREFILL: set(self.prefilling)}
        for stage, known in stages.items():
            assert {request for request in self.running if request.stage is stage} == known
        assert all(request.slot == slot for slot, request in self.decoding.items())


def _rows_of(decoding: Mapping[int, Request]) -> DecodeRows:
    return DecodeRows(tuple(decoding.values()), list(decoding), most_logprobs(decoding.values()))
