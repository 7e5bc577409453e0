"""What `rltd` says and returns before any process starts."""

from __future__ import annotations

import socket
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rlt.config import Config
from rltd.main import app

MODEL = Path(__file__).parents[1] / "data" / "golden" / "ouro-tiny"


def rltd(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_check_prints_the_resolved_configuration_and_the_model(tmp_path: Path) -> None:
    file = tmp_path / "rlt.toml"
    file.write_text(f'[model]\npath = "{MODEL}"\n[kv]\npages = 8\n[server]\nport = 9\n')
    result = rltd("check", "--config", str(file), "--set", "kv.page_size=32", "--device", "cpu")
    assert result.exit_code == 0
    tree = tomllib.loads(result.output)
    assert (tree["kv"]["pages"], tree["kv"]["page_size"], tree["server"]["port"]) == (8, 32, 9)
    assert tree["engine"]["device"] == "cpu"
    assert (tree["facts"]["family"], tree["facts"]["loops"]) == ("ouro", 4)
    assert "# served_name is chosen at start" in result.output
    page_bytes = 2 * 3 * 32 * 4 * 16 * 4  # keys and values, layers, positions, heads, head size, float32
    assert tree["memory"] == {
        "device": "cpu",
        "dtype": "float32",
        "weights_bytes": 699_908,
        "page_bytes": page_bytes,
        "pages": 8,
        "cache_bytes": 8 * page_bytes,
        "cache_tokens": 8 // 4 * 32,
        "request_tokens": (8 - 3) // 4 * 32 - 4,  # a page more for each list of exited tokens, and room ahead
    }


def test_check_of_a_cache_that_is_too_small() -> None:
    result = rltd("check", "--model", str(MODEL), "--device", "cpu", "--set", "kv.pages=3")
    assert result.exit_code == 2
    assert result.output.startswith("error: the KV cache gets 3 pages of 24576 bytes; at least 4 are needed")


def test_check_reads_the_headers_of_the_weights(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes()[:9000])
    result = rltd("check", "--model", str(tmp_path), "--device", "cpu")
    assert result.exit_code == 2
    assert result.output.startswith(f"error: {tmp_path}/model.safetensors: is cut short")


def test_check_of_a_model_that_is_not_there() -> None:
    result = rltd("check", "--model", "./nowhere")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ./nowhere: no such directory")
    assert result.output == result.stderr


@pytest.mark.parametrize("command", ["start", "check"])
def test_every_mistake_of_a_configuration_is_one_line(command: str, tmp_path: Path) -> None:
    file = tmp_path / "rlt.toml"
    file.write_text("[server]\nprot = 1\n[kv]\npages = 0\n")
    result = rltd(command, "--config", str(file), "--set", "nonsense")
    assert result.exit_code == 2
    assert set(result.stderr.splitlines()) == {
        f"error: {file}:2: unknown key server.prot; did you mean port?",
        f"error: {file}:4: kv.pages must be at least 1, got 0",
        "error: --set nonsense: expected section.key=value",
    }


def test_flags_win_and_reach_the_supervisor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Config] = []

    def serve(config: Config) -> int:
        seen.append(config)
        return 7

    monkeypatch.setattr("rltd.supervisor.main.serve", serve)
    file = tmp_path / "rlt.toml"
    file.write_text('[server]\nport = 1\nhost = "::1"\n')
    flags = ("--port", "0", "--model", "m", "--device", "cuda:1", "--set", "kv.pages=3", "--debug")
    assert rltd("start", "--config", str(file), *flags).exit_code == 7
    (config,) = seen
    assert (config.server.port, config.server.host, config.model.path) == (0, "::1", "m")
    assert (config.engine.device, config.kv.pages, config.log.level) == ("cuda:1", 3, "debug")


def test_a_traceback_only_with_debug(monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        plain, debug = rltd("start", "--port", port), rltd("start", "--port", port, "--debug")
    assert (plain.exit_code, debug.exit_code) == (2, 2)
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr
    assert debug.stderr.splitlines()[-1] == plain.stderr.strip()


def test_usage() -> None:
    assert rltd("start", "--prot", "1").exit_code == 2
    assert "start" in rltd().output
