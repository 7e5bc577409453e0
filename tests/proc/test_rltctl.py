"""rltctl against a daemon with fake children, and what it says without one."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from proc.running import Running, eventually
from rlt_protocols import PROTOCOL_VERSION
from rlt_protocols.codec import encode
from rlt_protocols.control import ControlRequest, control_reply
from rltd.control.client import ControlError, ask
from rltd.control.main import app
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
    request = ControlRequest(PROTOCOL_VERSION, "status")
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

    assert answer(frame(b"\xc1")).startswith("not a control request: ")
    assert answer(b"").startswith("not a control request: ")
    assert answer(b"\xff\xff\xff\xff").startswith("not a control request: a frame claims")
    other = answer(frame(encode(ControlRequest(PROTOCOL_VERSION + 1, "status"))))
    assert other == (
        f"rltctl speaks protocol {PROTOCOL_VERSION + 1}, the daemon {PROTOCOL_VERSION}; "
        "use the rltctl of the daemon's installation"
    )
    assert run.all_ready()
