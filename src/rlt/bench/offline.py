"""Measurements of the engine in this process: steps at a fixed batch, and a whole batch of requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlt.bench.numbers import spread_ms, tails_ms
from rlt_protocols.params import SamplingParams

if TYPE_CHECKING:
    from rlt.llm import LLM


def latency(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, repeats: int) -> dict[str, Any]:
    """Time to the first token and of every following step, for the prompts run together `repeats` times.

    A first run, not counted, warms up. `step_ms` is the time between two tokens of one request, so all rows of a tick
    are in it; `context` is the length that attention reads halfway through the output.
    """
    firsts: list[float] = []
    gaps: list[float] = []
    wall_s = 0.0
    tokens = 0
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        seen = _arrivals(llm, prompts, params)
        if repeat == 0:
            continue
        wall_s += time.perf_counter() - start
        for times in seen:
            firsts.append(times[0] - start)
            gaps += [after - before for before, after in zip(times, times[1:], strict=False)]
            tokens += len(times)
    length = len(prompts[0])
    result: dict[str, Any] = {
        "shape": llm.info.name,
        "rows": len(prompts),
        "context": length + (params.max_tokens or 0) // 2,
        "ttft_ms": tails_ms(firsts),
        "tokens_per_s": round(tokens / wall_s, 3),
    }
    if gaps:
        result |= {"step_ms": spread_ms(gaps), "itl_ms": tails_ms(gaps)}
    return result
