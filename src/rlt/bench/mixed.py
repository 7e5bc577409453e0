"""Throughput and inter-token times of decoding requests while long prompts arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlt.bench.numbers import percentile, tails_ms
from rlt.engine import Engine
from rlt_protocols.params import SamplingParams, resolve


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """Short prompts that decode from the start, and long ones that arrive one by one at fixed times."""

    short: Sequence[list[int]]
    params: SamplingParams
    long: Sequence[list[int]]
    long_params: SamplingParams
    #: seconds between two arrivals; the first comes after one interval
    every_s: float


def measure(engine: Engine, load: MixedLoad) -> dict[str, Any]:
    """Run the load to its end.

    `itl_ms` is the time between two tokens of the short requests' answers, of those pairs between which a long prompt
    was being read: that is when prompts and decoding compete.
    """
    for index, prompt in enumerate(load.short):
        engine.add(f"short-{index}", prompt, resolve(load.params, engine.info, len(prompt), random_seed=0))
    waiting = [(f"long-{index}", prompt) for index, prompt in enumerate(load.long)]
    reading: set[str] = set()
    last: dict[str, float] = {}
    read_s = 0.0
    gaps: list[float] = []
    tokens = 0
    start = time.perf_counter()
    due = start + load.every_s
    while engine.has_work or waiting:
        now = time.perf_counter()
        if waiting and now >= due:
            name, prompt = waiting.pop(0)
            engine.add(name, prompt, resolve(load.long_params, engine.info, len(prompt), random_seed=0))
            reading.add(name)
            due += load.every_s
        elif not engine.has_work:
            time.sleep(due - now)
            continue
        if reading:
            read_s = time.perf_counter()
        for out in engine.step():
            now = time.perf_counter()
            tokens += len(out.token_ids)
            before = last.get(out.request_id)
            if before is not None and before <= read_s and out.request_id.startswith("short"):
                gaps.append(now - before)
            last[out.request_id] = now
            reading.discard(out.request_id)
    wall_s = time.perf_counter() - start
    prompt_tokens = sum(map(len, load.short)) + sum(map(len, load.long))
    return {
        "requests": len(load.short) + len(load.long),
        "wall_s": round(wall_s, 3),
        "output_tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "tokens_per_s": round(tokens / wall_s, 2),
        "total_tokens_per_s": round((tokens + prompt_tokens) / wall_s, 2),
        "itl_ms": tails_ms(gaps),
    }


def compare(engines: dict[str, Engine], load: MixedLoad, repeats: int) -> dict[str, Any]:
    """Run the load `repeats` times on each engine in turn; per engine the run of median rate, and the ratios.

    `ratios` are the first engine's figures over the second's, run by run: tokens per second, p99 inter-token time.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for engine in engines.values():
        warm_up(engine, load)
    for _ in range(repeats):
        for name, engine in engines.items():
            runs[name].append(measure(engine, load))
            prefix = engine.scheduler.supply.prefix
            if prefix is not None:
                prefix.reset()
    results: dict[str, Any] = {}
    for name, rows in runs.items():
        ordered = sorted(rows, key=lambda row: row["tokens_per_s"])
        results[name] = ordered[len(ordered) // 2] | {"all_tokens_per_s": [row["tokens_per_s"] for row in rows]}
    if len(runs) == 2:
        first, other = runs.values()
        results["ratios"] = {
            "tokens_per_s": _pairwise(first, other, lambda row: row["tokens_per_s"]),
            "itl_p99": _pairwise(first, other, lambda row: row["itl_ms"]["p99"]),
        }
    return results


def _pairwise(
    first: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], figure: Callable[[dict[str, Any]], float]
) -> dict[str, float]:
    """Median, smallest and largest ratio of runs that followed each other, so that a drifting machine cancels out."""
    ratios = sorted(figure(a) / figure(b) for a, b in zip(first, other, strict=True))
    return {"median": round(percentile(ratios, 50), 3), "min": round(ratios[0], 3), "max": round(ratios[-1], 3)}


def warm_up(engine: Engine, load: MixedLoad) -> None:
    """A few short requests, so that the first measured tick is like the others."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(load.short[:2]):
        engine.add(f"warm-{index}", prompt, resolve(params, engine.info, len(prompt), random_seed=0))
    while engine.has_work:
        engine.step()
