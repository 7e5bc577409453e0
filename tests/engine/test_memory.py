"""Memory follows the depth that tokens really use."""

from __future__ import annotations

import json

import pytest

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
