"""The whole daemon with fake children: deaths, restarts, drains, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from proc.running import Running, eventually, living
from rltd.supervisor.run_dir import RunDir

Start = Callable[..., Running]

ROLES = ("frontend", "engine", "detokenizer")
#: everyone who can say in the output what it was told
TALKERS = ("frontend", "detokenizer")


def limits(**values: float) -> dict[str, str]:
    return {"RLT_TEST_LIMITS": json.dumps(values)}


def http_generation(run: Running) -> int:
    url = run.line(r"(http://127\.0\.0\.1:\d+)")[1]
    with urllib.request.urlopen(url, timeout=20) as answer:
        return int(json.load(answer)["generation"])


def assert_nothing_left(run: Running, children: list[psutil.Process]) -> None:
    assert children
    assert not living(children)
    assert not run.run_dir.exists()
    assert list(run.base.iterdir()) == []


def test_start_status_and_stop(daemon: Start) -> None:
    run = daemon().ready()
    run.line(r"^rlt \S+  fake on cpu  http://127\.0\.0\.1:\d+$")
    assert stat.S_IMODE(run.base.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((run.run_dir / "control.sock").stat().st_mode) == 0o600
    reply = run.status()
    assert [(p.role, p.state, p.restarts) for p in reply.processes] == [(role, "ready", 0) for role in ROLES]
    assert (reply.requests, reply.kv) == ({"running": 0, "waiting": 0}, {"free": 7, "used": 0})
    assert reply.loops_per_token is None
    for me in TALKERS:
        told = {(o["order"]["role"], o["order"]["generation"]) for o in run.orders(me, "peer-up", count=2)}
        assert told == {(role, 0) for role in ROLES if role != me}
    (engine,) = run.orders("frontend", "peer-up", "engine")
    assert engine["order"]["info"]["name"] == "fake"
    assert http_generation(run) == 0

    children = run.children()
    assert len(children) == 3
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0
    assert run.orders("frontend", "drain")[0]["order"]["timeout_s"] == 30
    run.line(r"^\[frontend \d+\] last words without newline$")
    assert_nothing_left(run, children)


@pytest.mark.parametrize("role", ROLES)
def test_a_killed_process_is_known_to_all_within_a_second_and_restarted(daemon: Start, role: str) -> None:
    run = daemon().ready()
    pid = run.pid(role)
    start_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    run.line(rf"the {role} \(pid {pid}\) was killed by SIGKILL; restarting it in 0.1 s")
    run.line("all processes are ready again")
    for me in set(TALKERS) - {role}:
        (down,) = run.orders(me, "peer-down")
        assert (down["order"]["role"], down["order"]["generation"]) == (role, 0)
        assert down["at"] - start_s < 1
        assert [o["order"]["generation"] for o in run.orders(me, "peer-up", role, count=2)] == [0, 1]
    after = eventually(run.all_ready, "all ready")
    assert {p.role: p.restarts for p in after.processes} == {r: int(r == role) for r in ROLES}
    # The port is the same, a restarted frontend included.
    assert http_generation(run) == int(role == "frontend")
    assert sorted(path.name for path in run.run_dir.glob("*.0")) == sorted(
        name for r, name in zip(ROLES, ("front0.0", "engine0.0", "detok0.0"), strict=True) if r != role
    )


def test_the_daemon_gives_up_on_a_process_that_dies_again_and_again(daemon: Start) -> None:
    env = {"FAKE_DETOKENIZER": "dies-later", **limits(restarts=2, first_backoff_s=0.01)}
    run = daemon(env=env).ready()
    children = run.children()
    os.kill(run.pid("detokenizer"), signal.SIGKILL)
    assert run.wait() == 1
    run.line(r"^error: the detokenizer \(pid \d+\) exited with code 1, after 2 restarts in a row; giving up$")
    assert_nothing_left(run, children)


@pytest.mark.parametrize(("behaviour", "code"), [("fatal-usage", 2), ("fatal", 1)])
def test_an_engine_that_cannot_start_ends_the_start_with_its_message(daemon: Start, behaviour: str, code: int) -> None:
    run = daemon(env={"FAKE_ENGINE": behaviour})
    assert run.wait() == code
    if behaviour == "fatal-usage":
        run.line("^error: tiny-ouro: the model is broken$")
        run.line("^error: get a whole one$")
    else:
        run.line("^error: the device has left$")
    assert "Traceback" not in run.text
    assert list(run.base.iterdir()) == []


def test_a_process_that_crashes_at_the_first_start_is_not_retried(daemon: Start) -> None:
    run = daemon(env={"FAKE_DETOKENIZER": "crash"})
    assert run.wait() == 1
    run.line(r"^\[detokenizer \d+\] RuntimeError: this process crashes while it starts$")
    run.line(r"^error: the detokenizer \(pid \d+\) exited with code 1 before it was ready$")


def test_a_process_of_another_version_is_refused(daemon: Start) -> None:
    run = daemon(env={"FAKE_FRONTEND": "old-version"})
    assert run.wait() == 1
    run.line(r"^error: the frontend process is rlt 0\.0\.1 with protocol \d+, the supervisor is rlt .*; install one")


def test_a_port_in_use_is_a_usage_error_before_anything_starts(daemon: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = daemon(f"server.port={port}")
        assert run.wait() == 2
    assert run.text == (
        f"error: cannot listen on 127.0.0.1:{port} (server.host, server.port): the port is in use; "
        "stop the other program or choose another server.port (0 takes any free one)"
    )
    assert not run.base.exists()


def test_a_terminal_that_is_closed_drains(daemon: Start) -> None:
    run = daemon().ready()
    children = run.children()
    run.process.send_signal(signal.SIGHUP)
    assert run.wait() == 0
    run.orders("frontend", "drain")
    assert_nothing_left(run, children)


def test_a_drain_has_a_limit(daemon: Start) -> None:
    run = daemon(
        "server.drain_timeout_s=0.1", env={"FAKE_FRONTEND": "never-drains", **limits(drain_grace_s=0.1)}
    ).ready()
    children = run.children()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0
    assert_nothing_left(run, children)


def test_processes_that_do_not_stop_are_killed(daemon: Start) -> None:
    run = daemon(env={"FAKE_DETOKENIZER": "never-stops", **limits(stop_grace_s=0.2)}).ready()
    children = run.children()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0
    assert_nothing_left(run, children)


def test_a_second_signal_ends_everything_at_once(daemon: Start) -> None:
    run = daemon(env={"FAKE_FRONTEND": "never-drains"}).ready()
    children = run.children()
    run.process.send_signal(signal.SIGTERM)
    run.line('"drain"')
    assert [p.state for p in run.status().processes] == ["draining"] * 3
    run.process.send_signal(signal.SIGINT)
    assert run.wait(5) == 128 + signal.SIGINT, run.text
    assert_nothing_left(run, children)


def test_a_signal_while_loading_does_not_wait_for_the_load(daemon: Start) -> None:
    run = daemon(env={"FAKE_DETOKENIZER": "loads-forever"})
    eventually(lambda: run.run_dir.joinpath("engine0.0").exists(), "the engine's inbox")
    children = run.children()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(5) == 0
    assert_nothing_left(run, children)


def test_no_process_outlives_a_killed_supervisor(daemon: Start) -> None:
    run = daemon().ready()
    children = run.children()
    assert len(children) == 3
    run.process.kill()
    eventually(lambda: not living(children), "all children end", 1)
    run.wait()
    assert list(run.base.iterdir()) == []


def test_directories_of_dead_daemons_are_removed(daemon: Start, short_dir: Path) -> None:
    base = short_dir / "rltd"
    base.mkdir(mode=0o700)
    dead = base / "99999999"
    dead.mkdir()
    (dead / "engine0.0").touch()
    # In another container the same number may be alive, or not: the lock counts and not the number.
    ours = base / str(os.getpid())
    ours.mkdir()
    living_one = RunDir(base / "99999998")
    daemon().ready()
    assert not dead.exists()
    assert not ours.exists()
    assert living_one.is_own()
    living_one.remove()


def test_a_removed_run_directory_ends_the_daemon(daemon: Start) -> None:
    run = daemon(env=limits(run_dir_s=0.05)).ready()
    children = run.children()
    shutil.rmtree(run.run_dir)
    assert run.wait() == 1
    assert f"error: the run directory {run.run_dir} was removed while rltd was running; rltd ends" in run.text
    assert "Traceback" not in run.text
    assert_nothing_left(run, children)


def states(run: Running) -> dict[str, str]:
    return {process.role: process.state for process in run.status().processes}


def test_a_process_that_hangs_is_shown_and_restarted(daemon: Start) -> None:
    run = daemon(env=limits(ping_s=0.1, hung_s=0.3, hung_after_s=3, status_s=0.1)).ready()
    pid = run.pid("detokenizer")
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: states(run)["detokenizer"] == "hung", "the status tells of it")
    why = "it had not answered for 3 s"
    run.line(rf"^the detokenizer \(pid {pid}\) was killed by SIGKILL: {why}; restarting it in 0.1 s$")
    run.line("all processes are ready again")
    after = eventually(run.all_ready, "all ready")
    assert {p.role: p.restarts for p in after.processes} == {role: int(role == "detokenizer") for role in ROLES}
    assert states(run)["detokenizer"] == "ready"


def test_a_process_that_answers_late_is_left_alone(daemon: Start) -> None:
    run = daemon(env=limits(ping_s=0.1, hung_s=0.2, hung_after_s=60, status_s=0.1)).ready()
    pid = run.pid("frontend")
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: states(run)["frontend"] == "hung", "the status tells of it")
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: states(run)["frontend"] == "ready", "it answers again")
    assert run.pid("frontend") == pid


def test_a_base_directory_open_to_others_is_refused(daemon: Start, short_dir: Path) -> None:
    base = short_dir / "rltd"
    base.mkdir()
    base.chmod(0o755)
    run = daemon()
    assert run.wait() == 1
    assert run.text == f"error: {base} is open to other users; run: chmod 700 {base}"


def test_json_output_is_json_throughout(daemon: Start) -> None:
    run = daemon("log.format=json")
    run.line("ready in")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0
    entries = [json.loads(line) for line in run.text.splitlines()]
    assert {entry.get("process") for entry in entries} >= {"supervisor", "frontend"}
