"""rltctl against a daemon with fake children, and what it says without one."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from proc.running import Running, eventually
from rlt_protocols import PROTOCOL_VERSION
from rlt_protocols.codec import encode
from rlt_protocols.control import ControlReply, ControlRequest, ProcessStatus, StatusCommand, control_reply
from rltd.control.client import ControlError, ask
from rltd.control.main import app
from rltd.control.top import Sample, rates, view
from rltd.link.framing import frame, read_frame
from rltd.supervisor.run_dir import RunDir


@pytest.fixture(autouse=True)
def _session(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemons of this test are the only ones that rltctl finds."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    monkeypatch.setattr("rltd.supervisor.run_dir.base_directories", lambda: [short_dir / "rltd"])


def rltctl(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_status_for_programs_and_for_people(daemon: Callable[..., Running]) -> None:
    run = daemon().ready()
    result = rltctl("status", "--json")
    assert result.exit_code == 0
    status = json.loads(result.output)
    assert [p["role"] for p in status["processes"]] == ["frontend", "engine", "detokenizer"]
    assert {p["state"] for p in status["processes"]} == {"ready"}
    assert status["processes"][0].keys() == {"role", "pid", "state", "restarts"}
    assert status["requests"] == {"running": 0, "waiting": 0}
    assert status["kv"] == {"free": 7, "used": 0}
    assert status["loops_per_token"] is None
    for arguments in ((), ("--run-dir", str(run.run_dir)), ("--run-dir", str(run.base))):
        table = rltctl("status", *arguments)
        assert table.exit_code == 0
        assert "detokenizer" in table.output
        assert "7 free, 0 used" in table.output


def test_a_process_that_does_not_answer_is_hung(daemon: Callable[..., Running]) -> None:
    limits = json.dumps({"ping_s": 0.1, "hung_s": 0.3, "hung_after_s": 300, "status_s": 0.1})
    run = daemon(env={"FAKE_DETOKENIZER": "never-answers", "RLT_TEST_LIMITS": limits}).ready()
    eventually(lambda: "hung" in {p.state for p in run.status().processes}, "it is noticed")
    states = {p["role"]: p["state"] for p in json.loads(rltctl("status", "--json").output)["processes"]}
    assert states == {"frontend": "ready", "engine": "ready", "detokenizer": "hung"}
    assert "hung" in rltctl("status").output


def test_drain_ends_the_daemon_when_nothing_runs_any_more(daemon: Callable[..., Running]) -> None:
    run = daemon().ready()
    result = rltctl("drain", "--timeout", "3")
    assert (result.exit_code, result.output) == (0, "drained; rltd stops\n")
    assert run.wait() == 0
    assert run.orders("frontend", "drain")[0]["order"]["timeout_s"] == 3
    assert not run.run_dir.exists()


def test_a_second_drain_is_refused(daemon: Callable[..., Running]) -> None:
    run = daemon("server.drain_timeout_s=20", env={"FAKE_FRONTEND": "never-drains"}).ready()
    run.process.terminate()
    run.orders("frontend", "drain")
    result = rltctl("drain")
    assert (result.exit_code, result.stderr) == (1, "error: rltd is already ending\n")


def test_abort(daemon: Callable[..., Running]) -> None:
    run = daemon().ready()
    result = rltctl("abort", "cmpl-known")
    assert (result.exit_code, result.output) == (0, "aborted cmpl-known: 2 answers ended\n")
    result = rltctl("abort", "cmpl-known", "--json")
    assert json.loads(result.output) == {"id": "cmpl-known", "answers": 2}
    assert [told["order"]["answer_id"] for told in run.orders("frontend", "abort-answer", count=2)] == [
        "cmpl-known"
    ] * 2
    result = rltctl("abort", "cmpl-gone", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: no running request has the id 'cmpl-gone'; ")
    assert rltctl("abort").exit_code == 2


def test_a_command_that_nobody_carries_out(daemon: Callable[..., Running]) -> None:
    limits = json.dumps({"status_s": 0.1})
    daemon(env={"FAKE_FRONTEND": "never-answers", "RLT_TEST_LIMITS": limits}).ready()
    result = rltctl("abort", "cmpl-known")
    assert (result.exit_code, result.stderr) == (1, "error: the frontend did not answer within 0.1 s, or died\n")


def test_a_command_for_a_process_that_loads(daemon: Callable[..., Running]) -> None:
    run = daemon(env={"FAKE_FRONTEND": "loads-forever"})
    eventually((run.run_dir / "control.sock").exists, "the daemon listens")
    result = rltctl("abort", "cmpl-known")
    assert (result.exit_code, result.stderr) == (1, "error: the frontend is not ready\n")


def test_cache_reset(daemon: Callable[..., Running]) -> None:
    run = daemon().ready()
    result = rltctl("cache", "reset")
    assert (result.exit_code, result.output) == (0, "6 pages of the prefix cache freed\n")
    assert json.loads(rltctl("cache", "reset", "--json").output) == {"freed_pages": 6}
    run.line("the prefix cache was reset: 6 pages freed", count=2)


def test_log_level_holds_for_restarted_processes_too(daemon: Callable[..., Running]) -> None:
    run = daemon().ready()
    result = rltctl("log-level", "loud")
    assert result.exit_code == 2
    assert "loud" in result.stderr
    result = rltctl("log-level", "warning")
    assert (result.exit_code, result.output) == (0, "all processes log at warning until the daemon ends\n")
    rltctl("cache", "reset")
    os.kill(run.pid("engine"), signal.SIGKILL)
    run.line("all processes are ready again")
    rltctl("cache", "reset")
    assert rltctl("log-level", "info").exit_code == 0
    rltctl("cache", "reset")
    run.line("the prefix cache was reset")
    assert run.text.count("the prefix cache was reset") == 1


def test_top_needs_a_terminal() -> None:
    result = rltctl("top")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: top needs a terminal; for programs there is: rltctl status --json\n",
    )


def test_top_needs_a_terminal_that_can_be_cleared(short_dir: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rltd.control.main", "top", "--run-dir", str(short_dir)]
    environment = {**os.environ, "TERM": "dumb"}
    done = subprocess.run(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment, text=True, check=False
    )
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, done.stderr[:27]) == (1, "error: top needs a terminal")


@pytest.mark.parametrize("end", [b"q", b"\x03"])
def test_top_shows_the_daemon_until_it_is_told_to_end(daemon: Callable[..., Running], end: bytes) -> None:
    run = daemon().ready()
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rltd.control.main", "top", "--run-dir", str(run.run_dir)]
    # A session whose terminal this is: Ctrl-C must come as a signal.
    code = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        shown = b""
        while b"tokens/s         0.0" not in shown:  # the second refresh has a rate
            shown += os.read(ours, 1 << 16)
        assert b"detokenizer" in shown
        assert b"7 free, 0 used" in shown
        os.write(ours, end)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_what_top_shows() -> None:
    def sample(at_s: float, tokens: int, token_loops: int) -> Sample:
        processes = (ProcessStatus("engine", 12, "ready", 1),)
        requests = {"running": 3, "waiting": 1}
        kv = {"free": 5, "used": 4, "cached": 2}
        return Sample(at_s, ControlReply(True, "", processes, requests, kv, 2.5, tokens, token_loops))

    def text(before: Sample | None, now: Sample) -> str:
        console = Console(width=100)
        with console.capture() as capture:
            console.print(view(before, now))
        return capture.get()

    shown = text(sample(10, 100, 250), sample(12, 400, 850))
    for line in (
        "requests         3 running, 1 waiting",
        "KV pages         5 free, 4 used, 2 cached",
        "tokens/s         150.0",
        "loops per token  2.00 now, 2.50 since the start",
    ):
        assert line in shown.splitlines()
    assert "engine" in shown
    # the first look, nothing generated, counters of a new engine
    assert "tokens/s         -" in text(None, sample(12, 400, 850))
    assert rates(sample(10, 100, 250), sample(12, 100, 250)) == (0.0, None)
    assert rates(sample(10, 100, 250), sample(12, 40, 80)) == (None, None)


def test_no_daemon_or_several(short_dir: Path) -> None:
    result = rltctl("status")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: no rltd of this user is running; start one with: rltd start\n",
    )
    result = rltctl("drain", "--run-dir", str(short_dir))
    assert (result.exit_code, result.stderr) == (
        1,
        f"error: no rltd runs in {short_dir}: there is no control.sock\n",
    )
    (short_dir / "rltd").mkdir()
    running = [RunDir(short_dir / "rltd" / name) for name in ("7", "7.1")]
    for daemon in running:
        (daemon.path / "control.sock").touch()
    result = rltctl("status")
    for daemon in running:
        daemon.remove()
    assert result.exit_code == 1
    assert result.stderr.startswith("error: 2 daemons are running; choose one with\n  --run-dir ")
    assert len(result.stderr.splitlines()) == 3


def test_a_daemon_that_is_gone_or_silent(short_dir: Path) -> None:
    request = StatusCommand()
    with pytest.raises(ControlError, match="cannot be asked"):
        ask(short_dir, request, 1)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(short_dir / "control.sock"))
        server.listen()
        with pytest.raises(ControlError, match=r"did not answer within 0\.05 s"):
            ask(short_dir, request, 0.05)


def test_requests_that_the_daemon_does_not_understand(daemon: Callable[..., Running]) -> None:
    run = daemon().ready()

    def answer(data: bytes) -> str:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(str(run.run_dir / "control.sock"))
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            reply = read_frame(client)
        assert reply is not None
        decoded = control_reply.decode(reply)
        assert not decoded.ok
        return decoded.message

    unknown = msgspec.msgpack.encode({"type": "request", "protocol": PROTOCOL_VERSION, "command": {"type": "dance"}})
    assert "dance" in answer(frame(unknown))
    later = msgspec.msgpack.encode({"type": "request", "protocol": PROTOCOL_VERSION + 1, "command": {"type": "dance"}})
    assert answer(frame(later)).startswith(f"rltctl speaks protocol {PROTOCOL_VERSION + 1}, ")
    assert answer(frame(b"\xc1")).startswith("not a control request: ")
    assert answer(b"").startswith("not a control request: ")
    assert answer(b"\xff\xff\xff\xff").startswith("not a control request: a frame claims")
    other = answer(frame(encode(ControlRequest(PROTOCOL_VERSION + 1, StatusCommand()))))
    assert other == (
        f"rltctl speaks protocol {PROTOCOL_VERSION + 1}, the daemon {PROTOCOL_VERSION}; "
        "use the rltctl of the daemon's installation"
    )
    assert run.all_ready()
