"""What `rltd` says and returns before any process starts."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rlt import __version__
from rlt.config import Config
from rltd.cli import app
from rltd.control.main import app as rltctl_app

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


def copy_of(model: Path, directory: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, directory)
    return directory


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("config.json", "[" * 100_000, "is nested too deeply"),
        ("tokenizer.json", "[" * 100_000, "is nested too deeply"),
        ("tokenizer.json", "{}", ""),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("chat_template.jinja", "{% if %}", "the chat template is broken"),
    ],
)
def test_check_reads_what_the_start_will_read(name: str, content: str, error: str, tmp_path: Path) -> None:
    (copy_of(MODEL, tmp_path) / name).write_text(content)
    result = rltd("check", "--model", str(tmp_path), "--device", "cpu")
    assert result.exit_code == 2
    assert result.output.startswith(f"error: {tmp_path}/{name}: {error}")


def test_a_byte_order_mark_in_a_model_file_changes_nothing(tmp_path: Path) -> None:
    config = copy_of(MODEL, tmp_path) / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert rltd("check", "--model", str(tmp_path), "--device", "cpu").exit_code == 0


def test_check_of_what_this_machine_cannot_do() -> None:
    for setting, error in (
        ("server.host=203.0.113.7", "cannot listen on 203.0.113.7 (server.host): "),
        (f"kv.pages={10**12}", f"the KV cache of {10**12} pages has "),
        (f"kv.bytes={10**18}", "the KV cache of "),
    ):
        result = rltd("check", "--model", str(MODEL), "--device", "cpu", "--set", setting)
        assert result.exit_code == 2
        assert result.output.startswith(f"error: {error}")


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


def test_version() -> None:
    assert rltd("--version").output == f"rltd {__version__}\n"
    assert CliRunner().invoke(rltctl_app, ["--version"]).output == f"rltctl {__version__}\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_files_are_replaced(closed: str, tmp_path: Path) -> None:
    """The first files that the program opens must not become its output."""
    program = (
        "import os, sys; from rltd.main import open_standard_files; open_standard_files(); "
        "print('out'); print('err', file=sys.stderr); sys.stdin.read(); sys.stdout.flush(); "
        "new = os.open('/dev/null', os.O_RDONLY); open(sys.argv[1], 'w').write(str(new))"
    )
    result = tmp_path / "result"
    command = f'exec "$1" -c "$2" "$3" {closed}'
    subprocess.run(
        ["/bin/sh", "-c", command, "sh", sys.executable, program, str(result)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    assert int(result.read_text()) > 2


def test_ctrl_c_before_anything_has_started_is_quiet(short_dir: Path) -> None:
    program = (
        "import os, signal, sys; sys.argv = ['rltd', 'start', '--port', '0']; import rltd.supervisor.main as m; "
        "m.create_run_dir = lambda: os.kill(os.getpid(), signal.SIGINT); from rltd.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_usage() -> None:
    assert rltd("start", "--prot", "1").exit_code == 2
    assert "start" in rltd().output
