"""Which rows run in the next tick, and what their results mean for the requests. No torch here.

Every tick runs all decode rows, each at its own loop, and fills the rest of the row budget with prompt chunks, each
at its own loop. Requests enter, leave, are suspended and come back at any tick. Planning may run ahead of the results
by some ticks: everything here holds for whatever the ticks under way turn out to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlt.sched.admission import Admission
from rlt.sched.places import Places
from rlt.sched.plan import (
    END_LENGTH,
    END_NONE,
    END_NOT_FINITE,
    END_STOP,
    PromptSegment,
    RowResult,
    TickPlan,
)
from rlt.sched.policy import Policy
from rlt.sched.request import Chunk, Request, Stage
from rlt.sched.supply import PageSupply
from rlt.sched.waiting import WaitingLine
from rlt_protocols.params import ParamError, ResolvedParams
from rlt_protocols.text import TokenLogprob, Tokens


class Scheduler:
    """Owns every request of an engine, its slots and its prompt rows; its pages are the supply's."""

    def __init__(self, policy: Policy, supply: PageSupply) -> None:
        self.policy = policy
        self.supply = supply
        self.requests: dict[str, Request] = {}
        self.places = Places(policy.max_seqs, policy.max_tick_tokens)
        self.waiting = WaitingLine(priority=policy.priority, max_bypass=policy.max_bypass)
        self._admission = Admission(policy, supply, self.places, self.waiting)
        self._chunk = 1 if supply.layout.serial_prompt else min(policy.prefill_chunk, policy.max_tick_tokens)
        #: decoding requests that have no row in the tick being planned
        self._stalled: set[Request] = set()
        #: prompts that got no pages for their next chunk
        self._starved: list[Request] = []
        #: chunks whose last loop was planned in the last tick
        self._finishing: list[tuple[Request, Chunk]] = []
        self._number = 0
        self._arrivals = 0
        self._applied = 0

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: list[int], params: ResolvedParams) -> Request:
        """Queue a request. `prompt` and `params` were checked against the model's limits (`params.resolve`)."""
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        request = Request(request_id, prompt, params, self._arrivals)
        most = self.supply.most_pages(request)
        if most > self.supply.pool.total:
            raise ParamError(
                "max_tokens", f"the request may need {most} KV pages and the cache has {self.supply.pool.total}"
            )
        self._arrivals += 1
        self.requests[request_id] = request
        self.waiting.add(request)
        return request

    def abort(self, request_id: str) -> bool:
        """Drop a request in any stage; False when it is not (or no longer) here."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request)
        return True

    def _finish(self, request: Request) -> None:
        if request.stage in {Stage.WAITING, Stage.SUSPENDED}:
            self.waiting.remove(request)
            request.snapshot = None
        else:
            self._admission.vacate(request)
        request.move(Stage.FINISHED)
        del self.requests[request.id]

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self) -> TickPlan:
        """Plan the next tick: an empty plan means that nothing can run now."""
        plan = TickPlan(self._number + 1)
        self._end_chunks(plan)
        self._supply_running(plan)
        self._admission.admit(plan, self._applied)
        resumed = (resumption.request for resumption in plan.resumptions)
        self._stalled.update(request for request in resumed if request.stage is Stage.DECODE)
        prompts_first = not self.policy.mixed and bool(self.places.prefilling)
        if not prompts_first:
            plan.decode = self.places.decode_rows(self._stalled)
        self._plan_prompts(plan)
        if prompts_first and not plan.prompts:
            plan.decode = self.places.decode_rows(self._stalled)
        if self.supply.prefix is not None and self.supply.pool.free < self.policy.reserve:
            self.supply.prefix.evict(self.policy.reserve - self.supply.pool.free - self.supply.pool.resting)
        if plan:
            self._number = plan.number
            self.supply.pool.submitted(plan.number)
        return plan

    def _end_chunks(self, plan: TickPlan) -> None:
        """Chunks that ran their last loop leave; a prompt that is through begins to decode."""
        for request, chunk in self._finishing:
            if chunk not in request.chunks or request.stage is not Stage.PREFILL:
                continue
            self.places.end_chunk(request, chunk)
            self.supply.offer_blocks(request, chunk.end)
            if chunk.end == len(request.prompt):
                promised = self._admission.promise(request)
                self.places.begin_decode(request)
                plan.grants.extend(self.supply.begin_decode(request))
                self._admission.renew(request, promised)
        self._finishing.clear()

    def _supply_running(self, plan: TickPlan) -> None:
        """Give running requests the pages of the next tick; decoding ones that get none now are stalled."""
        self._stalled.clear()
        missing = self.supply.missing()
        if not self._starved:
            grants = self.supply.fill(missing, self.places.decoding)
            if grants is not None:
                self._admission.supplied(len(grants))
                plan.grants.extend(grants)
                return
        starved, self._starved = self._starved, []
        lacking = {self.places.decoding[entry.slot]: None for entry in missing} | dict.fromkeys(starved)
        for request in sorted(lacking, key=self.waiting.rank):
            if request.stage is Stage.DECODE and not self._ensure(request, plan):
                self._stalled.add(request)
            elif request.stage is Stage.PREFILL:
                self._ensure(request, plan)

    def _ensure(self, request: Request, plan: TickPlan) -> bool:
        """Supply `request`, suspending requests that rank behind it if there is no other way."""
        positions = min(request.started + self._chunk, len(request.prompt))
        decoding = request.stage is Stage.DECODE
        while True:
            promised = self._admission.promise(request)
            missing = self.supply.missing_of(request) if decoding else []
            if decoding:
                grants = self.supply.fill(missing, self.places.decoding)
            else:
                grants = self.supply.grow_prompt(request, positions)
            if grants is not None:
                plan.grants.extend(grants)
                self._admission.renew(request, promised)
                return True
            count = sum(m.pages for m in missing) if decoding else self.supply.prompt_missing(request, positions)
            if self.supply.available >= count:
                return False
            assert self.policy.preemption, "pages that were promised are not there"
            # Who has done nothing since it got its place is spared if somebody else can be had.
            settled = [
                other for other in self.places.running if other is request or self._admission.settled(other, plan)
            ]
            if settled == [request]:
                settled = self.places.running
            victim = max(settled, key=self.waiting.rank)
            self._admission.suspend(victim, plan)
            if victim is request:
                return False

    # -- rows ----------------------------------------------------------------------------------------------------

    def _plan_prompts(self, plan: TickPlan) -> None:
        for request in self.places.prefilling:
            for chunk in request.chunks:
                self._plan_chunk(request, chunk, plan)
        for request in sorted(self.places.prefilling, key=self.waiting.rank):
            if request.started < len(request.prompt) and (self.policy.wavefront or not request.chunks):
                self._start_chunk(request, plan)
        assert plan.rows <= self.policy.max_tick_tokens

    def _start_chunk(self, request: Request, plan: TickPlan) -> None:
        count = min(self._chunk, len(request.prompt) - request.started, self.places.room)
        if count <= 0:
            return
        promised = self._admission.promise(request)
        grants = self.supply.grow_prompt(request, request.started + count)
        if grants is None:
            # Nobody can be suspended any more in this tick: the next one begins with this request.
            self._starved.append(request)
            return
        plan.grants.extend(grants)
        self._admission.renew(request, promised)
        chunk = Chunk(request.started, self.places.take_rows(count))
        request.chunks.append(chunk)
        request.started += count
        self._plan_chunk(request, chunk, plan)

    def _plan_chunk(self, request: Request, chunk: Chunk, plan: TickPlan) -> None:
        """Add the chunk at its next loop."""
        last_loop = chunk.loop == request.loops - 1
        samples = last_loop and chunk.end == len(request.prompt)
        tokens = request.prompt[chunk.first : chunk.end] if chunk.loop == 0 else []
        plan.add_prompt(PromptSegment(request, request.slot, chunk.loop, chunk.first, chunk.rows, tokens, samples))
        chunk.loop += 1
        if last_loop:
            self._finishing.append((request, chunk))

    # -- results -------------------------------------------------------------------------------------------------

    def apply(self, plan: TickPlan, results: Sequence[RowResult]) -> list[Tokens]:
        """Advance the requests by the tokens that a tick produced, oldest tick first; returns the tokens.

        Requests that ended are gone afterwards. A result of a request that was aborted meanwhile is dropped.
        """
        self._applied = plan.number
        self.supply.pool.ended(plan.number)
        decoded, first = plan.decode.requests, len(plan.decode.requests)
        sampling = plan.sampling
        produced: list[tuple[Request, RowResult]] = []
        slots, depths = [], []
        for result in results:
            if result.place >= first:
                request = sampling[result.place - first]
            else:
                request = decoded[result.place]
                if request.stage is Stage.DECODE:
                    slots.append(request.slot)
                    depths.append(result.depth)
                elif request.stage is Stage.SUSPENDED:
                    self.supply.advance_suspended(request, result.depth)
            if request.stage is not Stage.FINISHED:
                produced.append((request, result))
        if slots:
            self.supply.book.advance(slots, depths)
        return [self._apply_token(request, result) for request, result in produced]

    def _apply_token(self, request: Request, result: RowResult) -> Tokens:
        request.generated += 1
        cached, logprobs = request.cached_tokens, _logprobs_of(request, result)
        if result.end == END_NONE:
            return Tokens(request.id, (result.token,), (result.depth,), cached_tokens=cached, logprobs=logprobs)
        if result.end == END_NOT_FINITE:
            self.supply.forget_blocks(request)
        elif request.stage is Stage.PREFILL:
            # It ends with its first token, before the end of its last chunk was looked at.
            self.supply.offer_blocks(request, len(request.prompt))
        self._finish(request)
        if result.end == END_NOT_FINITE:
            return Tokens(request.id, finish_reason="error", error="the model computed numbers that are not finite")
        if result.end == END_LENGTH:
            return Tokens(
                request.id, (result.token,), (result.depth,), "length", cached_tokens=cached, logprobs=logprobs
            )
        assert result.end == END_STOP
        reason = result.token if result.token in request.params.stop_token_ids else None
        return Tokens(
            request.id, (result.token,), (result.depth,), "stop", reason, cached_tokens=cached, logprobs=logprobs
        )

    # -- looking in ----------------------------------------------------------------------------------------------

    @property
    def preemptions(self) -> int:
        """Suspensions since the start."""
        return self._admission.preemptions

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens since the start that came from the prefix cache."""
        return self._admission.hit_tokens

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def check_integrity(self) -> None:
        """Assert what must hold between ticks."""
        self.supply.check_integrity(self.places.running)
        self._admission.check_integrity()
        self.places.check_integrity()
        assert set(self.requests.values()) == {*self.waiting, *self.places.running}


def _logprobs_of(request: Request, result: RowResult) -> tuple[TokenLogprob, ...]:
    """What the request asks for of what the tick tells, which is as much as any of its requests asks for."""
    asked = request.params.logprobs
    if asked is None:
        return ()
    assert result.logprob is not None
    return (TokenLogprob(result.logprob.logprob, result.logprob.top[:asked]),)
