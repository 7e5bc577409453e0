"""Prometheus metrics: vLLM's names with the prefix `rlt:`, and what is particular to loops."""

from __future__ import annotations

import time

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from rlt_protocols.engine import EngineStats
from rlt_protocols.text import TextDelta
from rltd.frontend.job import Choice

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TICK_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LOOPS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)


class Metrics:
    """All metrics of one frontend, in a registry of their own. The first engine's model name becomes their label."""

    def __init__(self) -> None:
        # Without the extra series that tells when each counter was made.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._name = ""
        self._stats: dict[int, EngineStats] = {}
        self._states: set[str] = set()
        self._running = self._gauge("num_requests_running", "Requests in the engines' batches.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for a place in a batch.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache's pages that requests use, 0 to 1.")
        self._pages = self._gauge("kv_pages", "Pages of the KV cache by state.", "state")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = self._counter("request_success", "Finished requests by reason.", "finished_reason")
        self._rows = self._counter("tick_rows", "Rows of executed ticks by kind.", "kind")
        self._first = self._histogram("time_to_first_token_seconds", "Request to first token.", _LATENCY_S)
        self._between = self._histogram("inter_token_latency_seconds", "One token to the next.", _LATENCY_S)
        self._whole = self._histogram("e2e_request_latency_seconds", "Request to final event.", _LATENCY_S)
        self._loops = self._histogram("loops_per_token", "Loops that a generated token ran.", _LOOPS)
        self._ticks = self._histogram("tick_seconds", "Wall time of one tick.", _TICK_S)

    def bind(self, model_name: str) -> None:
        """Set the `model_name` label; the plain series appear with their zeros."""
        self._name = model_name
        for metric in (self._running, self._waiting, self._kv_usage, self._prompt_tokens, self._tokens):
            metric.labels(model_name)
        for histogram in (self._first, self._between, self._whole, self._loops, self._ticks):
            histogram.labels(model_name)

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self._registry)

    def prompt_tokens(self, count: int) -> None:
        self._prompt_tokens.labels(self._name).inc(count)

    def delta(self, choice: Choice, delta: TextDelta, now_s: float) -> None:
        """Count new tokens; `choice` still has the times of the tokens before."""
        count = len(delta.token_ids)
        if not count:
            return
        self._tokens.labels(self._name).inc(count)
        if choice.last_s is None:
            self._first.labels(self._name).observe(now_s - choice.started_s)
        else:
            between = self._between.labels(self._name)
            for _ in range(count):
                between.observe((now_s - choice.last_s) / count)
        loops = self._loops.labels(self._name)
        for depth in delta.depths:
            loops.observe(depth)

    def finished(self, choice: Choice, reason: str) -> None:
        self._success.labels(self._name, reason).inc()
        self._whole.labels(self._name).observe(time.monotonic() - choice.started_s)

    def engine_stats(self, stats: EngineStats) -> None:
        """Take an engine's report; its counters run from its start, ours from the frontend's.

        A report that overtook the news of its engine is left out: the next one has all counts again.
        """
        if not self._name:
            return
        before = self._stats.get(stats.engine)
        self._stats[stats.engine] = stats
        for kind, rows in stats.tick_rows.items():
            old = before.tick_rows.get(kind, 0) if before is not None else 0
            self._rows.labels(self._name, kind).inc(max(0, rows - old))
        for seconds in stats.tick_seconds:
            self._ticks.labels(self._name).observe(seconds)
        self._set_gauges()

    def engine_down(self, engine: int) -> None:
        """Forget a dead engine's figures; its successor counts from zero."""
        if self._stats.pop(engine, None) is not None:
            self._set_gauges()

    def _set_gauges(self) -> None:
        reports = self._stats.values()
        self._running.labels(self._name).set(sum(stats.running for stats in reports))
        self._waiting.labels(self._name).set(sum(stats.waiting for stats in reports))
        pages = dict.fromkeys(self._states, 0)
        for stats in reports:
            for state, count in stats.kv_pages.items():
                pages[state] = pages.get(state, 0) + count
        self._states.update(pages)
        for state, count in pages.items():
            self._pages.labels(self._name, state).set(count)
        total = sum(pages.values())
        self._kv_usage.labels(self._name).set(pages.get("used", 0) / total if total else 0)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"rlt:{name}", text, ("model_name", *labels), registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"rlt:{name}", text, ("model_name", *labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"rlt:{name}", text, ("model_name",), registry=self._registry, buckets=buckets)
