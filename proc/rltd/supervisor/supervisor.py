"""Starts the other processes, watches them, restarts them and ends them."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rlt import __version__
from rlt.config import Config
from rlt_protocols import PROTOCOL_VERSION
from rlt_protocols.control import (
    Drain,
    Drained,
    Fatal,
    FromChild,
    Hello,
    LogLevel,
    PeerDown,
    PeerUp,
    Progress,
    Ready,
    Refused,
    SetLogLevel,
    Stop,
    ToChild,
    Welcome,
)
from rltd.link.address import Peer, inbox_path
from rltd.supervisor import banner
from rltd.supervisor.child import Child
from rltd.supervisor.loading import Loading
from rltd.supervisor.notify import Notifier
from rltd.supervisor.output import Printer
from rltd.supervisor.restart import Backoff, Limits
from rltd.supervisor.run_dir import RunDir
from rltd.supervisor.slot import COMMANDS, Commands, Ending, Slot


class Supervisor:
    """One daemon. `run` returns its exit code and leaves no process behind; the run directory is the caller's."""

    def __init__(
        self,
        config: Config,
        http: socket.socket,
        url: str,
        run_dir: RunDir,
        *,
        printer: Printer,
        notifier: Notifier,
        commands: Commands = COMMANDS,
        limits: Limits,
    ) -> None:
        self.config = config
        self._run_dir = run_dir
        self.limits = limits
        self.slots = [Slot(role, 0, Backoff(limits)) for role in commands]
        #: set when nothing runs any more
        self.drained = asyncio.Event()
        self._http = http
        self._url = url
        self._printer = printer
        self._loading = Loading(printer)
        self._notifier = notifier
        self._commands = commands
        self._started_at_s = time.monotonic()
        self._was_ready = False
        loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[Ending] = loop.create_future()
        self._abandoned: asyncio.Future[int] = loop.create_future()

    async def run(self) -> int:
        """Run until a signal, a drain or a failure ends the daemon."""
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        async with asyncio.TaskGroup() as group:
            for slot in self.slots:
                group.create_task(self._keep(slot))
            watches = [
                group.create_task(watch()) for watch in (self._feed_watchdog, self._watch_run_dir, self._watch_children)
            ]
            ending = await self._ending
            self._notifier.send("STOPPING=1", "STATUS=stopping")
            code = await self._end(ending)
            for watch in watches:
                watch.cancel()
        return code

    @property
    def run_dir(self) -> Path:
        return self._run_dir.path

    @property
    def is_ending(self) -> bool:
        return self._ending.done()

    def set_log_level(self, level: LogLevel) -> None:
        """Set the level of every process that runs, and of those that will be started."""
        self.config = replace(self.config, log=replace(self.config.log, level=level))
        for slot in self.slots:
            if slot.child is not None and slot.child.welcomed:
                slot.child.send(SetLogLevel(level))

    def end(self, ending: Ending) -> None:
        """Begin to end the daemon; the first reason counts."""
        if not self._ending.done():
            self._ending.set_result(ending)

    def fail(self, message: str, code: int) -> None:
        """Give up: tell the user why, once, and end with `code`."""
        if not self._ending.done():
            for line in message.splitlines():
                self._printer.say(f"error: {line}", level="error")
            self.end(Ending(code))

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._ending.done():
            limit_s = self.config.server.drain_timeout_s
            self._printer.say(
                f"{number.name}: finishing running requests (at most {limit_s:g} s); again to stop at once"
            )
            self.end(Ending(0, limit_s))
        elif not self._abandoned.done():
            self._abandoned.set_result(128 + number)

    async def _keep(self, slot: Slot) -> None:
        """Start the slot's process again and again until the daemon ends or gives up on it."""
        while not self._ending.done():
            try:
                command = self._commands[slot.role]
                child = Child.spawn(
                    Peer(slot.role, slot.index, slot.generation),
                    command,
                    self._http if slot.role == "frontend" else None,
                )
            except OSError as error:
                self.fail(f"the {slot.role} cannot be started: {error}", 1)
                return
            slot.child = child
            await child.run(
                partial(self._on_message, slot, child), partial(self._on_death, child), self._printer, self.limits
            )
            if self._ending.done():
                return
            delay_s = self._after_death(slot, child)
            if delay_s is None:
                return
            await asyncio.wait({self._ending}, timeout=delay_s)
            slot.generation += 1

    def _on_death(self, child: Child) -> None:
        """First of all let the others know, so that they can end the requests that went through the dead process."""
        peer = child.peer
        if peer.role == "engine":
            self._loading.end()
        if child.ready_at_s is not None:
            self._broadcast(PeerDown(peer.role, peer.index, peer.generation))
        inbox_path(self.run_dir, peer).unlink(missing_ok=True)

    def _after_death(self, slot: Slot, child: Child) -> float | None:
        """Return the pause before the next start; None when the daemon ends instead."""
        text, usage = child.failure or ("", False)
        if usage or (text and not slot.was_ready):
            self.fail(text, 2 if usage else 1)
            return None
        what = f"the {slot.role} (pid {child.pid}) {child.cause}"
        if not slot.was_ready and not child.was_signalled:
            self.fail(f"{what} before it was ready", 1)
            return None
        delay_s = slot.backoff.after_death(child.ready_s)
        if delay_s is None:
            self.fail(f"{what}, after {self.limits.restarts} restarts in a row; giving up", 1)
            return None
        self._notifier.send(f"STATUS=restarting the {slot.role}")
        reason = f": {text}" if text else ""
        self._printer.say(f"{what}{reason}; restarting it in {delay_s:g} s", level="error")
        return delay_s

    def _on_message(self, slot: Slot, child: Child, message: FromChild) -> None:
        match message:
            case Hello():
                self._welcome(slot, child, message)
            case Ready(info, device):
                if slot.role == "engine":
                    self._loading.end()
                child.info, child.device = info, device
                child.ready_at_s = time.monotonic()
                slot.was_ready = True
                self._introduce(child)
                if all(s.is_ready for s in self.slots) and not self._ending.done():
                    self._on_all_ready()
            case Progress(stage, fraction):
                self._notifier.send(f"STATUS=loading {stage} ({fraction:.0%})")
                self._loading.show(stage, fraction)
            case Fatal(text, usage):
                child.failure = (text, usage)
            case Drained():
                child.drained.set()

    def _welcome(self, slot: Slot, child: Child, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION or hello.version != __version__:
            reason = (
                f"the {slot.role} process is rlt {hello.version} with protocol {hello.protocol}, the supervisor is rlt "
                f"{__version__} with protocol {PROTOCOL_VERSION}; install one version and start again"
            )
            child.send(Refused(reason))
            self.fail(reason, 1)
            return
        config = msgspec.msgpack.encode(self.config)
        child.send(Welcome(PROTOCOL_VERSION, slot.role, slot.index, slot.generation, str(self.run_dir), config))
        child.welcomed = True

    def _introduce(self, child: Child) -> None:
        """Tell the ready processes about `child`, and `child` about them."""
        peer = child.peer
        self._broadcast(PeerUp(peer.role, peer.index, peer.generation, child.info), but=child)
        for other in self.ready_children():
            if other is not child:
                child.send(PeerUp(other.peer.role, other.peer.index, other.peer.generation, other.info))

    def _on_all_ready(self) -> None:
        self._notifier.send("READY=1", f"STATUS=serving {self._url}")
        if self._was_ready:
            self._printer.say("all processes are ready again")
            return
        self._was_ready = True
        engine = next(c for c in self.ready_children() if c.peer.role == "engine")
        name = engine.info.name if engine.info is not None else self.config.model.path
        seconds = time.monotonic() - self._started_at_s
        plain = self.config.log.format == "json"
        for line in banner.ready(name, engine.device, self._url, seconds, plain=plain):
            self._printer.say(line)

    def ready_children(self) -> list[Child]:
        return [slot.child for slot in self.slots if slot.child is not None and slot.child.is_ready]

    def _broadcast(self, message: ToChild, but: Child | None = None) -> None:
        for child in self.ready_children():
            if child is not but:
                child.send(message)

    async def _end(self, ending: Ending) -> int:
        """Drain and stop; a second signal cuts it short."""
        orderly = asyncio.create_task(self._drain_and_stop(ending))
        waits: set[asyncio.Future[Any]] = {orderly, self._abandoned}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not orderly.done():
            orderly.cancel()
            with suppress(asyncio.CancelledError):
                await orderly
            await self._each_exited(lambda child: child.kill(), None)
            return self._abandoned.result()
        orderly.result()
        return ending.code

    async def _drain_and_stop(self, ending: Ending) -> None:
        frontend = next((c for c in self.ready_children() if c.peer.role == "frontend"), None)
        if ending.drain_s is not None and frontend is not None:
            frontend.send(Drain(ending.drain_s))
            waits = {asyncio.create_task(frontend.drained.wait()), asyncio.create_task(frontend.exited.wait())}
            try:
                await asyncio.wait(
                    waits, timeout=ending.drain_s + self.limits.drain_grace_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                for wait in waits:
                    wait.cancel()
        self.drained.set()
        # A process that is still loading would not read its orders.
        await self._each_exited(
            lambda child: child.send(Stop()) if child.is_ready else child.kill(), self.limits.stop_grace_s
        )
        await self._each_exited(lambda child: child.kill(), None)

    async def _each_exited(self, act: Callable[[Child], None], timeout_s: float | None) -> None:
        """Do `act` to every living child and wait until all are gone or the time is up."""
        living = [slot.child for slot in self.slots if slot.child is not None and not slot.child.exited.is_set()]
        for child in living:
            act(child)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(child.exited.wait() for child in living)), timeout_s)

    async def _watch_run_dir(self) -> None:
        """End the daemon when its directory is gone: processes that start would find no way to the others."""
        while self._run_dir.is_own():
            await asyncio.sleep(self.limits.run_dir_s)
        self.fail(f"the run directory {self.run_dir} was removed while rltd was running; rltd ends", 1)

    async def _watch_children(self) -> None:
        """Kill a ready process that has not answered for long, so that it is restarted like any dead one.

        Silence is counted in pings and not by the clock: a supervisor that was stopped itself accuses nobody.
        """
        limits = self.limits
        while not self._ending.done():
            for child in self.ready_children():
                if child.ping() * limits.ping_s >= limits.hung_after_s:
                    child.failure = (f"it had not answered for {limits.hung_after_s:g} s", False)
                    child.kill()
            await asyncio.sleep(limits.ping_s)

    def is_hung(self, child: Child) -> bool:
        """Whether a ready process has not answered for so long that users should know."""
        return child.missed_pings * self.limits.ping_s >= self.limits.hung_s

    async def _feed_watchdog(self) -> None:
        """Tell systemd that all is well as long as every ready process answers in time."""
        if self._notifier.watchdog_s is None:
            return
        interval_s = self._notifier.watchdog_s / 2
        while True:
            answers = await asyncio.gather(*(child.ask(interval_s) for child in self.ready_children()))
            if all(answer is not None for answer in answers):
                self._notifier.send("WATCHDOG=1")
            await asyncio.sleep(interval_s / 2)
