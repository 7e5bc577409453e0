"""One life of one child process: its spawn, its pipe, its output and its death."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from rlt_protocols.codec import ProtocolError, encode
from rlt_protocols.control import Done, FromChild, StatusQuery, StatusReply, ToChild, from_child
from rlt_protocols.params import ModelInfo
from rltd.link.address import Peer
from rltd.link.framing import FramingError, frame, read_frame_async
from rltd.supervisor.output import Printer, pump_lines
from rltd.supervisor.restart import Limits

Values = dict[str, float | str | dict[str, float]]


class Child:
    """A running process and what it has said about itself."""

    def __init__(self, peer: Peer, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.peer = peer
        self.pid = process.pid
        self.exited = asyncio.Event()
        self.drained = asyncio.Event()
        #: it has its `Welcome`, which must be the first message
        self.welcomed = False
        self.info: ModelInfo | None = None
        self.device = ""
        #: monotonic time of `Ready`; None before
        self.ready_at_s: float | None = None
        #: message for the user and whether it is a usage error
        self.failure: tuple[str, bool] | None = None
        #: pings in a row without an answer
        self.missed_pings = 0
        self._ping: int | None = None
        self._process = process
        self._link = link
        self._writer: asyncio.StreamWriter | None = None
        self._queries: dict[int, asyncio.Future[StatusReply | Done]] = {}
        self._query_ids = itertools.count()

    @classmethod
    def spawn(cls, peer: Peer, command: Sequence[str], http: socket.socket | None) -> Child:
        """Start `command` in a session of its own, so that Ctrl-C in a terminal reaches the supervisor only."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            arguments = [*command, "--link-fd", str(theirs.fileno())]
            fds = [theirs.fileno()]
            if http is not None:
                arguments += ["--http-fd", str(http.fileno())]
                fds.append(http.fileno())
            try:
                process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=fds,
                    start_new_session=True,
                    # unbuffered, so that a child that is killed has written its last lines
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                )
            except OSError:
                ours.close()
                raise
        return cls(peer, process, ours)

    @property
    def is_ready(self) -> bool:
        return self.ready_at_s is not None and not self.exited.is_set()

    @property
    def ready_s(self) -> float:
        """For how long the child has been ready."""
        return 0.0 if self.ready_at_s is None else time.monotonic() - self.ready_at_s

    @property
    def cause(self) -> str:
        """How the process ended, in words."""
        code = self._process.returncode
        if code is None or code >= 0:
            return f"exited with code {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    @property
    def was_signalled(self) -> bool:
        return (self._process.returncode or 0) < 0

    async def run(
        self, handle: Callable[[FromChild], None], on_death: Callable[[], None], printer: Printer, limits: Limits
    ) -> None:
        """Serve the child until it is dead (then `on_death` is called at once) and its output is printed."""
        process, name = self._process, self.peer.role
        assert process.stdout is not None
        assert process.stderr is not None
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._wait, args=(loop,), name=f"wait-{name}", daemon=True).start()
        pumps = [
            asyncio.create_task(pump_lines(pipe, partial(printer.child_line, name, self.pid, stream)))
            for pipe, stream in ((process.stdout, "out"), (process.stderr, "err"))
        ]
        link = asyncio.create_task(self._serve_link(handle, limits))
        link.add_done_callback(lambda _: self.kill())
        try:
            await self.exited.wait()
            on_death()
            # What the process said last may still be in the pipe, e.g. why it cannot start.
            await asyncio.wait({link, *pumps}, timeout=limits.output_grace_s)
            if link.done():
                link.result()
        finally:
            self.kill()  # also what the process started itself
            for task in (link, *pumps):
                task.cancel()
            await asyncio.gather(link, *pumps, return_exceptions=True)

    def send(self, message: ToChild) -> None:
        """Send without waiting; a child that is dying gets nothing."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(encode(message)))

    async def ask(self, timeout_s: float) -> Values | None:
        """Return the child's figures, or None when it does not answer in time."""
        answer = await self._answer(StatusQuery, timeout_s)
        return answer.values if isinstance(answer, StatusReply) else None

    async def command(self, make: Callable[[int], ToChild], timeout_s: float) -> int | None:
        """Send the command that `make` builds for a query number; return its `Done.count`.

        None when the child has not carried it out in time, or died.
        """
        answer = await self._answer(make, timeout_s)
        return answer.count if isinstance(answer, Done) else None

    async def _answer(self, make: Callable[[int], ToChild], timeout_s: float) -> StatusReply | Done | None:
        query = next(self._query_ids)
        answer = self._queries[query] = asyncio.get_running_loop().create_future()
        self.send(make(query))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return None
        finally:
            del self._queries[query]

    def ping(self) -> int:
        """Ask for a sign of life, unless the last question is open; return how many times in a row it was."""
        if self._ping is not None:
            self.missed_pings += 1
        else:
            self._ping = next(self._query_ids)
            self.send(StatusQuery(self._ping))
        return self.missed_pings

    def kill(self) -> None:
        """SIGKILL the process and everything in its session's process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        self.exited.set()
        for query, answer in self._queries.items():
            if not answer.done():
                answer.set_result(StatusReply(query, {}))

    async def _serve_link(self, handle: Callable[[FromChild], None], limits: Limits) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._link)
        try:
            while (data := await read_frame_async(reader)) is not None:
                message = from_child.decode(data)
                if isinstance(message, StatusReply | Done):
                    if message.query == self._ping:
                        self._ping, self.missed_pings = None, 0
                    answer = self._queries.get(message.query)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                else:
                    handle(message)
        except (ConnectionError, FramingError, ProtocolError) as error:
            if not self.exited.is_set():
                self.failure = self.failure or (
                    f"the {self.peer.role} broke its pipe to the supervisor: {error}",
                    False,
                )
        finally:
            self._writer.close()
        # Without its pipe a process is lost to the daemon, alive or not.
        with suppress(TimeoutError):
            await asyncio.wait_for(self.exited.wait(), limits.link_grace_s)
