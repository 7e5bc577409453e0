"""Answers as the two APIs write them: completions and chat, whole or in chunks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from rlt_protocols.openai import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatMessage,
    ChatRequest,
    CompletionChoice,
    CompletionRequest,
    Delta,
    GenerationRequest,
    LoopUsage,
    PromptTokensDetails,
    Usage,
)
from rltd.frontend.job import Choice, Job, Update

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % data


@dataclass(slots=True)
class Collected:
    """One answer as a whole."""

    choice: Choice
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, update: Update) -> None:
        self.texts += update.texts
        self.token_ids += update.token_ids
        self.depths += update.depths
        self.finish_reason = update.finish_reason
        self.stop_reason = update.stop_reason


class Shape:
    """Writes one job's answers; the subclasses know the API."""

    def __init__(self, request: GenerationRequest, job: Job, model: str, echoes: list[str]) -> None:
        self._job = job
        self._model = model
        self._created = int(time.time())
        self._echoes = echoes
        self._with_ids = bool(request.return_token_ids)
        self._with_depths = bool(request.return_depths)
        self.with_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        self._begun: set[int] = set()

    def chunk(self, update: Update) -> bytes | None:
        """The event for an update, or None when it has nothing to show yet."""
        index = update.choice.index
        first = index not in self._begun
        has_more = update.finish_reason is not None or (update.token_ids and (self._with_ids or self._with_depths))
        if not (update.texts or has_more or (first and self._shows_begin(index))):
            return None
        self._begun.add(index)
        return event(_encoder.encode(self._chunk(update, first)))

    def usage_chunk(self) -> bytes:
        """The event with the totals, after the last chunk."""
        return event(_encoder.encode(self._answer((), usage=usage_of(self._job))))

    def whole(self, answers: list[Collected]) -> bytes:
        """The body of an answer that is not streamed."""
        raise NotImplementedError

    def _chunk(self, update: Update, first: bool) -> Answer:
        raise NotImplementedError

    def _answer(self, choices: tuple[CompletionChoice, ...], usage: Usage | None | UnsetType) -> Answer:
        raise NotImplementedError

    def _shows_begin(self, index: int) -> bool:
        """Whether an answer starts with a chunk of its own, before it has text."""
        raise NotImplementedError

    @property
    def _no_usage(self) -> None | UnsetType:
        return None if self.with_usage else UNSET

    def _ids(self, ids: list[int]) -> list[int] | UnsetType:
        return ids if self._with_ids else UNSET

    def _depths(self, depths: list[int]) -> list[int] | UnsetType:
        return depths if self._with_depths else UNSET

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        return list(self._job.choices[index].prompt) if self._with_ids else UNSET


class CompletionShape(Shape):
    def __init__(self, request: CompletionRequest, job: Job, model: str, echoes: list[str]) -> None:
        super().__init__(request, job, model, echoes)

    def whole(self, answers: list[Collected]) -> bytes:
        choices = tuple(
            CompletionChoice(
                index=answer.choice.index,
                text=self._echoes[answer.choice.index] + "".join(answer.texts),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                token_ids=self._ids(answer.token_ids),
                depths=self._depths(answer.depths),
                prompt_token_ids=self._prompt_ids(answer.choice.index),
            )
            for answer in answers
        )
        return _encoder.encode(self._answer(choices, usage=usage_of(self._job)))

    def _chunk(self, update: Update, first: bool) -> Answer:
        index = update.choice.index
        choice = CompletionChoice(
            index=index,
            text=self._echoes[index] + update.text if first else update.text,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            token_ids=self._ids(update.token_ids),
            depths=self._depths(update.depths),
            prompt_token_ids=self._prompt_ids(index) if first else UNSET,
        )
        return self._answer((choice,), usage=self._no_usage)

    def _answer(self, choices: tuple[CompletionChoice, ...], usage: Usage | None | UnsetType) -> Answer:
        return Answer(
            id=self._job.id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )

    def _shows_begin(self, index: int) -> bool:
        return bool(self._echoes[index])
