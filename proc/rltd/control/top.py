"""`rltctl top`: the daemon's figures on the terminal, refreshed each second."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlt_protocols.control import ControlReply
from rltd.control import client

INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The daemon's figures at one moment of the monotonic clock."""

    at_s: float
    status: ControlReply


def watch(run_dir: Path) -> None:
    """Show the daemon in `run_dir` until q or Ctrl-C. Raises `ControlError` when it cannot be asked (any more)."""
    with suppress(KeyboardInterrupt), _keys() as keys, Live(screen=True, auto_refresh=False) as live:
        before: Sample | None = None
        while True:
            now = Sample(time.monotonic(), client.status(run_dir))
            live.update(view(before, now), refresh=True)
            before = now
            if _quit_within(keys, INTERVAL_S):
                return


def view(before: Sample | None, now: Sample) -> Group:
    """What the terminal shows; rates are those since `before`."""
    status = now.status
    tokens_per_s, loops_per_token = rates(before, now)
    lines = [
        f"requests         {counts(status.requests)}",
        f"KV pages         {counts(status.kv)}",
        f"tokens/s         {_figure(tokens_per_s, 1)}",
        f"loops per token  {_figure(loops_per_token, 2)} now, {_figure(status.loops_per_token, 2)} since the start",
        "",
        "q or Ctrl-C ends",
    ]
    return Group(process_table(status), *map(Text, lines))


def rates(before: Sample | None, now: Sample) -> tuple[float | None, float | None]:
    """Tokens per second and loops per token between two samples; None where there is nothing to divide by.

    Counters that went back are those of an engine that was restarted: no rate then.
    """
    if before is None:
        return None, None
    tokens = now.status.tokens - before.status.tokens
    loops = now.status.token_loops - before.status.token_loops
    seconds = now.at_s - before.at_s
    if tokens < 0 or seconds <= 0:
        return None, None
    return tokens / seconds, loops / tokens if tokens else None


def process_table(status: ControlReply) -> Table:
    table = Table("process", "pid", "state", "restarts")
    for process in status.processes:
        table.add_row(process.role, str(process.pid), process.state, str(process.restarts))
    return table


def show(status: ControlReply) -> None:
    """Print the figures once, for people."""
    console = Console(highlight=False)
    console.print(process_table(status))
    console.print("requests  " + counts(status.requests))
    console.print("KV pages  " + counts(status.kv))
    console.print(f"loops per token  {_figure(status.loops_per_token, 2)}")


def counts(counts: dict[str, int]) -> str:
    """`{"free": 7, "used": 0}` as "7 free, 0 used"."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "-"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


@contextmanager
def _keys() -> Iterator[int | None]:
    """The descriptor on which single keys arrive, without an echo; None where the input is no terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    fd = sys.stdin.fileno()
    settings = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)  # Ctrl-C stays a signal
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, settings)


def _quit_within(keys: int | None, seconds: float) -> bool:
    """Wait for the next refresh; True as soon as q is pressed, or the terminal is gone."""
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        if keys is None:
            time.sleep(left_s)
        elif select.select([keys], [], [], left_s)[0] and os.read(keys, 1) in (b"q", b"Q", b""):
            return True
    return False
