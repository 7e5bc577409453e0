"""A start that cannot succeed: exit code 2, one or two lines that say what to do, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from support import DATA

pytestmark = pytest.mark.e2e

GOLDEN_OURO = DATA / "golden" / "ouro-tiny"


@dataclass(frozen=True)
class Refusal:
    code: int
    out: str
    errors: list[str]


@pytest.fixture
def refused(short_dir: Path) -> Callable[..., Refusal]:
    """Run `rltd start`, which must end by itself, and check that nothing is left of it."""

    def start(*arguments: str) -> Refusal:
        done = subprocess.run(
            [sys.executable, "-m", "rltd.main", "start", "--device", "cpu", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "XDG_RUNTIME_DIR": str(short_dir)},
            check=False,
        )
        assert "Traceback" not in done.stdout + done.stderr
        assert not list(short_dir.glob("rltd/*"))
        assert not _processes_of(short_dir)
        return Refusal(done.returncode, done.stdout, done.stderr.splitlines())

    return start


def _processes_of(runtime_dir: Path) -> list[psutil.Process]:
    """The living processes that were started with this runtime directory."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                process.environ().get("XDG_RUNTIME_DIR") == str(runtime_dir)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint, to be broken."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN_OURO / name, directory)
    return directory


def test_a_typo_in_the_configuration(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    file = tmp_path / "rlt.toml"
    file.write_text('[server]\nprot = 1\n\n[model]\ndtype = "float31"\n')
    assert refused("--config", str(file)) == Refusal(
        2,
        "",
        [
            f"error: {file}:2: unknown key server.prot; did you mean port?",
            f"error: {file}:5: model.dtype must be one of 'auto', 'bfloat16', 'float32', got 'float31'",
        ],
    )


def test_a_port_in_use(refused: Callable[..., Refusal]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refused("--model", str(GOLDEN_OURO), "--port", str(port)) == Refusal(
            2,
            "",
            [
                f"error: cannot listen on 127.0.0.1:{port} (server.host, server.port): the port is in use; stop the "
                "other program or choose another server.port (0 takes any free one)"
            ],
        )


def _model_is_refused(refused: Callable[..., Refusal], model: Path, *errors: str) -> None:
    refusal = refused("--model", str(model), "--port", "0")
    assert (refusal.code, refusal.errors) == (2, list(errors))
    # Only the announcement: it never was ready.
    assert len(refusal.out.splitlines()) == 1
    assert refusal.out.startswith("rlt ")


def test_a_model_directory_without_weights(refused: Callable[..., Refusal], model: Path) -> None:
    (model / "model.safetensors").unlink()
    _model_is_refused(
        refused,
        model,
        f"error: {model}: has no weights: neither model.safetensors nor model.safetensors.index.json is there",
    )


def test_a_truncated_weight_file(refused: Callable[..., Refusal], model: Path) -> None:
    os.truncate(model / "model.safetensors", 300_000)
    refusal = refused("--model", str(model), "--port", "0")
    assert refusal.code == 2
    (line,) = refusal.errors
    # The library's own words stand in brackets.
    assert line.startswith(f"error: {model}/model.safetensors: is cut short or not a safetensors file (")
    assert line.endswith("); download it again")


def test_a_tensor_with_damaged_numbers(refused: Callable[..., Refusal], model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model / "model.safetensors")
    _model_is_refused(
        refused,
        model,
        f"error: {model}: weights are damaged:",
        "error:   tensors with NaN or infinity (1): model.norm.weight (in model.safetensors)",
    )


def test_a_tensor_of_a_wrong_shape(refused: Callable[..., Refusal], model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:255].clone()
    save_file(tensors, model / "model.safetensors")
    _model_is_refused(
        refused,
        model,
        f"error: {model}: the weights do not fit its config.json:",
        "error:   wrong shapes (1): lm_head.weight is [255, 64], not [256, 64]",
    )


def test_an_unknown_key_of_the_model(refused: Callable[..., Refusal], model: Path) -> None:
    config = model / "config.json"
    config.write_text(config.read_text().replace("{", '{"totl_ut_steps": 4,', 1))
    _model_is_refused(refused, model, f"error: {config}: unknown key totl_ut_steps; did you mean total_ut_steps?")


def test_a_chat_template_that_is_broken(refused: Callable[..., Refusal], model: Path) -> None:
    template = model / "chat_template.jinja"
    template.write_text("{% if %}")
    refusal = refused("--model", str(model), "--port", "0")
    assert (refusal.code, len(refusal.errors)) == (2, 1)
    assert refusal.errors[0].startswith(f"error: {template}: the chat template is broken: ")


def test_thinking_with_a_template_that_cannot(refused: Callable[..., Refusal]) -> None:
    refusal = refused("--model", "tiny-ouro", "--port", "0", "--set", "model.enable_thinking=true")
    assert (refusal.code, refusal.errors) == (
        2,
        ["error: model.enable_thinking: the model's chat template has no such option; leave it out"],
    )


def test_a_cache_larger_than_the_machine(refused: Callable[..., Refusal], model: Path) -> None:
    refusal = refused("--model", str(model), "--port", "0", "--set", f"kv.pages={10**12}")
    assert (refusal.code, len(refusal.errors)) == (2, 1)
    assert refusal.errors[0].startswith(f"error: the KV cache of {10**12} pages has ")


def test_a_model_that_is_nowhere(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    _model_is_refused(
        refused,
        tmp_path / "no",
        f"error: {tmp_path}/no: no such directory, and not a built-in model (tiny-ouro, tiny-nanbeige, tiny-huginn)"
        " or a Hub id (org/name) either",
    )


def test_settings_that_the_model_cannot_follow(refused: Callable[..., Refusal], model: Path) -> None:
    refusal = refused("--model", str(model), "--port", "0", "--set", "exit.max_loops=5", "--set", "kv.pages=64")
    assert (refusal.code, refusal.errors) == (2, ["error: exit.max_loops 5 is more than the model's 4 loops"])
