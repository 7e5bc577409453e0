from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from frontend.harness import served
from rlt_protocols.engine import EngineStats


def values_of(text: str) -> dict[str, float]:
    """Samples by name and labels other than the model's."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            assert sample.labels["model_name"] == "tiny"
            suffix = "".join(f",{name}={value}" for name, value in sorted(labels.items()))
            values[sample.name + suffix] = sample.value
    return values


def stats(engine: int = 0, *, running: int = 2, decode: int = 10) -> EngineStats:
    return EngineStats(
        engine=engine,
        running=running,
        waiting=1,
        kv_pages={"free": 30, "used": 10},
        ticks=5,
        tick_rows={"decode": decode, "prefill": 4},
        tick_seconds=(0.002, 0.2),
    )


async def test_requests_and_tokens() -> None:
    async with served() as server:
        await server.complete()
        await server.complete(stream=True)
        response = await server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "_created" not in response.text
    values = values_of(response.text)
    assert values["rlt:generation_tokens_total"] == 6
    assert values["rlt:prompt_tokens_total"] > 0
    assert values["rlt:request_success_total,finished_reason=stop"] == 2
    assert values["rlt:time_to_first_token_seconds_count"] == 2
    assert values["rlt:inter_token_latency_seconds_count"] == 4
    assert values["rlt:e2e_request_latency_seconds_count"] == 2
    assert values["rlt:loops_per_token_sum"] == 12
    assert values["rlt:loops_per_token_bucket,le=2.0"] == 4
    assert "rlt:time_to_first_token_seconds_bucket,le=0.001" in values


async def test_reports_of_the_engines() -> None:
    async with served() as server:
        server.client.on_stats(stats())
        server.client.on_stats(stats(decode=16))
        server.client.on_stats(stats(1, running=3))
        values = values_of((await server.http.get("/metrics")).text)
        assert values["rlt:num_requests_running"] == 5
        assert values["rlt:num_requests_waiting"] == 2
        assert values["rlt:kv_cache_usage_perc"] == 0.25
        assert values["rlt:kv_pages,state=free"] == 60
        assert values["rlt:tick_rows_total,kind=decode"] == 26
        assert values["rlt:tick_rows_total,kind=prefill"] == 8
        assert values["rlt:tick_seconds_count"] == 6

        # a restarted engine counts from zero
        server.down("engine")
        server.client.on_stats(stats(decode=3))
        server.down("engine", 1)
        values = values_of((await server.http.get("/metrics")).text)
        assert values["rlt:tick_rows_total,kind=decode"] == 29
        assert values["rlt:num_requests_running"] == 2
        server.down("engine")
        values = values_of((await server.http.get("/metrics")).text)
        assert values["rlt:kv_pages,state=used"] == 0
        assert values["rlt:kv_cache_usage_perc"] == 0


async def test_before_the_model_is_known() -> None:
    async with served(up=False) as server:
        text = (await server.http.get("/metrics")).text
        assert "# TYPE rlt:num_requests_running gauge" in text
        assert values_of(text) == {}
        # an engine's first report can arrive before the news of the engine
        server.client.on_stats(stats())
        server.up("engine")
        server.client.on_stats(stats())
        values = values_of((await server.http.get("/metrics")).text)
        assert values["rlt:tick_rows_total,kind=decode"] == 10


async def test_reasons_other_than_the_models_own() -> None:
    async with served(finish_reason="error", error="x") as server:
        await server.complete()
        values = values_of((await server.http.get("/metrics")).text)
        assert values["rlt:request_success_total,finished_reason=error"] == 1
