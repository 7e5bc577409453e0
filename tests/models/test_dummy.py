"""`model.load_format = "dummy"`: a directory without weights runs, with those that a synthetic checkpoint has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rlt import LLM, SamplingParams
from rlt.cli.main import main as rlt
from rlt.errors import ModelError
from rlt.models.loader import fingerprint
from rltd.cli import app as rltd

PROMPTS = [[5, 9, 31, 7], [12, 4, 4, 200, 17, 3]]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
DUMMY = {"model": {"load_format": "dummy"}}


@pytest.fixture(params=["ouro", "nanbeige", "huginn"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small synthetic checkpoint."""
    folder = tmp_path / "whole"
    with pytest.raises(SystemExit) as ended:
        rlt(
            [
                "make-checkpoint",
                "--family",
                request.param,
                "--shape",
                "test",
                "--dtype",
                "float32",
                "--out",
                str(folder),
            ]
        )
    assert ended.value.code in (0, None)
    return folder


def without_weights(folder: Path) -> Path:
    bare = folder.with_name("bare")
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    return bare


def test_it_says_what_the_checkpoint_says(checkpoint: Path) -> None:
    bare = without_weights(checkpoint)
    with (
        LLM(str(checkpoint), device="cpu", dtype="float32") as whole,
        LLM(str(bare), device="cpu", config=DUMMY) as dummy,
    ):
        for one, other in zip(whole.generate(PROMPTS, PARAMS), dummy.generate(PROMPTS, PARAMS), strict=True):
            (want,), (got,) = one.outputs, other.outputs
            assert got.token_ids == want.token_ids
            assert [entry.token.logprob for entry in got.logprobs] == pytest.approx(
                [entry.token.logprob for entry in want.logprobs], abs=1e-5
            )


def test_check_plans_it_and_a_start_without_the_setting_refuses(checkpoint: Path) -> None:
    bare = without_weights(checkpoint)
    planned = CliRunner().invoke(
        rltd, ["check", "--model", str(bare), "--device", "cpu", "--set", "model.load_format=dummy"]
    )
    assert planned.exit_code == 0, planned.output
    real = CliRunner().invoke(rltd, ["check", "--model", str(checkpoint), "--device", "cpu"])
    weights = [line for line in real.output.splitlines() if line.startswith(("weights_bytes", "parameters", "tensors"))]
    assert len(weights) == 3
    assert set(weights) <= set(planned.output.splitlines())
    with pytest.raises(ModelError, match="has no weights"):
        LLM(str(bare), device="cpu")


def test_prefixes_of_dummies_are_their_own(checkpoint: Path) -> None:
    assert (
        fingerprint(checkpoint, "dummy") == fingerprint(without_weights(checkpoint), "dummy") != fingerprint(checkpoint)
    )


def test_the_dtype_is_that_asked_for(checkpoint: Path) -> None:
    with LLM(str(without_weights(checkpoint)), device="cpu", dtype="bfloat16", config=DUMMY) as llm:
        assert llm.engine.runner.model.dtype == torch.bfloat16
        assert len(llm.generate(PROMPTS, PARAMS)) == 2
