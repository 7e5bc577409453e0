"""The frontend's side of the engines: submit, abort, dispatch of text, and the fate of requests when a process dies.

Everything runs on the event loop's thread. Every accepted request gets exactly one final event: whatever ends it first
takes it out of the table, and what comes later finds nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlt.text.detokenize import PROMPT_TAIL_TOKENS
from rlt_protocols.codec import encode, pack_ids
from rlt_protocols.control import PeerDown, PeerUp, Role
from rlt_protocols.engine import AbortRequest, AddRequest, EngineStats
from rlt_protocols.params import ModelInfo, ResolvedParams
from rlt_protocols.text import TextBatch, TextDelta
from rltd.frontend.errors import too_busy, unavailable
from rltd.frontend.job import Choice, Failure, Job
from rltd.frontend.metrics import Metrics
from rltd.frontend.peers import Peers

log = logging.getLogger(__name__)

#: `Outboxes.send`
Send = Callable[[Role, int, int, Sequence[bytes]], bool]

RESTART_RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class NewChoice:
    """One answer that an HTTP request asks for."""

    prompt: Sequence[int]
    params: ResolvedParams


class EngineClient:
    def __init__(
        self, send: Send, generation: int, metrics: Metrics, *, max_queue: int, drop: Callable[[Role, int, int], None]
    ) -> None:
        self._send = send
        self._drop = drop
        self._metrics = metrics
        self._max_queue = max_queue
        self._peers = Peers(generation)
        self._choices: dict[str, Choice] = {}
        self._load: dict[int, int] = {}
        self._draining = False
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()

    @property
    def info(self) -> ModelInfo | None:
        """The served model; None before the first engine is ready."""
        return self._peers.info

    @property
    def healthy(self) -> bool:
        return self._peers.healthy

    @property
    def accepting(self) -> bool:
        return self._peers.ready and not self._draining

    @property
    def active(self) -> int:
        """Requests accepted and not finished."""
        return len(self._choices)

    def check_admission(self, count: int = 1) -> ModelInfo:
        """Return the served model if `count` more requests can be taken; raises `ApiError` 503 or 429."""
        if self._draining:
            raise unavailable("the server is shutting down", "draining", RESTART_RETRY_AFTER_S)
        info = self._peers.info
        if info is None or not self._peers.ready:
            state = "restarting" if info is not None else "loading the model"
            raise unavailable(f"the server is {state}", "not_ready", RESTART_RETRY_AFTER_S)
        if self.active + count > self._max_queue:
            raise too_busy()
        return info

    def submit(self, prefix: str, wanted: Sequence[NewChoice], started_s: float) -> Job:
        """Hand requests to the engines; `started_s` is the monotonic time at which the HTTP request came.

        Raises `ApiError` when they cannot be taken; then none of them was.
        """
        self.check_admission(len(wanted))
        job = Job(f"{prefix}-{uuid.uuid4().hex}")
        for index, new in enumerate(wanted):
            target = self._peers.target(self._load)
            assert target is not None, "admission was checked"
            request_id = f"{job.id}-{index}"
            choice = Choice(index, request_id, new.prompt, new.params, target.engine, target.route, job, started_s)
            job.choices.append(choice)
            self._choices[request_id] = choice
            self._load[target.engine] = self._load.get(target.engine, 0) + 1
            tail = tuple(new.prompt[-PROMPT_TAIL_TOKENS:])
            message = AddRequest(request_id, target.route, new.params, tail)
            self._send("engine", target.engine, target.route.engine, [encode(message), pack_ids(new.prompt)])
        self._idle.clear()
        self._metrics.prompt_tokens(job.prompt_tokens)
        return job

    def abort(self, job: Job) -> None:
        """Drop what is still running of a job; its client does not want it any more."""
        running = [choice for choice in job.choices if choice.running]
        for choice in running:
            self._end(choice)
            self._metrics.finished(choice, "abort")
        self._tell_engines(running)

    def give_up(self, job: Job, failure: Failure) -> None:
        """End what is still running of a job with an error."""
        self._fail([choice for choice in job.choices if choice.running], failure)

    def end_answer(self, answer_id: str, failure: Failure) -> int:
        """End what is still running of the answer with this id, with an error; returns how many choices that was."""
        running = [choice for choice in self._choices.values() if choice.job.id == answer_id]
        self._fail(running, failure)
        return len(running)

    def on_text(self, batch: TextBatch) -> None:
        now_s = time.monotonic()
        for delta in batch.items:
            choice = self._choices.get(delta.request_id)
            if choice is not None:
                self._take(choice, delta, now_s)

    def on_stats(self, stats: EngineStats) -> None:
        self._metrics.engine_stats(stats)

    def on_peer_up(self, peer: PeerUp) -> None:
        replaced = self._peers.up(peer)
        if replaced is not None:
            self._lose(PeerDown(peer.role, peer.index, replaced))
        if peer.info is not None:
            self._metrics.bind(peer.info.name)

    def on_peer_down(self, peer: PeerDown) -> None:
        self._peers.down(peer)
        self._lose(peer)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests; return when none is running, having ended those that are after `timeout_s`."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            self.end_all(Failure("the server is shutting down", "draining"))

    def end_all(self, failure: Failure) -> None:
        """Refuse new requests and end every running one with an error."""
        self._draining = True
        self._fail(list(self._choices.values()), failure)

    def _take(self, choice: Choice, delta: TextDelta, now_s: float) -> None:
        choice.completion_tokens += len(delta.token_ids)
        choice.loops += sum(delta.depths)
        choice.cached_tokens = max(choice.cached_tokens, delta.cached_tokens)
        self._metrics.delta(choice, delta, now_s)
        if delta.token_ids:
            choice.first_s = choice.first_s or now_s
            choice.last_s = now_s
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            self._end(choice)
            self._metrics.finished(choice, delta.finish_reason)
        choice.job.deliver(choice, delta)

    def _lose(self, peer: PeerDown) -> None:
        """End the requests whose route went through a dead process."""
        if peer.role == "engine":
            self._metrics.engine_down(peer.index)
        lost = [choice for choice in self._choices.values() if _depends(choice, peer)]
        if lost:
            log.warning("%d requests are lost with the %s", len(lost), peer.role)
        failure = Failure(f"the {peer.role} stopped while it worked on this request", f"{peer.role}_restarted")
        self._drop(peer.role, peer.index, peer.generation)
        self._fail(lost, failure)

    def _fail(self, choices: list[Choice], failure: Failure) -> None:
        for choice in choices:
            choice.finish_reason = "error"
            self._end(choice)
            self._metrics.finished(choice, "error")
            choice.job.fail(choice, failure)
        self._tell_engines(choices)

    def _end(self, choice: Choice) -> None:
        del self._choices[choice.request_id]
        self._load[choice.engine] -= 1
        choice.running = False
        if not self._choices:
            self._idle.set()

    def _tell_engines(self, choices: list[Choice]) -> None:
        """Send the aborts, one message per engine; an engine that is gone needs none."""
        by_engine: dict[tuple[int, int], list[str]] = {}
        for choice in choices:
            by_engine.setdefault((choice.engine, choice.route.engine), []).append(choice.request_id)
        for (engine, generation), request_ids in by_engine.items():
            if self._peers.is_alive("engine", engine, generation):
                self._send("engine", engine, generation, [encode(AbortRequest(tuple(request_ids)))])


def _depends(choice: Choice, peer: PeerDown) -> bool:
    if peer.role == "engine":
        return choice.engine == peer.index and choice.route.engine == peer.generation
    return peer.role == "detokenizer" and choice.route.detokenizer == peer.generation
