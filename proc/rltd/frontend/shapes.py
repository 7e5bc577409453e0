"""Answers as the two APIs write them: completions and chat, whole or in chunks."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from rlt.text.parts import AnswerForm, AnswerParts, Parts
from rlt.text.toolcalls import ToolCall as FoundCall
from rlt_protocols.answers import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    Delta,
    LoopUsage,
    PromptTokensDetails,
    ToolCallDelta,
    Usage,
)
from rlt_protocols.openai import FunctionCall, GenerationRequest, ToolCall
from rlt_protocols.text import SpelledLogprob
from rltd.frontend.job import Choice, Job, Update
from rltd.frontend.logprobs import TextOffsets, chat_logprobs, completion_logprobs

DONE = b"data: [DONE]\n\n"

ObjectName = Literal["text_completion", "chat.completion", "chat.completion.chunk"]
AnyChoice = CompletionChoice | ChatChoice | ChatChunkChoice

_encoder = msgspec.json.Encoder()


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % data


@dataclass(slots=True)
class Collected:
    """One answer as a whole."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[SpelledLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, update: Update) -> None:
        self.texts += update.texts
        self.token_ids += update.token_ids
        self.depths += update.depths
        self.logprobs += update.logprobs
        self.finish_reason = update.finish_reason
        self.stop_reason = update.stop_reason


class Shape(ABC):
    """Writes one job's answers; the subclasses know the API."""

    _object: ObjectName
    _chunk_object: ObjectName

    def __init__(
        self, request: GenerationRequest, job: Job, model: str, echoes: list[str], *, has_text: bool = True
    ) -> None:
        """`has_text` False: the model has no tokenizer, so every update is shown although it has no text."""
        self._job = job
        self._model = model
        self._created = int(time.time())
        self._echoes = echoes
        self._with_ids = bool(request.return_token_ids)
        self._with_depths = bool(request.return_depths)
        # All of a job's answers ask for the same.
        self._with_logprobs = any(choice.params.logprobs is not None for choice in job.choices)
        self._with_empty = self._with_ids or self._with_depths or self._with_logprobs or not has_text
        self.with_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        self._begun: set[int] = set()

    def chunk(self, update: Update) -> bytes | None:
        """The event for an update, or None when it has nothing to show yet."""
        first = update.choice.index not in self._begun
        asked_for = update.token_ids and self._with_empty
        parts = self._parts(update)
        if not (any(parts) or update.finish_reason or asked_for or (first and self._begins_alone(update.choice))):
            return None
        self._begun.add(update.choice.index)
        return event(_encoder.encode(self._chunk(update, parts, first)))

    def usage_chunk(self) -> bytes:
        """The event with the totals, after the last chunk."""
        return event(_encoder.encode(self._answer((), self._usage(), chunk=True)))

    def whole(self, answers: Sequence[Collected]) -> bytes:
        """The body of an answer that is not streamed."""
        return _encoder.encode(self._whole(answers))

    @abstractmethod
    def _parts(self, update: Update) -> Parts:
        """What there is to show of an update's text."""

    @abstractmethod
    def _chunk(self, update: Update, parts: Parts, first: bool) -> Answer: ...

    @abstractmethod
    def _whole(self, answers: Sequence[Collected]) -> Answer: ...

    def _usage(self) -> Usage:
        return usage_of(self._job)

    @abstractmethod
    def _begins_alone(self, choice: Choice) -> bool:
        """Whether an answer starts with a chunk of its own, before it has text."""

    def _answer(
        self,
        choices: tuple[AnyChoice, ...],
        usage: Usage | UnsetType | None,
        *,
        chunk: bool,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> Answer:
        return Answer(
            id=self._job.id,
            object=self._chunk_object if chunk else self._object,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )

    @property
    def _no_usage(self) -> UnsetType | None:
        return None if self.with_usage else UNSET

    def _ids(self, ids: list[int]) -> list[int] | UnsetType:
        return ids if self._with_ids else UNSET

    def _depths(self, depths: list[int]) -> list[int] | UnsetType:
        return depths if self._with_depths else UNSET

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        return list(self._job.choices[index].prompt) if self._with_ids else UNSET


class CompletionShape(Shape):
    _object = _chunk_object = "text_completion"

    def __init__(
        self, request: GenerationRequest, job: Job, model: str, echoes: list[str], *, has_text: bool = True
    ) -> None:
        super().__init__(request, job, model, echoes, has_text=has_text)
        self._offsets = [TextOffsets() for _ in job.choices]

    def _logprobs(self, index: int, logprobs: Sequence[SpelledLogprob]) -> CompletionLogprobs | None:
        return completion_logprobs(logprobs, self._offsets[index]) if self._with_logprobs else None

    def _parts(self, update: Update) -> Parts:
        return Parts(content=update.text)

    def _chunk(self, update: Update, parts: Parts, first: bool) -> Answer:
        index = update.choice.index
        choice = CompletionChoice(
            index=index,
            text=self._echoes[index] + parts.content if first else parts.content,
            logprobs=self._logprobs(index, update.logprobs),
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            token_ids=self._ids(update.token_ids),
            depths=self._depths(update.depths),
            prompt_token_ids=self._prompt_ids(index) if first else UNSET,
        )
        return self._answer((choice,), self._no_usage, chunk=True)

    def _whole(self, answers: Sequence[Collected]) -> Answer:
        choices = tuple(
            CompletionChoice(
                index=index,
                text=self._echoes[index] + "".join(answer.texts),
                logprobs=self._logprobs(index, answer.logprobs),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                token_ids=self._ids(answer.token_ids),
                depths=self._depths(answer.depths),
                prompt_token_ids=self._prompt_ids(index),
            )
            for index, answer in enumerate(answers)
        )
        return self._answer(choices, self._usage(), chunk=False)

    def _begins_alone(self, choice: Choice) -> bool:
        return bool(self._echoes[choice.index])


class ChatShape(Shape):
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        request: GenerationRequest,
        job: Job,
        model: str,
        echoes: list[str],
        *,
        has_text: bool = True,
        form: AnswerForm,
    ) -> None:
        super().__init__(request, job, model, echoes, has_text=has_text)
        self._dividers = [AnswerParts(form) for _ in job.choices]
        #: calls told so far, by answer
        self._calls = [0] * len(job.choices)

    def _parts(self, update: Update) -> Parts:
        divider = self._dividers[update.choice.index]
        return divider.feed(update.text, update.token_ids, final=update.finish_reason is not None)

    def _chunk(self, update: Update, parts: Parts, first: bool) -> Answer:
        index = update.choice.index
        calls = [
            ToolCallDelta(index=number, id=_call_id(), function=_function(call))
            for number, call in enumerate(parts.calls, self._calls[index])
        ]
        self._calls[index] += len(calls)
        alone = first and not (parts.reasoning or calls)
        delta = Delta(
            role="assistant" if first else UNSET,
            reasoning_content=parts.reasoning or UNSET,
            content=parts.content if parts.content or alone else UNSET,
            tool_calls=calls or UNSET,
        )
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=self._logprobs(update.logprobs),
            finish_reason=self._finish_reason(index, update.finish_reason),
            stop_reason=update.stop_reason,
            token_ids=self._ids(update.token_ids),
            depths=self._depths(update.depths),
        )
        prompt_ids = self._prompt_ids(0) if len(self._begun) == 1 and first else UNSET
        return self._answer((choice,), self._no_usage, chunk=True, prompt_token_ids=prompt_ids)

    def _whole(self, answers: Sequence[Collected]) -> Answer:
        choices = tuple(self._whole_choice(index, answer) for index, answer in enumerate(answers))
        return self._answer(choices, self._usage(), chunk=False, prompt_token_ids=self._prompt_ids(0))

    def _whole_choice(self, index: int, answer: Collected) -> ChatChoice:
        parts = self._dividers[index].feed("".join(answer.texts), answer.token_ids, final=True)
        return ChatChoice(
            index=index,
            message=_message(parts),
            logprobs=self._logprobs(answer.logprobs),
            finish_reason=self._finish_reason(index, answer.finish_reason),
            stop_reason=answer.stop_reason,
            token_ids=self._ids(answer.token_ids),
            depths=self._depths(answer.depths),
        )

    def _logprobs(self, logprobs: Sequence[SpelledLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(logprobs) if self._with_logprobs else None

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._dividers[index].called else reason

    def _usage(self) -> Usage:
        usage = super()._usage()
        counts = [divider.reasoning_tokens for divider in self._dividers]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return usage
        return msgspec.structs.replace(usage, completion_tokens_details=CompletionTokensDetails(sum(known)))

    def _begins_alone(self, choice: Choice) -> bool:
        return True


def _message(parts: Parts) -> ChatMessage:
    calls = [ToolCall(id=_call_id(), function=_function(call)) for call in parts.calls]
    return ChatMessage(
        reasoning_content=parts.reasoning or UNSET,
        content=None if not parts.content and (parts.reasoning or calls) else parts.content,
        tool_calls=calls or UNSET,
    )


def _function(call: FoundCall) -> FunctionCall:
    return FunctionCall(call.name, call.arguments)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def usage_of(job: Job) -> Usage:
    """The totals of a job; a prompt counts once however many answers it gets."""
    tokens = sum(choice.completion_tokens for choice in job.choices)
    loops = sum(choice.loops for choice in job.choices)
    cached = {id(choice.prompt): choice.cached_tokens for choice in job.choices}
    return Usage(
        prompt_tokens=job.prompt_tokens,
        completion_tokens=tokens,
        total_tokens=job.prompt_tokens + tokens,
        prompt_tokens_details=PromptTokensDetails(sum(cached.values())),
        loops=LoopUsage(loops / tokens if tokens else 0.0, loops),
    )
