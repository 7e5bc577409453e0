"""Load for an OpenAI-compatible server: streamed completions at a rate or a concurrency, timed as clients see them."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from rlt.bench.numbers import tails_ms
from rlt.errors import RltError


class BenchError(RltError):
    """A measurement could not be made."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and when.

    With a `rate` (requests per second) requests arrive at random (Poisson) whatever the server does, and their time
    counts from the arrival, so waiting for one of `concurrency` places is part of the latency. Without one, the next
    request is sent when a place is free. `concurrency` None sets no limit.
    """

    base_url: str
    model: str | None
    prompts: Sequence[str | list[int]]
    max_tokens: int
    concurrency: int | None
    rate: float | None = None
    seed: int = 0
    #: more fields of the request body, such as temperature or max_loops
    fields: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout_s: float = 600.0


@dataclass(slots=True)
class Timing:
    """One request as its client saw it: seconds after the start of the run, None where it did not come so far."""

    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    loops: int | None = None
    error: str | None = None


async def measure(load: Load) -> dict[str, Any]:
    """Send the load and summarise it (see `summary`). Raises `BenchError` when the server cannot be used at all."""
    limits = httpx.Limits(max_connections=load.concurrency, max_keepalive_connections=load.concurrency)
    headers = {} if load.api_key is None else {"Authorization": f"Bearer {load.api_key}"}
    async with httpx.AsyncClient(
        base_url=load.base_url, limits=limits, headers=headers, timeout=load.timeout_s, trust_env=False
    ) as client:
        model = load.model or await _only_model(client)
        gate = asyncio.Semaphore(load.concurrency or len(load.prompts))
        start = time.perf_counter()

        async def limited(prompt: str | list[int], arrival_s: float | None) -> Timing:
            async with gate:
                sent_s = time.perf_counter() - start if arrival_s is None else arrival_s
                return await _request(client, {**_body(load, model), "prompt": prompt}, start, sent_s)

        async with asyncio.TaskGroup() as group:
            tasks = []
            for prompt, arrival_s in zip(load.prompts, _arrivals(load), strict=True):
                if arrival_s is not None:
                    await asyncio.sleep(arrival_s - (time.perf_counter() - start))
                tasks.append(group.create_task(limited(prompt, arrival_s)))
        wall_s = time.perf_counter() - start
    return {"model": model, **summary([task.result() for task in tasks], wall_s)}


def summary(timings: Sequence[Timing], wall_s: float) -> dict[str, Any]:
    """Counts, rates and latencies of a run that took `wall_s` seconds; a failed request only counts as failed."""
    good = [timing for timing in timings if timing.error is None]
    errors = [timing.error for timing in timings if timing.error is not None]
    tokens = sum(timing.tokens for timing in good)
    result: dict[str, Any] = {
        "requests": len(timings),
        "failed": len(errors),
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(good) / wall_s, 3),
        "prompt_tokens": sum(timing.prompt_tokens for timing in good),
        "output_tokens": tokens,
        "tokens_per_s": round(tokens / wall_s, 3),
    }
    if good:
        result["ttft_ms"] = tails_ms([timing.first_s - timing.sent_s for timing in good if timing.first_s is not None])
        result["e2e_ms"] = tails_ms([timing.last_s - timing.sent_s for timing in good if timing.last_s is not None])
    gaps = [gap for timing in good for gap in timing.gaps_s]
    if gaps:
        result["itl_ms"] = tails_ms(gaps)
    if tokens and good and all(timing.loops is not None for timing in good):
        result["mean_loops"] = round(sum(timing.loops or 0 for timing in good) / tokens, 4)
    if errors:
        result["first_error"] = errors[0]
    return result


def _arrivals(load: Load) -> list[float] | list[None]:
    """Seconds after the start at which each request arrives, or None where it is sent when there is a place."""
    if load.rate is None:
        return [None] * len(load.prompts)
    rng = Random(load.seed)
    return list(itertools.accumulate(rng.expovariate(load.rate) for _ in load.prompts))


def _body(load: Load, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": load.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **load.fields,
    }


async def _only_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        answer = f"answers {error.response.status_code}: {error_text(error.response.content)}"
        hint = "; give --model" if error.response.status_code == 404 else ""
        raise BenchError(f"{client.base_url}: /v1/models {answer}{hint}") from error
    except httpx.HTTPError as error:
        raise BenchError(
            f"{client.base_url}: no server answers there ({error}); start one or check --base-url"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(f"{client.base_url}: /v1/models does not list a model; give --model") from error


async def _request(client: httpx.AsyncClient, body: dict[str, Any], start: float, sent_s: float) -> Timing:
    """Stream one completion; whatever goes wrong is the timing's `error`, since a load test must outlive it."""
    timing = Timing(sent_s=sent_s)
    finished = False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                timing.error = f"HTTP {response.status_code}: {error_text(await response.aread())}"
                return timing
            async for event in _events(response):
                now = time.perf_counter() - start
                if "error" in event:
                    timing.error = str(event["error"].get("message", event["error"]))
                    return timing
                if event.get("choices"):
                    if timing.last_s is None:
                        timing.first_s = now
                    else:
                        timing.gaps_s.append(now - timing.last_s)
                    timing.last_s = now
                    finished = finished or event["choices"][0].get("finish_reason") is not None
                _count(timing, event.get("usage"))
    except httpx.HTTPError as error:
        timing.error = f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        timing.error = f"an answer that is not a streamed completion ({error!r})"
    if timing.error is None and not finished:
        timing.error = "the stream ended before the completion did"
    return timing


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            text = line.removeprefix("data:").strip()
            # Read on after the end mark: only a stream that is read out leaves its connection to the next request.
            if text != "[DONE]":
                yield json.loads(text)


def _count(timing: Timing, usage: dict[str, Any] | None) -> None:
    if usage:
        timing.prompt_tokens = int(usage["prompt_tokens"])
        timing.tokens = int(usage["completion_tokens"])
        if "loops" in usage:
            timing.loops = int(usage["loops"]["total"])


def error_text(content: bytes) -> str:
    """The message of an error body, or the start of whatever came instead, in one line."""
    try:
        text = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = content.decode("utf-8", errors="replace")
    return " ".join(text.split())[:200] or "nothing"
