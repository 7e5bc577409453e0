"""The HTTP answers: the OpenAI shapes, vLLM's extensions of them and the fields about loops."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from rlt_protocols.openai import FunctionCall, ToolCall


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class LoopUsage(msgspec.Struct, frozen=True):
    """Loops run for the completion's tokens."""

    mean: float
    total: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    loops: LoopUsage
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry per token; a `top_logprobs` entry maps texts, and `text_offset` counts characters of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AlternativeLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[AlternativeLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What the choices of all four kinds of answers have; a chunk's `finish_reason` is null until its last."""

    index: int
    logprobs: CompletionLogprobs | ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    depths: list[int] | UnsetType = UNSET


class CompletionChoice(Choice, frozen=True, kw_only=True):
    text: str
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`content` is null when there is nothing but reasoning or calls."""

    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET
    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Choice, frozen=True, kw_only=True):
    message: ChatMessage


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Choice, frozen=True, kw_only=True):
    delta: Delta


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer or a chunk of one. `usage` is absent in chunks unless asked for, and then null before the last."""

    id: str
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: tuple[CompletionChoice | ChatChoice | ChatChunkChoice, ...]
    usage: Usage | UnsetType | None = UNSET
    #: chat only; completions have it in each choice
    prompt_token_ids: list[int] | UnsetType = UNSET


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rlt"
    max_model_len: int
    #: loops at full depth
    loops: int


class ModelList(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct, frozen=True):
    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


class VersionBody(msgspec.Struct, frozen=True):
    version: str
