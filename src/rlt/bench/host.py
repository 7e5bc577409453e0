"""`rlt bench host`: what a tick costs on the host, without any device. No torch here."""

from __future__ import annotations

import statistics
import time
from typing import Any

from rlt.kv.book import PageBook
from rlt.kv.layout import Layout, parse_layout
from rlt.kv.pages import PagePool
from rlt.kv.prefix import PrefixCache
from rlt.sched.plan import END_NONE, RowResult, TickPlan
from rlt.sched.policy import Policy
from rlt.sched.scheduler import Scheduler
from rlt.sched.supply import PageSupply
from rlt_protocols.params import ResolvedParams

LOOPS = 4
PROMPT_TOKENS = 64
PAGE_SIZE = 16
#: of every this many decode rows, one leaves its loops in a tick, as at a mean depth of two
ROWS_PER_EXIT = 2


def measure(running: int, *, layout: str = "last_exited", ticks: int = 400) -> dict[str, Any]:
    """Median and p90 microseconds per tick of planning and of applying results, with `running` requests decoding.

    Every tick has one row of each request, half of the rows give a token (exits at all depths but the last), pages are
    supplied as they fill up, planning is one tick ahead of the results, and the prefix cache is on.
    """
    scheduler = _decoding(running, parse_layout(layout))
    plan_us, apply_us = [], []
    before = scheduler.plan()
    for tick in range(ticks):
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        results = [
            RowResult(place, 7, 1 + (tick + place) % (LOOPS - 1), END_NONE)
            for place in range(tick % ROWS_PER_EXIT, len(before.decode.slots), ROWS_PER_EXIT)
        ]
        ready = time.perf_counter()
        scheduler.apply(before, results)
        ended = time.perf_counter()
        plan_us.append((planned - start) * 1e6)
        apply_us.append((ended - ready) * 1e6)
        before = plan
    total = [a + b for a, b in zip(plan_us, apply_us, strict=True)]
    return {
        "running": running,
        "plan_us": _summary(plan_us),
        "apply_us": _summary(apply_us),
        "tick_us": _summary(total),
        "tick_us_mean": round(statistics.fmean(total), 1),
    }


def _summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": round(statistics.median(ordered), 1), "p90": round(ordered[int(len(ordered) * 0.9)], 1)}


def _decoding(running: int, layout: Layout) -> Scheduler:
    """A scheduler whose `running` requests are all past their prompts."""
    params = ResolvedParams(
        max_tokens=4096,
        min_tokens=0,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=0,
        end_token_ids=(),
        stop_token_ids=(),
        min_loops=1,
        max_loops=LOOPS,
        exit_threshold=0.5,
    )
    pool = PagePool(running * 1500 + 10_000)
    supply = PageSupply(
        pool=pool,
        prefix=PrefixCache(pool, PAGE_SIZE, "bench", layout.name),
        layout=layout,
        book=PageBook(layout, running, LOOPS, PAGE_SIZE),
        page_size=PAGE_SIZE,
        ahead=2,
        early_exits=False,
    )
    policy = Policy(max_seqs=running, max_tick_tokens=max(4096, running), prefill_chunk=256)
    scheduler = Scheduler(policy, supply)
    for number in range(running):
        # Prompts of different lengths, so that pages do not fill up all in the same tick.
        scheduler.add(f"r{number}", [number % 1000 + 1] * (PROMPT_TOKENS + number % PAGE_SIZE), params)
    while any(request.generated == 0 for request in scheduler.requests.values()):
        plan = scheduler.plan()
        scheduler.apply(plan, _first_tokens(plan))
    return scheduler


def _first_tokens(plan: TickPlan) -> list[RowResult]:
    first = len(plan.decode.slots)
    return [RowResult(first + index, 7, LOOPS, END_NONE) for index in range(len(plan.sampling))]
