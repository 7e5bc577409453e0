"""The scheduler against a fake device: any mix of requests, exits and aborts keeps every promise."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rlt.kv.book import PageBook
from rlt.kv.layout import SUPPLY_AHEAD, parse_layout
from rlt.kv.pages import OutOfPages, PagePool
from rlt.kv.prefix import PrefixCache
from rlt.sched.plan import END_LENGTH, END_NONE, END_NOT_FINITE, END_STOP, RowResult
from rlt.sched.policy import Policy
from rlt.sched.request import Request, Stage
from rlt.sched.scheduler import Scheduler
from rlt.sched.supply import PageSupply
from rlt_protocols.params import ParamError, ResolvedParams


def params(max_tokens=4, max_loops=3, priority=0, min_loops=1, threshold=0.5) -> ResolvedParams:
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
        min_loops=min_loops,
        max_loops=max_loops,
        exit_threshold=threshold,
        priority=priority,
    )


def scheduler(pages=100, page_size=4, layout="last_exited", lag=0, cache=False, outer=0, **policy) -> Scheduler:
    pool, kind = PagePool(pages), parse_layout(layout, outer)
    sizes = {"max_seqs": 3, "max_tick_tokens": 8, "prefill_chunk": 5} | policy
    supply = PageSupply(
        pool=pool,
        prefix=PrefixCache(pool, page_size, "model", layout) if cache else None,
        layout=kind,
        book=PageBook(kind, sizes["max_seqs"], 4, page_size),
        page_size=page_size,
        ahead=1 + lag,
        early_exits=False,
    )
    return Scheduler(Policy(**sizes), supply)


@dataclass
class Model:
    """The device's side of one request: what ran, and how full its page lists are."""

    request: Request
    ran: set[tuple[int, int]] = field(default_factory=set)
    tokens: int = 0
    loop: int = 0
    #: rows run since it last got a slot
    since_placed: int = 0
    #: the device knows that it ended, and the scheduler that it is gone
    idle: bool = False
    ended: bool = False
    table: dict[tuple[int, int], int] = field(default_factory=dict)
    deeper: list[int] = field(default_factory=list)
    exited: list[int] = field(default_factory=list)


LAYOUTS = ["last_exited", "last_exited_copy", "shared", "last_step", "cyclic:2"]


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the device: checks each plan against causality and the page tables, and answers with drawn exits."""

    @initialize(
        pages=st.integers(4, 120),
        page_size=st.sampled_from([1, 2, 4, 16]),
        layout=st.sampled_from(LAYOUTS),
        outer=st.sampled_from([0, 0, 1, 2]),
        lag=st.integers(0, 1),
        cache=st.booleans(),
        max_seqs=st.integers(1, 4),
        extra=st.integers(0, 12),
        policy=st.fixed_dictionaries(
            {
                "prefill_chunk": st.integers(1, 9),
                "mixed": st.booleans(),
                "priority": st.booleans(),
                "preemption": st.booleans(),
                "wavefront": st.booleans(),
                "max_bypass": st.integers(0, 3),
                "reserve": st.integers(0, 3),
            }
        ),
    )
    def start(self, pages, page_size, layout, outer, lag, cache, max_seqs, extra, policy):
        policy["wavefront"] &= layout != "shared"
        sizes = {"max_seqs": max_seqs, "max_tick_tokens": max_seqs + extra}
        self.scheduler = scheduler(pages, page_size, layout, lag, cache, outer, **sizes, **policy)
        self.layout, self.lag, self.size, self.policy = parse_layout(layout, outer), lag, page_size, policy
        self.models: dict[str, Model] = {}
        self.slots: dict[int, str] = {}
        self.owners: dict[int, str] = {}
        self.pending: deque = deque()
        self.admissions: list[int] = []
        self.count = 0

    @rule(
        prompt=st.lists(st.sampled_from([7, 7, 7, 8]), min_size=1, max_size=20),
        max_tokens=st.integers(1, 6),
        loops=st.integers(1, 4),
        min_loops=st.integers(1, 4),
        priority=st.integers(0, 2),
        threshold=st.sampled_from([0.5, 1.0]),
    )
    def add(self, prompt, max_tokens, loops, min_loops, priority, threshold):
        length = len(prompt)
        name = f"r{self.count}"
        self.count += 1
        request_params = params(max_tokens, loops, priority, min(min_loops, loops), threshold)
        if self.layout.most_pages(length + max_tokens, length, loops, self.size) > self.scheduler.supply.pool.total:
            with pytest.raises(ParamError, match="max_tokens: the request may need"):
                self.scheduler.add(name, list(prompt), request_params)
            return
        request = self.scheduler.add(name, list(prompt), request_params)
        self.models[name] = Model(request)

    @rule(data=st.data())
    def abort(self, data):
        live = [name for name, model in self.models.items() if not model.ended]
        if live:
            name = data.draw(st.sampled_from(live))
            assert self.scheduler.abort(name)
            assert not self.scheduler.abort(name)
            self.models[name].ended = True

    @rule(data=st.data())
    def tick(self, data):
        self.run_tick(lambda: data.draw(st.booleans()), lambda: data.draw(st.integers(0, 9)) == 0)

    def run_tick(self, draw_exit, draw_stop):
        plan = self.scheduler.plan()
        if plan:
            self.pending.append((plan, self.play(plan, draw_exit, draw_stop)))
        if self.pending and (len(self.pending) > self.lag or not plan):
            plan, results = self.pending.popleft()
            for out in self.scheduler.apply(plan, results):
                assert not self.models[out.request_id].ended, "output after the end"
                self.models[out.request_id].ended = out.finish_reason is not None

    def play(self, plan, draw_exit, draw_stop):
        assert plan.rows <= self.scheduler.policy.max_tick_tokens
        assert self.policy["preemption"] or not plan.suspensions
        for suspension in plan.suspensions:
            model = self.models[suspension.request.id]
            model.table = {}
        for place in [*plan.resumptions, *plan.admitted]:
            request = place if isinstance(place, Request) else place.request
            self.slots[request.slot] = request.id
            self.models[request.id].since_placed = 0
            self.admissions.append(request.number)
        for grant in plan.grants:
            self.models[self.slots[grant.slot]].table[grant.page_list, grant.place] = grant.page
        results = []
        for place, (request, slot) in enumerate(zip(plan.decode.requests, plan.decode.slots, strict=True)):
            assert self.slots[slot] == request.id
            model = self.models[request.id]
            model.since_placed += 1
            if not model.idle:
                self.decode(place, model, draw_exit(), draw_stop(), results)
        assert self.policy["mixed"] or not (plan.decode.slots and plan.prompts)
        place = len(plan.decode.slots)
        for segment in plan.prompts:
            model = self.models[segment.request.id]
            model.since_placed += 1
            prompt, loops = segment.request.prompt, segment.request.loops
            assert self.slots[segment.slot] == segment.request.id
            end = segment.first + len(segment.rows)
            assert segment.tokens == (prompt[segment.first : end] if segment.loop == 0 else [])
            for position in range(segment.first, segment.first + len(segment.rows)):
                self.prompt_row(model, position, segment)
            last = segment.first + len(segment.rows) == len(prompt) and segment.loop == loops - 1
            assert segment.samples == last
            if last:
                model.deeper, model.exited = [len(prompt)] * loops, [0] * loops
                results.append(self.token(place, model, loops, draw_stop()))
                place += 1
        return results

    def prompt_row(self, model, position, segment):
        assert (position, segment.loop) not in model.ran
        cached = model.request.cached_tokens
        assert segment.loop == 0 or (position, segment.loop - 1) in model.ran
        # Everything that it attends to is there: at the same loop, or (one plane for all) after all loops.
        before = segment.request.loops - 1 if self.layout.serial_prompt else segment.loop
        assert position <= cached or (position - 1, before) in model.ran
        model.ran.add((position, segment.loop))
        self.writes(model, segment.loop % self.layout.prompt_planes(segment.request.loops), position)
        if segment.loop in (0, segment.request.loops - 1):
            self.writes_outer(model, position)

    def writes_outer(self, model, position):
        """Layers before and after the loops store every token once."""
        for page_list in range(self.layout.outer):
            self.writes(model, page_list - self.layout.outer, position)

    def writes(self, model, page_list, index):
        """`page_list` is counted from the first plane on."""
        page_list += self.layout.outer
        page = model.table.get((page_list, index // self.size))
        assert page, "no page where the device writes"
        assert page in model.request.own_pages(), "the device writes to a page of somebody else"

    def decode(self, place, model, wants_exit, stop, results):
        loops, loop = model.request.loops, model.loop
        position = len(model.request.prompt) + model.tokens - 1
        self.writes_outer(model, position)
        if self.layout.exit_sorted:
            self.writes(model, loop, model.deeper[loop])
        else:
            self.writes(model, loop % self.layout.decode_planes(loops), position)
        model.loop += 1
        may_exit = model.loop >= model.request.params.min_loops and model.request.params.exit_threshold < 1
        if not (wants_exit and may_exit) and model.loop < loops:
            model.deeper[loop] += 1
            return
        if self.layout.exit_sorted and model.loop < loops:
            self.writes(model, loops + loop, model.exited[loop])
            model.exited[loop] += 1
        else:
            model.deeper[loop] += 1
            for plane in range(self.layout.decode_planes(loops) if not self.layout.exit_sorted else 0):
                self.writes(model, plane, position)
        results.append(self.token(place, model, model.loop, stop))

    def token(self, place, model, depth, stop):
        model.tokens += 1
        model.loop = 0
        end = END_LENGTH if model.tokens == model.request.params.max_tokens else END_NONE
        end = END_STOP if stop else end
        model.idle = end != END_NONE
        return RowResult(place, 0, depth, end)

    @invariant()
    def all_accounts_balance(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        live = {name for name, model in self.models.items() if not model.ended}
        assert live == set(self.scheduler.requests)
        for model in self.models.values():
            if model.request.stage in {Stage.FINISHED, Stage.SUSPENDED}:
                model.table = {}

    def teardown(self):
        """Whatever happened, everything left comes to its end and everything is given back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not (self.scheduler.has_work or self.pending):
                break
            self.run_tick(lambda: False, lambda: False)
            self.all_accounts_balance()
        assert not self.scheduler.has_work, "a request starved"
        supply = self.scheduler.supply
        if supply.prefix is not None:
            supply.prefix.reset()
        assert supply.pool.free == supply.pool.total
        for request in (model.request for model in self.models.values()):
            assert request.passed <= max(self.policy["max_bypass"], 0), "passed more often than the bound"


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def finish_tick(sched, *tokens):
    """Run one tick whose sampling rows all give token 0 and go on."""
    plan = sched.plan()
    first = len(plan.decode.slots)
    sched.apply(plan, [RowResult(first + i, 0, 1, END_NONE) for i in range(len(plan.sampling))])
    return plan


def test_decode_rows_come_first_and_prompts_fill_the_rest():
    sched = scheduler(max_seqs=2, max_tick_tokens=6, prefill_chunk=6)
    sched.add("a", [1], params(max_tokens=9, max_loops=1))
    finish_tick(sched)
    sched.add("b", list(range(20)), params(max_loops=1))
    plan = sched.plan()
    assert [r.id for r in plan.decode.requests] == ["a"]
    assert [(s.request.id, s.first, len(s.rows)) for s in plan.prompts] == [("b", 0, 5)]


def test_without_mixing_prompts_and_decode_rows_have_ticks_of_their_own():
    sched = scheduler(mixed=False)
    sched.add("a", [1], params(max_tokens=9, max_loops=1))
    finish_tick(sched)
    sched.add("b", [2], params(max_tokens=9, max_loops=1))
    plan = finish_tick(sched)
    assert (len(plan.decode.slots), len(plan.prompts)) == (0, 1)
    plan = finish_tick(sched)
    assert (len(plan.decode.slots), len(plan.prompts)) == (2, 0)


def test_a_request_enters_beside_one_that_is_between_loops():
    sched = scheduler()
    sched.add("a", [1, 2], params(max_loops=3))
    finish_tick(sched)
    sched.add("b", [3], params(max_loops=3))
    assert [(s.request.id, s.loop) for s in sched.plan().prompts] == [("a", 1), ("b", 0)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("outer", [0, 1, 3])
def test_the_limits_of_a_request_are_true(layout, outer):
    """As many positions as `most_tokens` says really fit, and a few more pages' worth does not."""
    kind = parse_layout(layout, outer)
    for pages in range(1, 60):
        for loops in (1, 3, 4):
            tokens = kind.most_tokens(pages, loops, 4)
            if tokens > 1:
                assert kind.most_pages(tokens, tokens - 1, loops, 4) <= pages
            beyond = tokens + 4 * SUPPLY_AHEAD + 4
            assert kind.most_pages(beyond, beyond - 1, loops, 4) > pages


@pytest.mark.parametrize(("wavefront", "expected"), [(True, [[(0, 1), (2, 0)], 4]), (False, [[(0, 1)], 6])])
def test_wavefront_runs_chunks_at_different_loops_together(wavefront, expected):
    sched = scheduler(prefill_chunk=2, wavefront=wavefront)
    sched.add("a", [1, 2, 3, 4], params(max_loops=3, max_tokens=1))
    finish_tick(sched)
    plan = finish_tick(sched)
    ticks = 2
    while not plan.sampling:
        if ticks == 2:
            assert [(s.first, s.loop) for s in plan.prompts] == expected[0]
        plan = finish_tick(sched)
        ticks += 1
    assert ticks == expected[1]


def test_small_requests_pass_a_big_one_up_to_the_bound():
    sched = scheduler(pages=20, preemption=False, layout="last_exited_copy", max_seqs=2, max_bypass=2)
    sched.add("a", [1] * 8, params(max_tokens=8, max_loops=3))
    finish_tick(sched)
    big = sched.add("big", [1] * 12, params(max_tokens=8, max_loops=3))
    for name in "bcd":
        sched.add(name, [1], params(max_tokens=3, max_loops=1))
    order = []
    for _ in range(40):
        plan = sched.plan()
        order += [r.id for r in plan.admitted]
        ends = [RowResult(i, 0, 1, END_LENGTH) for i, r in enumerate(plan.decode.requests) if r.id != "a"]
        first = len(plan.decode.slots)
        ends += [
            RowResult(first + i, 0, 1, END_LENGTH if r.id != "a" else END_NONE) for i, r in enumerate(plan.sampling)
        ]
        sched.apply(plan, ends)
        if order[-1:] == ["c"]:
            assert big.urgent
    assert order == ["b", "c"], "d must not pass the big one"
    sched.abort("a")
    assert [r.id for r in sched.plan().admitted] == ["big", "d"]


def test_priority_suspends_the_less_important_and_lets_it_come_back():
    sched = scheduler(max_seqs=1, priority=True)
    low = sched.add("low", [1], params(max_tokens=9, max_loops=1, priority=5))
    finish_tick(sched)
    finish_tick(sched)
    sched.add("high", [1], params(max_tokens=1, max_loops=1, priority=1))
    plan = sched.plan()
    assert [s.request.id for s in plan.suspensions] == ["low"]
    assert [r.id for r in plan.admitted] == ["high"]
    assert low.stage is Stage.SUSPENDED
    sched.apply(plan, [RowResult(0, 0, 1, END_LENGTH)])
    plan = sched.plan()
    assert [r.request.id for r in plan.resumptions] == ["low"]
    assert low.stage is Stage.DECODE


def test_a_late_result_ends_a_suspended_request():
    sched = scheduler(max_seqs=1, priority=True, lag=1)
    sched.add("low", [1], params(max_tokens=2, max_loops=1, priority=5))
    first = sched.plan()
    second = sched.plan()
    sched.apply(first, [RowResult(0, 0, 1, END_NONE)])
    sched.add("high", [1], params(max_tokens=1, max_loops=1, priority=1))
    third = sched.plan()
    assert [s.request.id for s in third.suspensions] == ["low"]
    (out,) = sched.apply(second, [RowResult(0, 0, 1, END_LENGTH)])
    assert (out.request_id, out.finish_reason) == ("low", "length")
    assert "low" not in sched.requests
    sched.check_integrity()


def test_a_result_goes_to_the_request_that_had_the_row_not_to_the_slots_new_owner():
    sched = scheduler(max_seqs=1, lag=1)
    sched.add("old", [1], params(max_tokens=9, max_loops=1))
    sched.apply(sched.plan(), [RowResult(0, 0, 1, END_NONE)])
    under_way = sched.plan()
    sched.abort("old")
    new = sched.add("new", [1], params(max_tokens=9, max_loops=1))
    assert sched.plan().admitted == [new]
    assert sched.apply(under_way, [RowResult(0, 5, 1, END_NONE)]) == []
    assert new.generated == 0


def test_pages_rest_until_the_ticks_under_way_have_ended():
    pool = PagePool(2)
    pages = pool.allocate(2)
    pool.submitted(1)
    pool.release(pages)
    assert (pool.free, pool.resting) == (0, 2)
    pool.submitted(2)
    pool.ended(1)
    assert (pool.free, pool.resting) == (2, 0)
    pool.check_integrity([])


def test_pool_refuses_what_it_has_not():
    pool = PagePool(2)
    pages = pool.allocate(2)
    assert 0 not in pages
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    pool.release(pages)
    pool.check_integrity([])


def test_duplicate_id_is_refused():
    sched = scheduler()
    sched.add("a", [1], params())
    with pytest.raises(ValueError, match="in use"):
        sched.add("a", [1], params())


def test_stages_only_move_as_the_table_says():
    request = scheduler().add("a", [1], params())
    with pytest.raises(AssertionError, match="no transition"):
        request.move(Stage.DECODE)


def test_a_request_that_needs_the_whole_pool_comes_back():
    """Nobody else runs: then nothing has to be left to grow into."""
    sched = scheduler(pages=26, layout="last_exited_copy", max_seqs=2, max_tick_tokens=24, prefill_chunk=20)
    sched.add("small", [1, 2], params(max_tokens=8, max_loops=1))
    big = sched.add("big", list(range(20)), params(max_tokens=4, max_loops=4))
    for _ in range(200):
        plan = sched.plan()
        rows = plan.decode.requests
        done = [
            RowResult(i, 0, r.loops, END_LENGTH if r.generated == r.params.max_tokens - 1 else END_NONE)
            for i, r in enumerate(rows)
        ]
        first = len(rows)
        done += [RowResult(first + i, 0, r.loops, END_NONE) for i, r in enumerate(plan.sampling)]
        sched.apply(
            plan,
            [
                result
                for result in done
                if result.place >= first or rows[result.place].loops == 1 or plan.number % 4 == 0
            ],
        )
        sched.check_integrity()
        if not sched.has_work:
            break
    assert big.stage is Stage.FINISHED


def test_nobody_is_suspended_for_a_request_that_would_still_not_fit():
    sched = scheduler(
        pages=24, layout="last_exited_copy", priority=True, max_seqs=3, max_tick_tokens=40, prefill_chunk=20
    )
    sched.add("first", [1] * 4, params(max_tokens=20, max_loops=3, priority=0))
    sched.add("last", [2] * 4, params(max_tokens=4, max_loops=3, priority=5))
    for _ in range(6):
        finish_tick(sched)
    sched.add("big", [3] * 28, params(max_tokens=4, max_loops=3, priority=1))
    for _ in range(20):
        finish_tick(sched)
    assert sched.preemptions == 0


def test_numbers_that_are_not_finite_leave_nothing_in_the_cache():
    prompt = list(range(9))
    sched = scheduler(cache=True, lag=1, max_tick_tokens=16, prefill_chunk=9)
    sched.add("bad", prompt, params(max_loops=1, max_tokens=4))
    first = sched.plan()
    second = sched.plan()
    (out,) = sched.apply(first, [RowResult(0, 0, 1, END_NOT_FINITE)])
    assert out.finish_reason == "error"
    sched.apply(second, [])
    again = sched.add("again", prompt, params(max_loops=1, max_tokens=4))
    sched.plan()
    assert again.cached_tokens == 0
    sched.check_integrity()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_request_of_one_token_leaves_its_prompt_in_the_cache(lag):
    prompt = list(range(9))
    sched = scheduler(cache=True, lag=lag, max_tick_tokens=16, prefill_chunk=9)
    sched.add("one", prompt, params(max_loops=1, max_tokens=1))
    plans = [sched.plan() for _ in range(1 + lag)]
    for index, plan in enumerate(plans):
        sched.apply(plan, [RowResult(0, 0, 1, END_LENGTH)] if index == 0 else [])
    again = sched.add("again", prompt, params(max_loops=1, max_tokens=1))
    sched.plan()
    assert again.cached_tokens == 8


def test_equal_prompts_at_once_without_preemption_keep_what_was_promised():
    for pages in range(100, 116):
        sched = scheduler(
            pages=pages, layout="last_exited_copy", cache=True, preemption=False,
            wavefront=False, max_seqs=4, max_tick_tokens=60, prefill_chunk=17,
        )  # fmt: skip
        prompt = list(range(40))
        sched.add("a", prompt[:17], params(max_tokens=4, max_loops=4))
        sched.add("b", prompt, params(max_tokens=4, max_loops=4))
        for tick in range(300):
            if tick == 5:
                sched.add("c", [99] * 12, params(max_tokens=4, max_loops=4))
            plan = sched.plan()
            first = len(plan.decode.slots)
            ends = [
                RowResult(i, 0, 1, END_LENGTH if r.generated > 2 else END_NONE)
                for i, r in enumerate(plan.decode.requests)
            ]
            sched.apply(plan, ends + [RowResult(first + i, 0, 4, END_NONE) for i in range(len(plan.sampling))])
            sched.check_integrity()
            if tick > 5 and not sched.has_work:
                break
        assert not sched.has_work
