"""What the daemon prints: its own lines and its children's, each with a prefix, from a thread of their own."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TextIO

#: A line longer than this is printed in parts.
MAX_LINE_BYTES = 1 << 20
#: Lines that wait for a reader of stdout that has stalled; more are counted and dropped.
MAX_WAITING_LINES = 10_000
#: to the start of the terminal's line, and it is empty
ERASE_LINE = "\r\x1b[2K"


class Printer:
    """Writes lines to stdout and stderr without ever blocking the caller: a terminal may be stopped, a pipe full."""

    def __init__(self, *, json_lines: bool = False, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._json = json_lines
        self._streams = {"out": out or sys.stdout, "err": err or sys.stderr}
        self._queue: queue.Queue[tuple[str, str] | None] = queue.Queue(MAX_WAITING_LINES)
        self._dropped = 0
        self._status = ""
        self._thread = threading.Thread(target=self._write, name="printer", daemon=True)
        self._thread.start()

    def say(self, text: str, *, level: str = "info") -> None:
        """Print a line of the supervisor itself: errors to stderr, the rest to stdout."""
        self._put("err" if level == "error" else "out", self._as_json("supervisor", os.getpid(), text, level) or text)

    def child_line(self, process: str, pid: int, stream: str, line: str) -> None:
        """Print a line that a child wrote to its `stream` ("out" or "err")."""
        if self._json and line.startswith("{"):
            self._put(stream, line)  # the child's own JSON names its process
        else:
            self._put(stream, self._as_json(process, pid, line, "info") or f"[{process} {pid}] {line}")

    @property
    def has_terminal(self) -> bool:
        """Whether somebody looks at a terminal that can change its last line."""
        return not self._json and self._streams["out"].isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def show_status(self, text: str) -> None:
        """Keep `text`, which is not wider than the terminal, below all lines; "" takes it away."""
        # One that finds the queue full is no loss: the next one says more.
        with suppress(queue.Full):
            self._queue.put_nowait(("status", text))

    def close(self, timeout_s: float = 1.0) -> None:
        """Wait until everything is written, or give up on a reader that does not read."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _as_json(self, process: str, pid: int, text: str, level: str) -> str | None:
        if not self._json:
            return None
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        entry = {"time": now, "level": level, "process": process, "pid": pid, "message": text}
        return json.dumps(entry, ensure_ascii=False)

    def _put(self, stream: str, line: str) -> None:
        try:
            self._queue.put_nowait((stream, line))
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            name, line = item
            try:
                if name == "status":
                    self._write_status(line)
                    continue
                if self._dropped:
                    line = f"({self._dropped} lines of output were dropped)\n{line}"
                    self._dropped = 0
                status = self._status
                self._write_status("")
                self._streams[name].write(line + "\n")
                self._streams[name].flush()
                self._write_status(status)
            except (OSError, ValueError):
                continue  # whoever read this is gone; the daemon goes on

    def _write_status(self, text: str) -> None:
        if text == self._status:
            return
        self._status = text
        self._streams["out"].write(ERASE_LINE + text)
        self._streams["out"].flush()


async def pump_lines(pipe: IO[bytes], print_line: Callable[[str], None]) -> None:
    """Hand each line of a child's pipe to `print_line` until the pipe ends; a last line without newline counts."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    rest = b""
    try:
        while chunk := await reader.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines.append(rest)
                rest = b""
            for line in lines:
                print_line(line.decode(errors="replace").rstrip("\r"))
    finally:
        if rest:
            print_line(rest.decode(errors="replace"))
        transport.close()
