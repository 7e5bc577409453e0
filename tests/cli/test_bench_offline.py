from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import Golden
from rlt.bench.offline import fixed_length, latency, throughput
from rlt.cli.main import main
from rlt_protocols.params import SamplingParams


class Steady:
    """A model that takes 5 ms per step for all requests together, and 20 ms for the very first one ever."""

    info = SimpleNamespace(name="steady", loops=4)

    def __init__(self) -> None:
        self.runs: list[SamplingParams] = []

    def stream(self, prompts: list[list[int]], params: SamplingParams) -> Any:
        time.sleep(0.0 if self.runs else 0.02)
        self.runs.append(params)
        for _ in range(params.max_tokens or 0):
            time.sleep(0.005)
            for index in range(len(prompts)):
                yield SimpleNamespace(index=index, text="", token_ids=(1,), depths=(2,))

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        rows = [SimpleNamespace(token_ids=[], depths=[]) for _ in prompts]
        for delta in self.stream(prompts, params):
            rows[delta.index].token_ids += delta.token_ids
            rows[delta.index].depths += delta.depths
        return [SimpleNamespace(outputs=[row]) for row in rows]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words])
    return int(caught.value.code or 0)


def test_latency_leaves_out_the_warm_up() -> None:
    llm: Any = Steady()
    result = latency(llm, [[5] * 10, [6] * 10], fixed_length(4, None), repeats=2)
    assert len(llm.runs) == 3
    assert (result["shape"], result["rows"], result["context"], result["mean_loops"]) == ("steady", 2, 12, 2.0)
    assert 5 <= result["ttft_ms"]["p50"] < 20
    assert 5 <= result["step_ms"]["p10"] <= result["step_ms"]["median"] <= result["step_ms"]["p90"]
    assert result["itl_ms"]["p50"] == result["step_ms"]["median"]
    assert 100 < result["tokens_per_s"] <= 400


def test_a_single_token_has_no_steps() -> None:
    llm: Any = Steady()
    assert not {"step_ms", "itl_ms"} & latency(llm, [[5]], fixed_length(1, 2), repeats=1).keys()


def test_throughput_counts_all_tokens() -> None:
    llm: Any = Steady()
    result = throughput(llm, [[5] * 10] * 3, fixed_length(4, None))
    assert (result["requests"], result["prompt_tokens"], result["output_tokens"]) == (3, 30, 12)
    assert result["tokens_per_s"] == pytest.approx(12 / result["wall_s"], rel=0.05)
    assert result["total_tokens_per_s"] == pytest.approx(42 / result["wall_s"], rel=0.05)


def test_a_fixed_length_ignores_ends_and_fixes_the_depth() -> None:
    assert fixed_length(8, None) == SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    assert fixed_length(8, 3) == SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, min_loops=3, max_loops=3
    )


@pytest.fixture
def model(ouro_golden: Golden) -> list[str]:
    settings = "--device cpu --dtype float32 --set kv.pages=400 --prompt-tokens 8 --max-tokens 6"
    return ["--model", str(ouro_golden.directory), *settings.split()]


def test_latency_of_a_real_model(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("latency", *model, "--batch", "2", "--repeats", "2", "--loops", "3", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    keys = {"shape", "rows", "context", "step_ms", "tokens_per_s", "ttft_ms", "itl_ms", "config", "env", "command"}
    assert keys <= result.keys()
    assert (result["shape"], result["rows"], result["context"], result["mean_loops"]) == ("ouro-tiny", 2, 11, 3.0)
    assert all(math.isfinite(value) and value > 0 for value in result["step_ms"].values())
    assert result["config"]["kv"]["pages"] == 400
    assert result["env"]["torch"]
    assert result["command"].startswith("rlt ")


def test_throughput_of_a_real_model(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("throughput", *model, "--requests", "5", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["requests"], result["output_tokens"], result["mean_loops"]) == (5, 30, 4.0)
    assert result["tokens_per_s"] > 0


def test_a_table_is_printed_for_people(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("throughput", *model, "--requests", "2") == 0
    out = capsys.readouterr().out
    assert "tokens_per_s" in out
    assert "torch" in out
