"""Restart policy, run directories, listening, printing and the pump of a child's output."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
from pathlib import Path

import pytest

from rlt import __version__
from rlt.errors import ConfigError
from rlt.progress import LINE_EVERY_S
from rltd.supervisor import banner
from rltd.supervisor import run_dir as run_dir_module
from rltd.supervisor.listen import bind_http, url_of
from rltd.supervisor.loading import Loading
from rltd.supervisor.output import ERASE_LINE, MAX_LINE_BYTES, MAX_WAITING_LINES, Printer, pump_lines
from rltd.supervisor.restart import Backoff, Limits
from rltd.supervisor.run_dir import RunDirError, create_run_dir, live_run_dirs


def test_backoff_doubles_up_to_its_limit_and_then_gives_up() -> None:
    backoff = Backoff(Limits(restarts=7))
    assert [backoff.after_death(0) for _ in range(8)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, None])


def test_a_healthy_life_is_a_new_beginning() -> None:
    backoff = Backoff(Limits(restarts=2))
    assert [backoff.after_death(59.9), backoff.after_death(0)] == [0.1, 0.2]
    assert backoff.after_death(60) == 0.1
    assert [backoff.after_death(0), backoff.after_death(0)] == [0.2, None]


def test_run_directory_prefers_the_session_directory(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    mine = create_run_dir()
    path = mine.path
    assert path == short_dir / "rltd" / str(os.getpid())
    (path / "control.sock").touch()
    assert live_run_dirs()[0] == path
    # A daemon of another container may have our pid, too.
    other = create_run_dir()
    assert other.path == path.with_name(f"{os.getpid()}.1")
    assert (mine.is_own(), other.is_own()) == (True, True)
    other.remove()
    (path / "engine0.0").touch()
    (path / "lock").unlink()  # without a lock it is what an earlier process with our pid left
    assert not mine.is_own()
    again = create_run_dir()
    assert again.path == path
    assert [entry.name for entry in path.iterdir()] == ["lock"]
    mine.remove()  # not its own any more
    assert again.is_own()
    again.remove()
    assert not path.exists()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir / "missing"))
    assert run_dir_module.base_directories() == [Path(f"/tmp/rltd-{os.getuid()}")]


def test_run_directory_with_a_path_that_is_too_long(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = short_dir / ("x" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(RunDirError, match="shorter directory"):
        create_run_dir()
    assert list((deep / "rltd").iterdir()) == []


def test_run_directory_is_not_made_in_a_place_of_somebody_else(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (short_dir / "rltd").symlink_to("/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    with pytest.raises(RunDirError, match="not a directory of this user"):
        create_run_dir()
    (short_dir / "rltd").unlink()
    (short_dir / "rltd").touch()
    with pytest.raises(RunDirError, match="cannot be made"):
        create_run_dir()


def test_port_0_is_any_free_port_and_the_url_names_it() -> None:
    with bind_http("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port)):
            pass


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_ipv6_addresses_are_bracketed() -> None:
    with bind_http("::1", 0) as listener:
        assert url_of(listener).startswith("http://[::1]:")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_a_host_that_is_not_ours_is_one_line(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:0 .server.host, server.port.: ") as error:
        bind_http(host, 0)
    assert len(error.value.problems) == 1


def test_the_banner_is_coloured_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        assert ("\x1b[" in banner.ready("m", "cpu", "http://h:1", 1.5)[0]) is terminal
        # JSON lines go to programs, wherever they are written
        assert banner.ready("a[b]", "cpu", "http://h:1", 1.5, plain=True) == [
            f"rlt {__version__}  a[b] on cpu  http://h:1",
            "ready in 1.5 s; rltctl status shows what it does, Ctrl-C stops it",
        ]
        assert banner.starting("/m/[x]", "http://h:1", plain=True) == [
            f"rlt {__version__}  starting /m/[x] at http://h:1"
        ]


def test_printer_prefixes_and_json() -> None:
    out, err = io.StringIO(), io.StringIO()
    printer = Printer(out=out, err=err)
    printer.say("hello")
    printer.say("oh", level="error")
    printer.child_line("engine", 7, "err", "loading")
    printer.close()
    assert (out.getvalue(), err.getvalue()) == ("hello\n", "oh\n[engine 7] loading\n")
    out = io.StringIO()
    printer = Printer(json_lines=True, out=out, err=out)
    printer.child_line("engine", 7, "out", '{"own": 1}')
    printer.child_line("engine", 7, "out", "plain")
    printer.say("hello")
    printer.close()
    own, plain, said = map(json.loads, out.getvalue().splitlines())
    assert own == {"own": 1}
    assert (plain["process"], plain["pid"], plain["message"]) == ("engine", 7, "plain")
    assert (said["process"], said["message"]) == ("supervisor", "hello")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(written: str) -> list[str]:
    """What a terminal shows in the end."""
    return [line.rpartition(ERASE_LINE)[2] for line in written.split("\n")]


def test_a_bar_stays_below_the_lines_until_loading_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    for ended in (False, True):
        printer = Printer(out=terminal, err=terminal)
        loading = Loading(printer)
        loading.show("one.safetensors", 0.5)
        printer.child_line("engine", 7, "err", "a warning")
        loading.show("two.safetensors", 0.75)
        printer.say("oh", level="error")
        if ended:
            loading.end()
            printer.say("ready")
        printer.close()
        *lines, last = screen(terminal.getvalue())
        if ended:
            assert (lines[-3:], last) == (["[engine 7] a warning", "oh", "ready"], "")
        else:
            assert lines == ["[engine 7] a warning", "oh"]
            assert last.startswith("loading two.safetensors ━")
            assert last.endswith(" 75%")


@pytest.mark.parametrize("why", ["no terminal", "json", "dumb"])
def test_loading_says_lines_where_no_bar_can_be(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setenv("TERM", "dumb" if why == "dumb" else "xterm-256color")
    out = io.StringIO() if why == "no terminal" else Terminal()
    printer, now_s = Printer(json_lines=why == "json", out=out, err=out), [0.0]
    loading = Loading(printer, lambda: now_s[0])
    for lives in (1, 2):
        for share in (0.1, 0.5, 0.9):
            loading.show("one.safetensors", share)
            now_s[0] += 0.6 * LINE_EVERY_S
        loading.end()
        if lives == 1:
            printer.say("again")
    printer.close()
    lines = out.getvalue().splitlines()
    said = [json.loads(line)["message"] for line in lines] if why == "json" else lines
    line = "loading one.safetensors, 90% of the model is done"
    assert said == [line, "again", line]


class Stuck(io.StringIO):
    """A stream whose reader does not read until `flow` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.flow = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.flow.wait()
        return super().write(text)


def test_printer_never_blocks_on_a_reader_that_has_stalled() -> None:
    stuck = Stuck()
    printer = Printer(out=stuck, err=stuck)
    printer.say("first")
    assert stuck.entered.wait(10)
    for number in range(MAX_WAITING_LINES + 5):
        printer.say(f"line {number}")
    printer.close(timeout_s=0.01)
    stuck.flow.set()
    printer.close(timeout_s=10)
    lines = stuck.getvalue().splitlines()
    assert lines[:3] == ["first", "(5 lines of output were dropped)", "line 0"]
    assert lines[-1] == f"line {MAX_WAITING_LINES - 1}"


def test_printer_goes_on_when_stdout_is_closed() -> None:
    closed, err = io.StringIO(), io.StringIO()
    closed.close()
    printer = Printer(out=closed, err=err)
    printer.say("lost")
    printer.say("kept", level="error")
    printer.close()
    assert err.getvalue() == "kept\n"


async def test_pump_keeps_every_line() -> None:
    near, far = os.pipe()
    text = b"one\r\n" + b"\xff\n\n" + b"x" * (MAX_LINE_BYTES + 100) + b"\nlast without newline"

    def write() -> None:
        with os.fdopen(far, "wb") as pipe:
            pipe.write(text)

    writer = threading.Thread(target=write)
    writer.start()
    lines: list[str] = []
    await pump_lines(os.fdopen(near, "rb", buffering=0), lines.append)
    writer.join()
    assert lines[:3] == ["one", "�", ""]
    assert lines[-1] == "last without newline"
    assert "".join(lines[3:-1]) == "x" * (MAX_LINE_BYTES + 100)
