"""Measurements of the engine in this process: steps at a fixed batch, and a whole batch of requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlt.bench.numbers import spread_ms, tails_ms
from rlt_protocols.params import SamplingParams

if TYPE_CHECKING:
    from rlt.llm import LLM


def fixed_length(max_tokens: int, loops: int | None) -> SamplingParams:
    """Greedy parameters for exactly `max_tokens` tokens; `loops` None leaves the depth to the model's rule."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, min_loops=loops, max_loops=loops)


def latency(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, repeats: int) -> dict[str, Any]:
    """Time to the first token and of every following step, for prompts of one length run together `repeats` times.

    One more run before, not counted, warms up. `step_ms` is the time between two tokens of one request, so all rows of
    a step are in it; `context` is the mean length that attention reads during these steps.
    """
    firsts: list[float] = []
    gaps: list[float] = []
    tokens = loops = 0
    wall_s = 0.0
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        times: list[list[float]] = [[] for _ in prompts]
        depths = 0
        for delta in llm.stream(prompts, params):
            now = time.perf_counter()
            times[delta.index] += [now] * len(delta.token_ids)
            depths += sum(delta.depths)
        if repeat == 0:
            continue
        wall_s += time.perf_counter() - start
        firsts += [row[0] - start for row in times]
        gaps += [after - before for row in times for before, after in itertools.pairwise(row)]
        tokens += sum(map(len, times))
        loops += depths
    result: dict[str, Any] = {
        "shape": llm.info.name,
        "rows": len(prompts),
        "context": len(prompts[0]) + (params.max_tokens or 0) // 2,
        "tokens_per_s": round(tokens / wall_s, 3),
        "mean_loops": round(loops / tokens, 4),
        "ttft_ms": tails_ms(firsts),
    }
    if gaps:
        result |= {"step_ms": spread_ms(gaps), "itl_ms": tails_ms(gaps)}
    return result


def throughput(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Tokens per second when all prompts are handed over at once; two short requests before warm up."""
    llm.generate(prompts[:2], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    start = time.perf_counter()
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    wall_s = time.perf_counter() - start
    tokens = sum(len(output.token_ids) for output in outputs)
    prompt_tokens = sum(map(len, prompts))
    return {
        "shape": llm.info.name,
        "requests": len(prompts),
        "context": len(prompts[0]) + (params.max_tokens or 0) // 2,
        "wall_s": round(wall_s, 3),
        "prompt_tokens": prompt_tokens,
        "output_tokens": tokens,
        "requests_per_s": round(len(prompts) / wall_s, 3),
        "tokens_per_s": round(tokens / wall_s, 3),
        "total_tokens_per_s": round((tokens + prompt_tokens) / wall_s, 3),
        "mean_loops": round(sum(sum(output.depths) for output in outputs) / tokens, 4),
    }
