"""The scheduler against a fake device: any mix of requests, exits and aborts keeps every promise."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rlt.kv.pages import OutOfPages, PagePool
from rlt.sched.plan import END_LENGTH, END_NONE, END_STOP, SlotResult
from rlt.sched.request import Request, Stage
from rlt.sched.scheduler import Scheduler
from rlt_protocols.params import ResolvedParams


def params(max_tokens=4, max_loops=3) -> ResolvedParams:
    return ResolvedParams(
        max_tokens=max_tokens,
        min_tokens=0,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=0,
        end_token_ids=(),
        stop_token_ids=(),
        min_loops=1,
        max_loops=max_loops,
        exit_threshold=0.5,
    )


def scheduler(pages=100, page_size=4, max_seqs=3, max_tick_tokens=8, prefill_chunk=5) -> Scheduler:
    return Scheduler(
        pool=PagePool(pages),
        page_size=page_size,
        max_seqs=max_seqs,
        max_tick_tokens=max_tick_tokens,
        prefill_chunk=prefill_chunk,
    )


@dataclass
class Model:
    """What a request should have seen: which (position, loop) pairs ran, in order."""

    prompt: list[int]
    params: ResolvedParams
    ran: list[tuple[int, int]] = field(default_factory=list)
    tokens: int = 0
    loop: int = 0
    ended: bool = False


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the device: checks each plan against causality and the page tables, and answers with drawn exits."""

    @initialize(
        pages=st.integers(12, 80),
        page_size=st.sampled_from([1, 2, 4, 16]),
        max_seqs=st.integers(1, 4),
        extra=st.integers(0, 12),
        chunk=st.integers(1, 9),
    )
    def start(self, pages, page_size, max_seqs, extra, chunk):
        self.scheduler = scheduler(pages, page_size, max_seqs, max_seqs + extra, chunk)
        self.models: dict[str, Model] = {}
        self.tables: dict[int, dict[tuple[int, int], int]] = {}
        self.count = 0

    @rule(length=st.integers(1, 20), max_tokens=st.integers(1, 6), loops=st.integers(1, 4))
    def add(self, length, max_tokens, loops):
        name = f"r{self.count}"
        self.count += 1
        prompt = list(range(length))
        request_params = params(max_tokens, loops)
        need = -(-(length + max_tokens) // self.scheduler.page_size) * loops
        if need > self.scheduler.pool.total:
            with pytest.raises(ValueError, match="KV pages"):
                self.scheduler.add(name, prompt, request_params)
            return
        self.scheduler.add(name, prompt, request_params)
        self.models[name] = Model(prompt, request_params)

    @rule(data=st.data())
    def abort(self, data):
        live = [name for name, model in self.models.items() if not model.ended]
        if not live:
            return
        name = data.draw(st.sampled_from(live))
        assert self.scheduler.abort(name)
        assert not self.scheduler.abort(name)
        self.models[name].ended = True

    @rule(data=st.data())
    def tick(self, data):
        self.run_tick(lambda: data.draw(st.booleans()), lambda: data.draw(st.integers(0, 9)) == 0)

    def run_tick(self, draw_exit, draw_stop):
        plan = self.scheduler.plan()
        assert plan.rows <= self.scheduler.max_tick_tokens
        for request in plan.admitted:
            self.tables[request.slot] = {}
        for grant in plan.grants:
            self.tables[grant.slot][grant.plane, grant.place] = grant.page
        slots = [r.slot for r in plan.decode] + [s.request.slot for s in plan.prompts]
        assert len(set(slots)) == len(slots)
        results: list[SlotResult | None] = []
        for request in plan.decode:
            results.append(self.run_decode(request, draw_exit(), draw_stop()))
        for segment in plan.prompts:
            model = self.models[segment.request.id]
            assert segment.tokens == (model.prompt[segment.first :][: len(segment.rows)] if segment.loop == 0 else [])
            for position in range(segment.first, segment.first + len(segment.rows)):
                self.ran(segment.request, position, segment.loop)
            last = segment.first + len(segment.rows) == len(model.prompt) and segment.loop == model.params.max_loops - 1
            assert segment.samples == last
            if last:
                results.append(self.token(model, model.params.max_loops, draw_stop()))
        for out in self.scheduler.apply(plan, results):
            if out.finish_reason is not None:
                self.models[out.request_id].ended = True

    def ran(self, request: Request, position: int, loop: int):
        """Record a row, and check that all it reads is there and that its page is its own."""
        model = self.models[request.id]
        assert (position, loop) not in model.ran
        assert loop == 0 or (position, loop - 1) in model.ran
        if position:
            earlier = position - 1
            exited = earlier >= len(model.prompt)
            assert exited or (earlier, loop) in model.ran
        model.ran.append((position, loop))
        assert self.tables[request.slot].get((loop, position // self.scheduler.page_size)), "no page"

    def run_decode(self, request: Request, wants_exit: bool, stop: bool) -> SlotResult | None:
        model = self.models[request.id]
        self.ran(request, len(model.prompt) + model.tokens - 1, model.loop)
        model.loop += 1
        if not wants_exit and model.loop < model.params.max_loops:
            return None
        return self.token(model, model.loop, stop)

    def token(self, model: Model, depth: int, stop: bool) -> SlotResult:
        model.tokens += 1
        model.loop = 0
        end = END_LENGTH if model.tokens == model.params.max_tokens else END_NONE
        return SlotResult(0, depth, END_STOP if stop else end)

    @invariant()
    def all_accounts_balance(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        live = {name for name, model in self.models.items() if not model.ended}
        assert live == set(self.scheduler.requests)
        owned = [page for r in self.scheduler.running for plane in r.pages for page in plane]
        assert len(set(owned)) == len(owned)

    def teardown(self):
        """Whatever happened, everything left comes to its end and everything is given back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.run_tick(lambda: False, lambda: False)
            self.all_accounts_balance()
        assert not self.scheduler.has_work, "a request starved"
        assert self.scheduler.pool.free == self.scheduler.pool.total


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_decode_rows_come_first_and_prompts_fill_the_rest():
    sched = scheduler(max_seqs=2, max_tick_tokens=6, prefill_chunk=6)
    sched.add("a", [1], params(max_tokens=9, max_loops=1))
    sched.apply(sched.plan(), [SlotResult(0, 1, END_NONE)])
    sched.add("b", list(range(20)), params(max_loops=1))
    plan = sched.plan()
    assert [r.id for r in plan.decode] == ["a"]
    assert [(s.request.id, s.first, len(s.rows)) for s in plan.prompts] == [("b", 0, 5)]


def test_a_request_enters_beside_one_that_is_between_loops():
    sched = scheduler()
    sched.add("a", [1, 2], params(max_loops=3))
    sched.apply(sched.plan(), [])
    sched.add("b", [3], params(max_loops=3))
    assert [(s.request.id, s.loop) for s in sched.plan().prompts] == [("a", 1), ("b", 0)]


def test_requests_wait_for_promised_pages_in_order():
    sched = scheduler(pages=9, page_size=4)
    for name in "abc":
        sched.add(name, [1], params(max_tokens=3, max_loops=3))
    sched.add("big", list(range(9)), params(max_tokens=3, max_loops=3))
    assert [r.id for r in sched.plan().admitted] == ["a", "b", "c"]
    assert [r.id for r in sched.waiting] == ["big"]


def test_duplicate_id_is_refused():
    sched = scheduler()
    sched.add("a", [1], params())
    with pytest.raises(ValueError, match="in use"):
        sched.add("a", [1], params())


def test_stages_only_move_forward():
    request = Request("a", [1], params())
    request.move(Stage.PREFILL)
    with pytest.raises(AssertionError, match="no transition"):
        request.move(Stage.WAITING)


def test_pool_refuses_what_it_has_not():
    pool = PagePool(2)
    pages = pool.allocate(2)
    assert 0 not in pages
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    pool.release(pages)
    pool.check_integrity([])
