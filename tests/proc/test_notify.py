"""What systemd hears."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from proc.running import Running
from rltd.supervisor.notify import Notifier


def collect(sock: socket.socket, until: str) -> list[str]:
    """Everything heard up to a message with `until`."""
    heard: list[str] = []
    while not any(until in message for message in heard):
        heard.append(sock.recv(4096).decode())
    return heard


def test_ready_watchdog_and_stopping(daemon: Callable[..., Running], short_dir: Path) -> None:
    path = short_dir / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(20)
        run = daemon(env={"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "200000"})
        start = collect(manager, "READY=1")
        assert any("STATUS=loading model.safetensors (50%)" in message for message in start)
        run.ready()
        collect(manager, "WATCHDOG=1")
        os.kill(run.pid("detokenizer"), signal.SIGKILL)
        collect(manager, "STATUS=restarting the detokenizer")
        collect(manager, "READY=1")
        run.process.send_signal(signal.SIGTERM)
        collect(manager, "STOPPING=1")
        assert run.wait() == 0


def test_a_process_that_does_not_answer_stops_the_watchdog(daemon: Callable[..., Running], short_dir: Path) -> None:
    path = short_dir / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(20)
        env = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "200000", "FAKE_DETOKENIZER": "never-answers"}
        run = daemon(env=env)
        collect(manager, "READY=1")
        run.line('"status\\?"', count=4)
        run.process.send_signal(signal.SIGTERM)
        assert not any("WATCHDOG" in message for message in collect(manager, "STOPPING=1"))
        assert run.wait() == 0


def test_an_abstract_socket_and_the_environment() -> None:
    name = f"rlt-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name)
        environment = {"NOTIFY_SOCKET": "@" + name, "WATCHDOG_USEC": "3000000", "HOME": "/"}
        notifier = Notifier.from_environment(environment)
        assert environment == {"HOME": "/"}
        assert notifier.watchdog_s == 3
        notifier.send("READY=1", "STATUS=fine")
        assert manager.recv(100) == b"READY=1\nSTATUS=fine"
    notifier.send("STATUS=nobody listens")
    notifier.close()
    notifier.send("STATUS=closed")


def test_a_watchdog_of_another_process_is_not_ours() -> None:
    environment = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}
    notifier = Notifier.from_environment(environment)
    assert notifier.watchdog_s is None
    notifier.close()
    assert Notifier.from_environment({"WATCHDOG_USEC": "5"}).watchdog_s is None
