from __future__ import annotations

import json

import pytest
import torch

from rlt.bench import floor as floors
from rlt.bench.floor import Ceilings, StepWork, step_work
from rlt.cli.main import main
from rlt.synthetic.make import read_config
from rlt.synthetic.shapes import find_shape

#: Published numbers of (family, shape): weights in GB of bfloat16 per loop and outside of the loops, bytes of keys and
#: values of a position in one loop and outside, GFLOP of a token in one loop and outside, attention FLOP of a position.
PUBLISHED = {
    ("ouro", "1.4b"): (2.4667, 0.2013, 196_608, 0, 2.4663, 0.2013, 196_608),
    ("ouro", "2.6b"): (4.9333, 0.2013, 393_216, 0, 4.9325, 0.2013, 393_216),
    ("huginn", "0125"): (3.2747, 3.8552, 84_480, 84_480, 3.2744, 3.8550, 84_480),
    ("nanbeige", "3b"): (6.2980, 1.0208, 90_112, 0, 6.2977, 1.0208, 540_672),
}
#: a device whose memory is slow enough to be what counts, or its arithmetic
SLOW_MEMORY = Ceilings(1e9, 2e9, 1e15)
SLOW_MATHS = Ceilings(1e15, 1e15, 1e9)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "floor", *words])
    return int(caught.value.code or 0)


def work_of(family: str, shape: str) -> StepWork:
    config = dict(find_shape(family, shape).config) | {"torch_dtype": "bfloat16"}
    return step_work(read_config(config), torch.bfloat16)


@pytest.mark.parametrize(("family", "shape"), PUBLISHED)
def test_work_is_what_is_published_of_the_shapes(family: str, shape: str) -> None:
    looped, other, looped_kv, other_kv, looped_gflop, other_gflop, attention = PUBLISHED[family, shape]
    work = work_of(family, shape)
    assert work.looped_weights * 2 / 1e9 == pytest.approx(looped, abs=1e-4)
    assert work.other_weights * 2 / 1e9 == pytest.approx(other, abs=1e-4)
    assert (work.looped_kv_bytes, work.other_kv_bytes) == (looped_kv, other_kv)
    # Norms are read, but are no matrix products: a thousandth at most.
    assert 2 * work.looped_weights / 1e9 == pytest.approx(looped_gflop, rel=1e-3)
    assert 2 * work.other_weights / 1e9 == pytest.approx(other_gflop, rel=1e-3)
    assert work.looped_attention_flop == attention


def test_a_step_reads_weights_once_and_contexts_for_each_row() -> None:
    work = work_of("ouro", "1.4b")
    one, many = work.of(1, 512, 4), work.of(32, 512, 4)
    assert one.bytes == pytest.approx(4 * 2.46667e9 + 0.20132e9 + 512 * 786_432, rel=1e-4)
    assert many.bytes - one.bytes == 31 * 512 * 786_432
    assert many.flop == 32 * one.flop
    assert work.of(1, 512, 2.5).bytes < one.bytes


def test_the_slower_of_memory_and_arithmetic_is_the_floor() -> None:
    work = floors.Work(bytes=4e9, flop=8e9)
    assert SLOW_MEMORY.seconds(work) == 2.0
    assert SLOW_MATHS.seconds(work) == 8.0


def test_a_devices_rates_are_measured() -> None:
    ceilings = floors.measure_ceilings(torch.device("cpu"), torch.float32, repeats=2)
    assert min(ceilings) > 1e8


def test_the_command_prints_every_row_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(floors, "measure_ceilings", lambda device, dtype: SLOW_MEMORY)
    assert run("--model", "tiny-ouro", "--rows", "1,8", "--context", "100", "--device", "cpu", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["by_rows"].keys() == {"1", "8"}
    # 3.5 million weights in float32, of which the embedding is not read.
    assert result["by_rows"]["1"]["floor_ms"] == pytest.approx(result["by_rows"]["1"]["gigabytes"] / 2 * 1e3, rel=1e-2)
    assert result["loops"] == 4
    assert result["dtype"] == "float32"
    assert {"env", "command", "ceilings"} <= result.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rows", "1,x"), "--rows 1,x: must be numbers of at least 1"),
        (("--rows", "0"), "--rows 0: must be"),
        (("--loops", "9"), "--loops 9: the model has 4"),
    ],
)
def test_bad_options_are_named(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--device", "cpu", *words) != 0
    assert message in capsys.readouterr().err


def test_a_measured_step_stands_beside_its_floor() -> None:
    spec = read_config(dict(find_shape("ouro", "1.4b").config) | {"torch_dtype": "bfloat16"})
    measured = {"rows": 1, "context": 512, "mean_loops": 4.0, "step_ms": {"median": 10_470.0}}
    beside = floors.beside_floor(measured, spec, SLOW_MEMORY, torch.bfloat16)
    # 10.07 GB of weights and 0.4 GB of keys and values at 2 GB/s.
    assert beside["floor_ms"] == pytest.approx(5235, rel=1e-2)
    assert beside["floor_ratio"] == pytest.approx(0.5, rel=1e-2)
    assert floors.beside_floor({"rows": 1}, spec, SLOW_MEMORY, torch.bfloat16) == {}
