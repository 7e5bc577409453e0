from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlt
from rlt.cli import generate
from rlt.cli.main import main
from rlt.errors import ConfigError, MemoryPlanError, ModelError
from rlt_protocols.params import ParamError


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)


def test_help_comes_without_torch() -> None:
    code = """
import sys
from rlt.cli.main import main
try:
    main(["--help"])
finally:
    assert not {"torch", "tokenizers", "httpx", "numpy"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "generate" in done.stdout


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"rlt {rlt.__version__}\n"


@pytest.mark.parametrize("line", ["nope", "generate --nope", "eval nope", "bench latency --batch 0"])
def test_bad_usage_is_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*line.split()) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError(["one", "two"]), 2),
        (ParamError("top_p", "is odd"), 2),
        (ModelError("m: broken"), 1),
        (MemoryPlanError("too little"), 1),
    ],
)
def test_errors_are_lines(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*options: Any) -> None:
        raise error

    monkeypatch.setattr(generate, "open_llm", fail)
    assert run("generate", "--prompt", "x") == status
    assert capsys.readouterr().err == f"rlt: {error}\n"
    for words in (["--debug", "generate", "--prompt", "x"], ["generate", "--prompt", "x", "--debug"]):
        with pytest.raises(type(error)):
            main(words)


def test_a_config_file_that_is_not_there_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "no.toml"
    assert run("generate", "--prompt", "x", "--config", str(path)) == 2
    assert capsys.readouterr().err == f"rlt: {path}: cannot be read: No such file or directory\n"


def test_settings_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--prompt", "x", "--set", "kv.page=3") == 2
    assert capsys.readouterr().err == "rlt: --set kv.page=3: unknown key kv.page; did you mean pages?\n"


def test_a_model_that_is_not_there_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--prompt", "x", "--model", str(tmp_path)) == 1
    assert capsys.readouterr().err.startswith(f"rlt: {tmp_path}: has no config.json")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "give a --prompt, or --token-ids for a model without a tokenizer"),
        (["--token-ids", "5,x"], "--token-ids: '5,x' is not a list of token ids such as 5,9,12"),
        (["--token-ids", ""], "--token-ids: '' is not a list of token ids such as 5,9,12"),
    ],
)
def test_generate_needs_a_prompt(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", *words) == 2
    assert capsys.readouterr().err == f"rlt: {line}\n"
