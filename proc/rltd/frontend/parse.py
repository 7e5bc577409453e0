"""JSON bytes to request Structs, with an error that names the field whatever is wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from rlt_protocols.openai import (
    FUNCTION_OFF,
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MESSAGE_OFF,
    OFF,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FunctionCall,
    GenerationRequest,
    Message,
    TokenizeRequest,
    Tool,
    ToolCall,
)
from rlt_protocols.params import MAX_LOGPROBS, SamplingParams
from rltd.frontend.errors import MAX_SHOWN_CHARS, ApiError, invalid, shorten, unsupported

R = TypeVar("R", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
E = TypeVar("E", Message, Tool)
Prompt = str | list[int]

#: Most characters of the decoder's own words, in which values of the client can be.
MAX_REASON_CHARS = 300
#: Of a cache salt, which the engine keeps as long as the request runs.
MAX_SALT_CHARS = 1024
#: Taken over into `SamplingParams` as they are.
_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "include_stop_str_in_output", "skip_special_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "ignore_eos", "min_loops", "max_loops", "exit_threshold", "priority", "cache_salt"),
)


def parse(kind: type[R], body: bytes) -> R:
    """Decode and check a body of `kind`. Raises `ApiError` 400."""
    try:
        tree = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise invalid(None, "the body is nested too deep") from error
    if not isinstance(tree, dict):
        raise invalid(None, "the body must be a JSON object")
    off = OFF if issubclass(kind, GenerationRequest) else {}
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    tree = _known_fields(tree, fields, off, "")
    messages = tree.get("messages")
    if "messages" in fields and isinstance(messages, list):
        tree["messages"] = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    tools = tree.get("tools")
    if "tools" in fields and isinstance(tools, list):
        tree["tools"] = [_converted(tool, Tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        failure = error
    # The fast way has no field name to offer: convert field by field to find it.
    for name, field in fields.items():
        if tree.get(name) is None:
            if field.required:
                raise invalid(name, f"{name}: is required")
            continue
        try:
            msgspec.convert(tree[name], field.type)
        except msgspec.ValidationError as error:
            raise invalid(name, f"{name}: {shorten(str(error), MAX_REASON_CHARS)}") from error
    raise invalid(None, shorten(str(failure), MAX_REASON_CHARS))


def _known_fields(
    tree: Mapping[str, Any], fields: Collection[str], off: Mapping[str, tuple[Any, ...]], where: str
) -> dict[str, Any]:
    """Return `tree` without the fields that are switched off; refuse unknown ones and those that are not served."""
    known: dict[str, Any] = {}
    for name, value in tree.items():
        if name in fields:
            known[name] = value
        elif name not in off:
            # A long name is near to none of ours, and finding that out would take long.
            near = difflib.get_close_matches(name, fields, n=1, cutoff=0.8) if len(name) <= MAX_SHOWN_CHARS else []
            hint = f"; did you mean {near[0]}?" if near else ""
            path = f"{where}{shorten(name)}"
            raise ApiError(400, f"unknown field {path}{hint}", param=path, code="unknown_field")
        elif not any(_same(value, allowed) for allowed in off[name]):
            raise unsupported(f"{where}{name}", f"{where}{name} is not supported yet")
    return known


def _same(value: Any, other: Any) -> bool:
    """Equality that keeps true apart from 1 and false from 0."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _message(value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise invalid(where, f"{where} must be an object")
    message = _known_fields(value, _names(Message), MESSAGE_OFF, f"{where}.")
    content = message.get("content")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise invalid(
                f"{where}.content", f"{where}.content[{index}] has the type {shorten(kind)!r}; only text is supported"
            )
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call(call, index, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return _converted(message, Message, where)


def _call(value: Any, index: int, where: str) -> Any:
    """A message's tool call without what clients that join a stream leave in it: its place among the calls."""
    if not isinstance(value, dict):
        raise invalid(where, f"{where} must be an object")
    call = _known_fields(value, _names(ToolCall), {"index": (None, index)}, f"{where}.")
    if isinstance(function := call.get("function"), dict):
        call["function"] = _known_fields(function, _names(FunctionCall), FUNCTION_OFF, f"{where}.function.")
    return call


def _names(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


def _converted(value: Any, kind: type[E], where: str) -> E:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise invalid(where, f"{where}: {shorten(str(error), MAX_REASON_CHARS)}") from error


def count_prompts(value: str | list[Any]) -> int:
    """The number of prompts of a completion, found before they are looked at."""
    return len(value) if isinstance(value, list) and value and isinstance(value[0], str | list) else 1


def prompts_of(value: str | list[Any]) -> list[Prompt]:
    """The prompts of a completion: one per text or list of ids. Raises `ApiError` 400."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise invalid("prompt", "prompt: is empty; at least one token is needed")
    if all(type(item) is int for item in value):
        return [cast(list[int], value)]
    if all(isinstance(item, str) for item in value):
        return cast(list[Prompt], value)
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
        return cast(list[Prompt], value)
    raise invalid("prompt", "prompt: must be a text, a list of texts, a list of token ids or a list of such lists")


def choices_of(request: GenerationRequest) -> int:
    """The number of answers per prompt."""
    count = 1 if request.n is None else request.n
    if not 1 <= count <= MAX_CHOICES:
        raise invalid("n", f"n: must be between 1 and {MAX_CHOICES}, got {count}")
    return count


def sampling_of(request: GenerationRequest) -> SamplingParams:
    """The request's sampling parameters, still unchecked against the model."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options: is only allowed with stream true")
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is not None and older is not None and newer != older:
        raise invalid("max_completion_tokens", "max_completion_tokens: differs from max_tokens; send one of them")
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    for text in stop:
        if len(text) > MAX_STOP_CHARS:
            raise invalid("stop", f"stop: a string has {len(text)} characters; at most {MAX_STOP_CHARS} are allowed")
    if len(salt := request.cache_salt or "") > MAX_SALT_CHARS:
        raise invalid("cache_salt", f"cache_salt: has {len(salt)} characters; at most {MAX_SALT_CHARS} are allowed")
    values = _given((name, getattr(request, name)) for name in _SAMPLING_FIELDS)
    return SamplingParams(
        max_tokens=older if newer is None else newer,
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=_bias(request.logit_bias or {}),
        logprobs=_logprobs(request),
        **values,
    )


def _logprobs(request: GenerationRequest) -> int | None:
    """How many alternatives' log-probabilities to tell; None: no log-probabilities."""
    if isinstance(request, ChatRequest):
        top = request.top_logprobs
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise invalid("top_logprobs", f"top_logprobs: must be between 0 and {MAX_LOGPROBS}, got {top}")
        if request.logprobs:
            return top or 0
        if top:
            raise invalid("top_logprobs", "top_logprobs: goes with logprobs true")
        return None
    assert isinstance(request, CompletionRequest)
    if request.logprobs is True:
        raise invalid("logprobs", "logprobs: must be a number of tokens here; true is for chat")
    if request.logprobs is None or request.logprobs is False:
        return None
    if request.echo:
        raise unsupported("logprobs", "logprobs: those of the prompt are not supported yet, so not with echo")
    return int(request.logprobs)


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    """`logit_bias` by number."""
    for key in bias:
        # Only as numbers are written: int() would take "1_0", spaces and other scripts' digits as well.
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
            raise invalid("logit_bias", f"logit_bias: {shorten(key)!r} is not a token id")
    return {int(key): value for key, value in bias.items()}


def _given(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if value is not None}
