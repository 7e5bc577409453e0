"""`rlt make-checkpoint` end to end: what it writes runs, and has the agreement and the depth that were asked for."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from rlt import LLM, SamplingParams
from rlt.cli.main import main
from rlt.config import load_config
from rlt.errors import RltError
from rlt.synthetic import make


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small products run faster in one thread, above all beside other programs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rlt(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["make-checkpoint", *words])
    assert isinstance(end.value.code, int)
    return end.value.code


class Case(NamedTuple):
    family: str
    agreement: float
    mean_depth: float
    shallow: int
    loops: int


CASES = (Case("ouro", 0.8, 2.5, 1, 4), Case("huginn", 0.8, 4.0, 2, 8))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)
def test_agreement_and_depth_hold_in_the_engine(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--agreement", f"{case.agreement}", "--mean-depth", f"{case.mean_depth}")
    out = tmp_path / "model"
    assert rlt("--family", case.family, "--shape", "test", "--out", str(out), *asked, "--device", "cpu", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    measured = made["calibrated"]
    assert (measured["shallow"], measured["tokens"]) == (case.shallow, 512)
    assert measured["agreement"] == pytest.approx(case.agreement, abs=0.03)
    assert measured["depths"]["mean"] == pytest.approx(case.mean_depth, abs=0.1)
    assert json.loads((out / "synthetic.json").read_text())["calibrated"] == measured

    config = asdict(load_config(assignments=measured["settings"]))
    with LLM(str(out), device="cpu", dtype="float32", config=config) as llm:
        first = first_tokens(llm, case.shallow), first_tokens(llm, case.loops)
        same = sum(a == b for a, b in zip(*first, strict=True)) / len(first[0])
        # Other tokens than those of the calibration: the errors of two samples, about 0.03 together, three times.
        assert same == pytest.approx(case.agreement, abs=0.1)
        params = SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)
        depths = [d for o in llm.generate(prompts(32), params) for d in o.outputs[0].depths[1:]]
        # A text's tokens follow each other, and read what exited early: less even than random prompts.
        assert sum(depths) / len(depths) == pytest.approx(case.mean_depth, rel=0.2)
        assert len(set(depths)) >= 4


def test_a_small_mean_depth_needs_the_printed_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Huginn: from states of zeros, all tokens would leave after the first loop, or none."""
    words = ("--family", "huginn", "--shape", "test", "--mean-depth", "2.2", "--device", "cpu")
    assert rlt(*words, "--out", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    settings = json.loads((tmp_path / "synthetic.json").read_text())["calibrated"]["settings"]
    assert " ".join(f"--set {setting}" for setting in settings) in printed
    params = SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)
    with LLM(str(tmp_path), device="cpu", dtype="float32", config=asdict(load_config(assignments=settings))) as llm:
        depths = [d for o in llm.generate(prompts(16), params) for d in o.outputs[0].depths[1:]]
    assert sum(depths) / len(depths) == pytest.approx(2.2, rel=0.2)
    assert len(set(depths)) >= 3


def prompts(count: int) -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(3, 470) for _ in range(12)] for _ in range(count)]


def first_tokens(llm: LLM, loops: int) -> list[int]:
    """The best token after each prompt at this depth; prompts have no early exit."""
    params = SamplingParams(temperature=0.0, max_tokens=1, max_loops=loops, ignore_eos=True)
    return [output.outputs[0].token_ids[0] for output in llm.generate(prompts(200), params)]


def test_nanbeige(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert rlt("--family", "nanbeige", "--shape", "test", "--out", str(out), "--agreement", "0.9", "--device=cpu") == 0
    printed = capsys.readouterr().out
    assert "agreement of 1 and 2 loops" in printed
    assert "426,624" in printed
    with LLM(str(out), device="cpu") as llm:
        answer = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].outputs[0]
    assert answer.depths == [2] * 8
    assert answer.text


def test_a_long_calibration_is_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "seconds_per_pass", lambda files, shape, tokens: 75.0 * tokens / 64)
    words = ("--family", "huginn", "--shape", "test", "--mean-depth", "3", "--calibration-tokens", "64")
    assert rlt(*words, "--out", str(tmp_path), "--device", "cpu", "--json") == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("calibration on cpu: about 75 s a pass, 1 at most; a GPU (--device) or fewer ")
    assert json.loads(captured.out)["calibrated"]["passes"] == 1


def test_without_calibration_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--family", "ouro", "--shape", "test", "--out", str(tmp_path), "--dtype", "float32", "--json")
    assert rlt(*words) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["calibrated"] is None
    assert made["disk_bytes"] == 4 * made["parameters"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["torch_dtype"], config["early_exit_threshold"]) == ("float32", 1.0)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--family", "huge", "--shape", "1.4b"), "--family: 'huge' is not one of ouro, nanbeige, huginn"),
        (
            ("--family", "ouro", "--shape", "3b"),
            "--shape: '3b' is not a shape of ouro; there are 1.4b, 2.6b, test",
        ),
        (
            ("--family", "nanbeige", "--shape", "3b", "--mean-depth", "1.5"),
            "--mean-depth: a nanbeige model has no exit; every token runs all loops",
        ),
        (
            ("--family", "ouro", "--shape", "test", "--mean-depth", "4", "--agreement", "1.1"),
            "--agreement must be above 0 and at most 1, got 1.1\n"
            "--mean-depth must be above 1 and below the 4 loops, got 4",
        ),
        (("--family", "ouro", "--shape", "test", "--agreement", "nan"), "--agreement must be above 0 and at most 1"),
    ],
)
def test_what_cannot_be_made(
    words: tuple[str, ...], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert rlt(*words, "--out", str(out)) == 2
    assert capsys.readouterr().err.startswith(f"rlt: {error}")
    assert not out.exists()


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("mine")
    for out in (tmp_path, tmp_path / "config.json"):
        assert rlt("--family", "ouro", "--shape", "test", "--out", str(out)) == 2
        assert "is there and not empty" in capsys.readouterr().err
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]


def test_too_little_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type(usage)(usage.total, usage.used, 15_000_000_000))
    out = tmp_path / "deep" / "model"
    assert rlt("--family", "huginn", "--shape", "0125", "--out", str(out)) == 2
    assert f"--out: {tmp_path} has 15.0 GB free; the checkpoint needs 15.6 GB" in capsys.readouterr().err
    assert not out.exists()


def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RltError("--agreement 0.5 is not reached")

    monkeypatch.setattr(make, "calibrate", fail)
    words = ("--family", "ouro", "--shape", "test", "--agreement", "0.5", "--device", "cpu")
    assert rlt(*words, "--out", str(tmp_path / "new")) == 1
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    assert rlt(*words, "--out", str(tmp_path / "empty")) == 1
    assert list((tmp_path / "empty").iterdir()) == []
