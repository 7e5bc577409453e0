"""A daemon under test, run as a process: its output line by line, its children, its files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rlt_protocols.control import ControlReply
from rltd.control import client

T = TypeVar("T")

DAEMON = Path(__file__).parent / "fakes" / "daemon.py"
WAIT_S = 20.0


def eventually(probe: Callable[[], T | None], what: str, limit_s: float = WAIT_S) -> T:
    """Return the first result of `probe` that is true; fail after `limit_s`."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        result = probe()
        if result:
            return result
        time.sleep(0.005)
    raise AssertionError(f"not within {limit_s} s: {what}")


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run. One that waits to be reaped, e.g. by the container's init, has ended."""

    def lives(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [process for process in processes if lives(process)]


def fake_daemon(*assignments: str) -> list[str]:
    """Command line of a daemon whose children are fakes."""
    return [sys.executable, str(DAEMON), "server.port=0", *assignments]


def real_daemon(model: str, *assignments: str) -> list[str]:
    """Command line of the daemon as users start it, in float32 on the CPU and on a free port."""
    settings = ["server.port=0", "engine.device=cpu", "model.dtype=float32", *assignments]
    sets = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "rltd.main", "start", "--model", model, *sets]


class Running:
    """Starts a daemon; lines of stdout and stderr are collected together."""

    def __init__(self, base: Path, command: list[str], env: dict[str, str] | None = None) -> None:
        self.base = base / "rltd"
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(base), **(env or {})},
        )
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._lines.append(line.rstrip("\n"))
                self._news.notify_all()

    @property
    def run_dir(self) -> Path:
        return self.base / str(self.process.pid)

    @property
    def text(self) -> str:
        with self._news:
            return "\n".join(self._lines)

    def line(self, pattern: str, *, count: int = 1, limit_s: float = WAIT_S) -> re.Match[str]:
        """Wait for the `count`-th line in which `pattern` is found."""

        def find() -> re.Match[str] | None:
            found = [m for m in (re.search(pattern, line) for line in self._lines) if m]
            return found[count - 1] if len(found) >= count else None

        with self._news:
            match = self._news.wait_for(find, limit_s)
        assert match, f"no line {pattern!r} in:\n{self.text}"
        return match

    def ready(self) -> Running:
        self.line(r"^ready in \d+\.\d s")
        return self

    @property
    def url(self) -> str:
        return self.line(r"^rlt .* (http://\S+)$").group(1)

    def orders(self, me: str, kind: str, about: str | None = None, *, count: int = 1) -> list[dict[str, Any]]:
        """Wait until the fake process `me` was told at least `count` orders of this kind, e.g. `peer-down`."""

        def told() -> list[dict[str, Any]]:
            found = []
            for line in self._lines:
                _, bracket, rest = line.partition("] ")
                entry = json.loads(rest) if bracket and rest.startswith("{") else None
                if entry and entry["me"] == me and entry["order"]["type"] == kind:
                    found.append(entry)
            return [e for e in found if about is None or e["order"]["role"] == about]

        with self._news:
            assert self._news.wait_for(lambda: len(told()) >= count, WAIT_S), f"{me}: {kind}:\n{self._lines}"
            return told()

    def status(self) -> ControlReply:
        return client.status(self.run_dir)

    def pid(self, role: str) -> int:
        return next(p.pid for p in self.status().processes if p.role == role)

    def all_ready(self) -> ControlReply | None:
        reply = self.status()
        return reply if all(p.state == "ready" for p in reply.processes) else None

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self, limit_s: float = WAIT_S) -> int:
        """Wait for the end, output included, and return the exit code."""
        code = self.process.wait(limit_s)
        self._reader.join(limit_s)
        assert not self._reader.is_alive(), "something still holds the daemon's stdout"
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            left = self.children()
            self.process.kill()
            eventually(lambda: not living(left), "the children end", 5)
            self.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
