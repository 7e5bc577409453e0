"""Memory follows the depth that tokens really use."""

from __future__ import annotations

import json

import pytest
import torch

from rlt.config import load_config
from rlt.engine import Engine
from rlt.exec import memory
from rlt.models.checkpoint import read_spec
from rlt.models.directory import resolve_model
from rltd.check import plan_memory
from support import resolved

TOKENS = 380


def peak_decode_pages(make_engine, tmp_path, layout):
    """Most pages held beyond the prompts', with depths 1, 2, 3, 4 in turn: a mean of 2.5 loops."""
    trace = tmp_path / "depths.json"
    trace.write_text(json.dumps({"depths": [[1, 2, 3, 4], [4, 1, 3, 2], [3, 2, 1, 4]]}))
    engine = make_engine(
        kv={"layout": layout, "prefix_cache": False, "page_size": 8},
        exit={"rule": "trace", "trace_file": str(trace)},
        engine={"async_scheduling": True},
    )
    pool = engine.scheduler.supply.pool
    for index in range(3):
        prompt = [5 + index] * 8
        engine.add(f"r{index}", prompt, resolved(engine, prompt, max_tokens=TOKENS))
    peak = depths = tokens = 0
    while engine.has_work:
        for out in engine.step():
            tokens += len(out.token_ids)
            depths += sum(out.depths)
        peak = max(peak, pool.used)
    assert depths / tokens == pytest.approx(2.5, abs=0.02)
    assert pool.free == pool.total
    return peak - 3 * 4


def test_exit_sorted_planes_take_at_most_seventy_percent_of_copies(make_engine, tmp_path):
    exit_sorted = peak_decode_pages(make_engine, tmp_path, "last_exited")
    copied = peak_decode_pages(make_engine, tmp_path, "last_exited_copy")
    assert exit_sorted <= 0.70 * copied, (exit_sorted, copied)


@pytest.mark.parametrize("model", ["tiny-ouro", "tiny-nanbeige", "tiny-huginn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", [{"pages": 100}, {"bytes": 30_000_000}, {"memory_fraction": 0.4}, {}], ids=str)
def test_the_plan_is_what_the_engine_takes(monkeypatch, model, dtype, kv):
    """Whatever gives the cache's size; a share of the free memory is one of what loading leaves."""
    sections = {"model": {"path": model, "dtype": dtype}, "engine": {"device": "cpu"}, "kv": kv}
    config, directory = load_config(overrides=sections), resolve_model(model)
    free_bytes = 100_000_000
    monkeypatch.setattr(memory, "_free_bytes", lambda device: free_bytes)
    plan = plan_memory(config, directory, read_spec(directory))
    free_bytes -= plan.weights_bytes
    engine = Engine(config)
    assert engine.scheduler.supply.pool.total == plan.pages
    # Page 0 is nobody's.
    taken = engine.runner.pool.keys[:, 1:].nbytes + engine.runner.pool.values[:, 1:].nbytes
    assert (taken, plan.dtype) == (plan.cache_bytes, dtype)
    assert engine.info.kv_tokens == plan.request_tokens


def test_free_memory_of_the_host_is_within_the_whole():
    assert 0 < memory._free_bytes(torch.device("cpu")) < memory._total_bytes(torch.device("cpu"))
