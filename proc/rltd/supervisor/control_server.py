"""The control socket: answers `rltctl`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal

from rlt_protocols import PROTOCOL_VERSION
from rlt_protocols.codec import ProtocolError, encode
from rlt_protocols.control import (
    AbortAnswer,
    AbortCommand,
    CacheResetCommand,
    ControlReply,
    DrainCommand,
    LogLevelCommand,
    ProcessStatus,
    ResetCache,
    Role,
    StatusCommand,
    ToChild,
    control_request,
    control_version,
)
from rltd.link.framing import FramingError, frame, read_frame_async
from rltd.supervisor.child import Values
from rltd.supervisor.run_dir import control_path
from rltd.supervisor.slot import Ending, Slot
from rltd.supervisor.supervisor import Supervisor

#: How long a client may take to send its request.
REQUEST_S = 5.0
#: How long replies under way may take when the daemon ends.
CLOSE_S = 1.0


class ControlServer:
    """Serves one request per connection on `control.sock`, which only this user can open."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._handlers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> ControlServer:
        path = control_path(self._supervisor.run_dir)
        self._server = await asyncio.start_unix_server(self._on_connection, path)
        path.chmod(0o600)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.close()
        if self._handlers:
            _, late = await asyncio.wait(self._handlers, timeout=CLOSE_S)
            for handler in late:
                handler.cancel()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        try:
            reply = await self._answer(reader)
            writer.write(frame(encode(reply)))
            await writer.drain()
        except (TimeoutError, ConnectionError):
            pass  # a client that says nothing or has left
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._handlers.discard(handler)

    async def _answer(self, reader: asyncio.StreamReader) -> ControlReply:
        try:
            async with asyncio.timeout(REQUEST_S):
                data = await read_frame_async(reader)
            protocol = control_version.decode(data or b"").protocol
            if protocol != PROTOCOL_VERSION:
                versions = f"rltctl speaks protocol {protocol}, the daemon {PROTOCOL_VERSION}"
                return _refusal(f"{versions}; use the rltctl of the daemon's installation")
            command = control_request.decode(data or b"").command
        except (FramingError, ProtocolError) as error:
            return _refusal(f"not a control request: {error}")
        match command:
            case StatusCommand():
                return await self._status()
            case DrainCommand(timeout_s):
                return await self._drain(timeout_s)
            case AbortCommand(answer_id):
                return await self._abort(answer_id)
            case CacheResetCommand():
                return await self._reset_cache()
            case LogLevelCommand(level):
                self._supervisor.set_log_level(level)
                return ControlReply(ok=True, message=f"all processes log at {level} until the daemon ends")

    async def _drain(self, timeout_s: float | None) -> ControlReply:
        supervisor = self._supervisor
        limit_s = supervisor.config.server.drain_timeout_s if timeout_s is None else timeout_s
        if supervisor.is_ending:
            return _refusal("rltd is already ending")
        supervisor.end(Ending(0, limit_s))
        await supervisor.drained.wait()
        return ControlReply(ok=True, message="drained; rltd stops")

    async def _abort(self, answer_id: str) -> ControlReply:
        limit_s = self._supervisor.limits.status_s
        ended = await self._told("frontend", lambda query: AbortAnswer(query, answer_id), limit_s)
        if isinstance(ended, ControlReply):
            return ended
        if ended == 0:
            return _refusal(
                f"no running request has the id {answer_id!r}; ids are those of answers, cmpl-… or chatcmpl-…"
            )
        return ControlReply(ok=True, message=f"aborted {answer_id}: {_many(ended, 'answer')} ended", count=ended)

    async def _reset_cache(self) -> ControlReply:
        # An engine listens between two ticks only; one that takes longer than this is killed.
        pages = await self._told("engine", ResetCache, self._supervisor.limits.hung_after_s)
        if isinstance(pages, ControlReply):
            return pages
        return ControlReply(ok=True, message=f"{_many(pages, 'page')} of the prefix cache freed", count=pages)

    async def _told(self, role: Role, make: Callable[[int], ToChild], timeout_s: float) -> int | ControlReply:
        """Let every ready process of `role` carry out a command; the sum of their counts, or why there is none."""
        children = [child for child in self._supervisor.ready_children() if child.peer.role == role]
        if not children:
            return _refusal(f"the {role} is not ready")
        counts = await asyncio.gather(*(child.command(make, timeout_s) for child in children))
        done = [count for count in counts if count is not None]
        if len(done) < len(counts):
            return _refusal(f"the {role} did not answer within {timeout_s:g} s, or died")
        return sum(done)

    async def _status(self) -> ControlReply:
        supervisor = self._supervisor
        children = supervisor.ready_children()
        answers = await asyncio.gather(*(child.ask(supervisor.limits.status_s) for child in children))
        engines = [a for child, a in zip(children, answers, strict=True) if child.peer.role == "engine" and a]
        tokens = int(sum(_number(engine, "tokens") for engine in engines))
        loops = int(sum(_number(engine, "token_loops") for engine in engines))
        return ControlReply(
            ok=True,
            processes=tuple(self._process(slot) for slot in supervisor.slots),
            requests={key: int(sum(_number(engine, key) for engine in engines)) for key in ("running", "waiting")},
            kv=_sum_pages(engines),
            loops_per_token=loops / tokens if tokens else None,
            tokens=tokens,
            token_loops=loops,
        )

    def _process(self, slot: Slot) -> ProcessStatus:
        state: Literal["starting", "ready", "hung", "down", "draining"]
        if slot.child is None or slot.child.exited.is_set():
            state = "down"
        elif not slot.child.is_ready:
            state = "starting"
        elif self._supervisor.is_hung(slot.child):
            state = "hung"
        else:
            state = "draining" if self._supervisor.is_ending else "ready"
        return ProcessStatus(slot.role, slot.child.pid if slot.child is not None else 0, state, slot.generation)


def _refusal(message: str) -> ControlReply:
    return ControlReply(ok=False, message=message)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _number(values: Values, key: str) -> float:
    value = values.get(key, 0)
    return value if isinstance(value, int | float) else 0


def _sum_pages(engines: list[Values]) -> dict[str, int]:
    pages: dict[str, int] = {}
    for engine in engines:
        kv = engine.get("kv")
        if isinstance(kv, Mapping):
            for state, count in kv.items():
                pages[state] = pages.get(state, 0) + int(count)
    return pages
