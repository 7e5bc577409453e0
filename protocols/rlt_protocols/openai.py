"""The HTTP requests: the OpenAI shapes, vLLM's extensions of them and the fields about loops.

Requests refuse what they do not know. A field that other servers have and this one has not yet is accepted only with
a value that means "off", listed here, so that no option is ever ignored silently.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_CHOICES = 128
MAX_STOP_CHARS = 1024


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common; null always means "the default"."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    #: by token id, which JSON can only write as a string
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    min_loops: int | None = None
    max_loops: int | None = None
    exit_threshold: float | None = None
    return_depths: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: a text, texts, token ids, or lists of token ids; which of them is found out by `rltd.frontend.parse`
    prompt: str | list[Any]
    echo: bool | None = None
    #: how many of the likeliest tokens to tell beside each; false is what chat clients send for "none"
    logprobs: int | bool | None = None


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call as it stands in answers and in the messages that clients send back; `arguments` is a JSON object."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    #: a JSON schema
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionTool


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


#: Fields of other servers that are not served yet, each with the values that switch it off. Those about tools are for
#: completions; chat has them.
OFF: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "add_special_tokens": (None,),
    "allowed_token_ids": (None, []),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_reasoning": (None, True),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "prompt_cache_key": (None,),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None, False),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "safety_identifier": (None,),
    "service_tier": (None, "auto", "default"),
    "spaces_between_special_tokens": (None, True),
    "store": (None, False),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
}

#: The same for the fields of a message, most of which clients send back as they got them.
MESSAGE_OFF: dict[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "parsed": (None,),
    "reasoning": (None,),
    "refusal": (None,),
}

#: The same for the function of a message's tool call.
FUNCTION_OFF: dict[str, tuple[Any, ...]] = {"parsed_arguments": (None,)}
