"""One HTTP request's answers while they grow: between the inbox, which is never slow, and a client, which may be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlt_protocols.engine import Route
from rlt_protocols.params import ResolvedParams
from rlt_protocols.text import FinishReason, SpelledLogprob, TextDelta
from rltd.frontend.errors import ClientGone


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an answer ended with an error; the message is for the client."""

    message: str
    code: str = "internal_error"
    status: int = 500


@dataclass(slots=True, eq=False)
class Choice:
    """One answer: one request to an engine."""

    index: int
    request_id: str
    prompt: Sequence[int]
    params: ResolvedParams
    engine: int
    route: Route
    job: Job
    #: when the HTTP request came
    started_s: float
    #: an engine counts it, so it must be told when the answer is not wanted any more
    running: bool = True
    completion_tokens: int = 0
    loops: int = 0
    cached_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True, eq=False)
class Update:
    """What is new of one answer since the client took the last update."""

    choice: Choice
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[SpelledLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    failure: Failure | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Job:
    """The answers of one HTTP request. Everything runs on the event loop."""

    def __init__(self, job_id: str) -> None:
        self.id = job_id
        self.choices: list[Choice] = []
        self._pending: dict[int, Update] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._client_gone = False

    @property
    def finished(self) -> bool:
        """Whether every answer has had its final event."""
        return not any(choice.running for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once however many answers it gets."""
        prompts = {id(choice.prompt): len(choice.prompt) for choice in self.choices}
        return sum(prompts.values())

    def deliver(self, choice: Choice, delta: TextDelta) -> None:
        """Add a delta to what the client has not taken yet."""
        update = self._update(choice)
        if delta.text:
            update.texts.append(delta.text)
        update.token_ids.extend(delta.token_ids)
        update.depths.extend(delta.depths)
        update.logprobs.extend(delta.logprobs)
        if delta.finish_reason == "error":
            self.fail(choice, Failure(delta.error or "the request failed"))
        elif delta.finish_reason is not None:
            update.finish_reason = delta.finish_reason
            update.stop_reason = delta.stop_reason
        self._wake()

    def fail(self, choice: Choice, failure: Failure) -> None:
        """End an answer with an error."""
        update = self._update(choice)
        update.finish_reason = "error"
        update.failure = failure
        self._wake()

    def client_left(self) -> None:
        """Make `updates` raise `ClientGone`, now or at its next call."""
        self._client_gone = True
        self._wake()

    async def updates(self) -> list[Update]:
        """Wait for news and take them all, at most one update per answer. Raises `ClientGone`."""
        while not self._pending and not self._client_gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._client_gone:
            raise ClientGone
        news = list(self._pending.values())
        self._pending.clear()
        return news

    def _update(self, choice: Choice) -> Update:
        update = self._pending.get(choice.index)
        if update is None:
            update = self._pending[choice.index] = Update(choice)
        return update

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
