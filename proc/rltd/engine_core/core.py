"""The engine core's main loop: take commands, run a tick, hand the results on. No sockets here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec

from rlt.errors import RltError
from rlt_protocols.control import AbortAnswer, Done, Drain, PeerDown, PeerUp, ResetCache, StatusQuery, StatusReply, Stop
from rlt_protocols.engine import AbortRequest, AddRequest, EngineStats, Route
from rlt_protocols.params import ModelInfo, ParamError, ResolvedParams
from rlt_protocols.text import CloseText, OpenText, TokenBatch, Tokens, open_text
from rltd.link.address import Peer
from rltd.link.child import Order

log = logging.getLogger(__name__)

#: Shortest time between two reports of figures to the frontend.
REPORT_INTERVAL_S = 0.2
#: Shortest time between two checks of an idle engine's accounts.
CHECK_INTERVAL_S = 10.0


class EngineLike(Protocol):
    """What the core needs of `rlt.engine.Engine`."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request_id: str, prompt: list[int], params: ResolvedParams) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def reset_prefix_cache(self) -> int: ...
    def step(self) -> list[Tokens]: ...
    def stats(self) -> EngineStats: ...
    def check_integrity(self) -> None: ...


@dataclass(frozen=True, slots=True)
class NewRequest:
    """An `AddRequest` with its prompt frame unpacked."""

    header: AddRequest
    prompt: list[int]


Command = NewRequest | AbortRequest | Order


@dataclass(frozen=True, slots=True)
class ToDetokenizer:
    generation: int
    batch: TokenBatch


@dataclass(frozen=True, slots=True)
class ToFrontend:
    generation: int
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class ToSupervisor:
    reply: StatusReply | Done


@dataclass(frozen=True, slots=True)
class Meet:
    """Open the way to this process, which is up."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Forget:
    """Close what is open towards this dead process."""

    peer: Peer


Outgoing = ToDetokenizer | ToFrontend | ToSupervisor | Meet | Forget


class EngineCore:
    """Owns the engine and knows which processes each of its requests depends on.

    Everything runs on the thread that calls `run`. Commands are applied between ticks only, all that have arrived at
    once, so an abort takes effect before the next tick.
    """

    def __init__(
        self, engine: EngineLike, peer: Peer, commands: SimpleQueue[Command], emit: Callable[[Outgoing], None]
    ) -> None:
        self._engine = engine
        self._peer = peer
        self._commands = commands
        self._emit = emit
        self._routes: dict[str, Route] = {}
        #: items for the next batch, by generation of the detokenizer
        self._items: dict[int, list[OpenText | Tokens | CloseText]] = {}
        self._frontend: int | None = None
        self._dead_frontend = -1
        self._dead_detokenizer = -1
        self._tick_seconds: tuple[float, ...] = ()
        self._changed = False
        self._next_report_s = 0.0
        self._next_check_s = 0.0
        self._stopped = False

    def run(self) -> None:
        """Work until a `Stop` arrives."""
        while True:
            self._apply_commands()
            if self._stopped:
                return
            if self._engine.has_work:
                for tokens in self._engine.step():
                    self._take(tokens)
                self._changed = True
            self._flush()
            self._check_when_idle()
            self._report()

    def _check_when_idle(self) -> None:
        """Check the engine's accounts, seldom. A broken one ends this process, which is better than wrong answers."""
        now_s = time.monotonic()
        if not self._engine.has_work and now_s >= self._next_check_s:
            self._engine.check_integrity()
            self._next_check_s = now_s + CHECK_INTERVAL_S

    def _apply_commands(self) -> None:
        """Apply everything that has arrived; wait for the first command when there is nothing else to do."""
        try:
            if self._engine.has_work:
                self._apply(self._commands.get_nowait())
            elif self._changed and self._frontend is not None:
                self._apply(self._commands.get(timeout=max(0.0, self._next_report_s - time.monotonic())))
            else:
                self._apply(self._commands.get())
            while not self._stopped:
                self._apply(self._commands.get_nowait())
        except Empty:
            return

    def _apply(self, command: Command) -> None:
        match command:
            case NewRequest(header, prompt):
                self._add(header, prompt)
            case AbortRequest(request_ids):
                for request_id in request_ids:
                    self._abort(request_id)
            case PeerUp(role, index, generation):
                self._emit(Meet(Peer(role, index, generation)))
                if role == "frontend":
                    self._frontend = generation
                    self._changed = True
            case PeerDown(role, index, generation):
                self._peer_down(Peer(role, index, generation))
            case StatusQuery(query):
                self._emit(ToSupervisor(self._status(query)))
            case ResetCache(query):
                pages = self._engine.reset_prefix_cache()
                log.info("the prefix cache was reset: %d pages freed", pages)
                self._emit(ToSupervisor(Done(query, pages)))
                self._changed = True
            case Stop():
                self._stopped = True
            case Drain() | AbortAnswer():
                pass

    def _add(self, header: AddRequest, prompt: list[int]) -> None:
        request_id, route, params = header.request_id, header.route, header.params
        if (
            route.engine != self._peer.generation
            or route.frontend <= self._dead_frontend
            or route.detokenizer <= self._dead_detokenizer
        ):
            log.debug("request %s came after a process of its route had died", request_id)
            return
        if request_id in self._routes:
            log.error("request id %s is in use; the second request is dropped", request_id)
            return
        self._items.setdefault(route.detokenizer, []).append(open_text(request_id, route, params, header.prompt_tail))
        self._routes[request_id] = route
        self._changed = True
        try:
            self._engine.add(request_id, prompt, params)
        except (ParamError, RltError) as error:
            self._take(Tokens(request_id=request_id, finish_reason="error", error=str(error)))
        except ValueError:
            # What is not written for clients stays here.
            log.exception("request %s was refused", request_id)
            self._take(Tokens(request_id=request_id, finish_reason="error", error="the engine refused the request"))

    def _take(self, tokens: Tokens) -> None:
        route = self._routes.get(tokens.request_id)
        if route is None:
            return
        self._items.setdefault(route.detokenizer, []).append(tokens)
        if tokens.finish_reason is not None:
            del self._routes[tokens.request_id]

    def _abort(self, request_id: str) -> None:
        route = self._routes.pop(request_id, None)
        if route is None:
            return
        self._engine.abort(request_id)
        self._items.setdefault(route.detokenizer, []).append(CloseText(request_id))
        self._changed = True

    def _peer_down(self, peer: Peer) -> None:
        if peer.role == "frontend":
            self._dead_frontend = max(self._dead_frontend, peer.generation)
            if self._frontend is not None and self._frontend <= peer.generation:
                self._frontend = None
            orphans = [name for name, route in self._routes.items() if route.frontend == peer.generation]
        elif peer.role == "detokenizer":
            self._dead_detokenizer = max(self._dead_detokenizer, peer.generation)
            orphans = [name for name, route in self._routes.items() if route.detokenizer == peer.generation]
        else:
            orphans = []
        for request_id in orphans:
            self._abort(request_id)
        if orphans:
            log.info("dropped %d requests: the %s is gone", len(orphans), peer.role)
        self._emit(Forget(peer))

    def _flush(self) -> None:
        for generation, items in self._items.items():
            self._emit(ToDetokenizer(generation, TokenBatch(self._peer.index, tuple(items))))
        self._items.clear()

    def _report(self) -> None:
        """Send the figures to the frontend when they changed and the last report is old enough."""
        now_s = time.monotonic()
        if not self._changed or self._frontend is None or now_s < self._next_report_s:
            return
        stats = self._stats()
        self._emit(ToFrontend(self._frontend, stats))
        self._tick_seconds = ()
        self._changed = False
        self._next_report_s = now_s + REPORT_INTERVAL_S

    def _stats(self) -> EngineStats:
        stats = self._engine.stats()
        self._tick_seconds += stats.tick_seconds
        return msgspec.structs.replace(stats, engine=self._peer.index, tick_seconds=self._tick_seconds)

    def _status(self, query: int) -> StatusReply:
        stats = self._stats()
        return StatusReply(
            query,
            {
                "running": stats.running,
                "waiting": stats.waiting,
                "kv": {state: float(pages) for state, pages in stats.kv_pages.items()},
                "tokens": stats.tokens,
                "token_loops": stats.token_loops,
            },
        )
