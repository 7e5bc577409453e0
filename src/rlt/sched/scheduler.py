"""Which rows run in the next tick, and what their results mean for the requests. No torch here.

Every tick runs all decode rows, each at its own loop, and fills the rest of the row budget with prompt chunks, each
at its own loop. Requests enter and leave at any tick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rlt.kv.pages import PagePool
from rlt.sched.plan import (
    END_LENGTH,
    END_NONE,
    END_NOT_FINITE,
    END_STOP,
    PageGrant,
    PromptSegment,
    SlotResult,
    TickPlan,
)
from rlt.sched.request import Chunk, Request, Stage
from rlt_protocols.params import ResolvedParams
from rlt_protocols.text import Tokens


class Scheduler:
    """Owns every request of an engine, its slots, its prompt rows and its pages."""

    def __init__(
        self, *, pool: PagePool, page_size: int, max_seqs: int, max_tick_tokens: int, prefill_chunk: int
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.max_tick_tokens = max_tick_tokens
        self.prefill_chunk = min(prefill_chunk, max_tick_tokens)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots = list(range(max_seqs - 1, -1, -1))
        # Rows of the hidden-state buffer after the slots' own rows: prompt tokens live there between ticks.
        self._rows = list(range(max_seqs + max_tick_tokens - 1, max_seqs - 1, -1))
        self._prompt_rows_total = max_tick_tokens
        self._promised = 0
        self._tick = 0

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: list[int], params: ResolvedParams) -> Request:
        """Queue a request. `prompt` and `params` were checked against the model's limits (`params.resolve`)."""
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        request = Request(request_id, prompt, params)
        request.promised = self._pages_for(len(prompt) + params.max_tokens) * request.planes
        if request.promised > self.pool.total:
            raise ValueError(
                f"may need {request.promised} KV pages; the cache has {self.pool.total} (kv.pages, kv.bytes)"
            )
        self.requests[request_id] = request
        self.waiting.append(request)
        return request

    def abort(self, request_id: str) -> bool:
        """Drop a request in any stage; False when it is not (or no longer) here."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.stage is Stage.WAITING:
            self.waiting.remove(request)
        self._finish(request)
        return True

    def _finish(self, request: Request) -> None:
        if request.stage is not Stage.WAITING:
            self.running.remove(request)
            self._slots.append(request.slot)
            self._promised -= request.promised
            if request.chunk is not None:
                self._rows.extend(request.chunk.rows)
                request.chunk = None
            for plane in request.pages:
                self.pool.release(plane)
            request.pages = []
        request.move(Stage.FINISHED)
        del self.requests[request.id]

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self) -> TickPlan:
        """Plan the next tick: an empty plan means that there is nothing to do."""
        plan = TickPlan(self._tick + 1)
        self._admit(plan)
        for request in self.running:
            if request.stage is Stage.DECODE:
                self._supply(request, request.position + 1, plan)
                plan.decode.append(request)
        # Chunks on their way always fit: each row they had at their start is theirs until they leave, and a prompt
        # that turns to decoding gives up at least the one row that it then takes.
        prefilling = [request for request in self.running if request.stage is Stage.PREFILL]
        for request in prefilling:
            if request.chunk is not None:
                self._plan_chunk(request, request.chunk, plan)
        for request in prefilling:
            room = self.max_tick_tokens - plan.rows
            if room > 0 and request.chunk is None:
                self._plan_chunk(request, self._start_chunk(request, room, plan), plan)
        assert plan.rows <= self.max_tick_tokens
        if plan:
            self._tick = plan.number
        return plan

    def _admit(self, plan: TickPlan) -> None:
        while self.waiting and self._slots:
            request = self.waiting[0]
            if self._promised + request.promised > self.pool.total:
                return
            self.waiting.popleft()
            self._promised += request.promised
            request.slot = self._slots.pop()
            request.pages = [[] for _ in range(request.planes)]
            request.move(Stage.PREFILL)
            self.running.append(request)
            plan.admitted.append(request)

    def _start_chunk(self, request: Request, room: int, plan: TickPlan) -> Chunk:
        count = min(self.prefill_chunk, len(request.prompt) - request.started, room)
        chunk = request.chunk = Chunk(request.started, [self._rows.pop() for _ in range(count)])
        request.started += count
        self._supply(request, request.started, plan)
        return chunk

    def _plan_chunk(self, request: Request, chunk: Chunk, plan: TickPlan) -> None:
        """Add the request's chunk at its next loop."""
        end = chunk.first + chunk.count
        samples = chunk.loop == request.planes - 1 and end == len(request.prompt)
        tokens = request.prompt[chunk.first : end] if chunk.loop == 0 else []
        plan.prompts.append(PromptSegment(request, chunk.loop, chunk.first, chunk.rows, tokens, samples))

    def _supply(self, request: Request, positions: int, plan: TickPlan) -> None:
        """Give every plane pages for the first `positions` positions. Admission promised them, so they are there."""
        have = len(request.pages[0])
        need = self._pages_for(positions)
        for place in range(have, need):
            for plane, page in enumerate(self.pool.allocate(request.planes)):
                request.pages[plane].append(page)
                plan.grants.append(PageGrant(request.slot, plane, place, page))

    def _pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    # -- results -------------------------------------------------------------------------------------------------

    def apply(self, plan: TickPlan, results: Sequence[SlotResult | None]) -> list[Tokens]:
        """Advance the requests by what a tick did.

        `results` has one entry per request of `plan.sampling`: None where the row went on to its next loop. Returns
        the new tokens; requests that ended are gone afterwards.
        """
        for segment in plan.prompts:
            if segment.request.chunk is not None:
                self._advance_chunk(segment.request, segment.request.chunk)
        outputs: list[Tokens] = []
        for request, result in zip(plan.sampling, results, strict=True):
            if result is not None and request.stage is not Stage.FINISHED:
                outputs.append(self._apply_token(request, result))
        return outputs

    def _advance_chunk(self, request: Request, chunk: Chunk) -> None:
        chunk.loop += 1
        if chunk.loop == request.planes:
            self._rows.extend(chunk.rows)
            request.chunk = None

    def _apply_token(self, request: Request, result: SlotResult) -> Tokens:
        if request.stage is Stage.PREFILL:
            request.move(Stage.DECODE)
            request.position = len(request.prompt)
        else:
            request.position += 1
        request.generated += 1
        if result.end == END_NONE:
            return Tokens(request.id, (result.token,), (result.depth,))
        self._finish(request)
        if result.end == END_NOT_FINITE:
            return Tokens(request.id, finish_reason="error", error="the model computed numbers that are not finite")
        if result.end == END_LENGTH:
            return Tokens(request.id, (result.token,), (result.depth,), finish_reason="length")
        assert result.end == END_STOP
        reason = result.token if result.token in request.params.stop_token_ids else None
        return Tokens(request.id, (result.token,), (result.depth,), finish_reason="stop", stop_reason=reason)

    # -- looking in ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check_integrity(self) -> None:
        """Assert what must hold between ticks; cheap enough for every tick of a test and for idle moments."""
        owned = [page for request in self.running for plane in request.pages for page in plane]
        self.pool.check_integrity(owned)
        assert self._promised == sum(request.promised for request in self.running) <= self.pool.total
        assert all(request.owned_pages <= request.promised for request in self.running)
        chunk_rows = [row for request in self.running if request.chunk for row in request.chunk.rows]
        assert len(set(chunk_rows)) == len(chunk_rows) == self._prompt_rows_total - len(self._rows)
        slots = [request.slot for request in self.running]
        assert len(set(slots)) == len(slots)
        assert set(self.requests.values()) == {*self.waiting, *self.running}
