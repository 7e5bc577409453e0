"""Messages and tools: checked, and in the form that chat templates take."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from rlt_protocols.openai import ChatRequest, Message, TokenizeRequest, Tool, ToolCall
from rltd.frontend.errors import invalid, shorten, unsupported

Conversation = ChatRequest | TokenizeRequest

#: Also what the forms of calls can hold: no white space, no angle brackets.
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates take them: plain objects whose content is one text, the arguments of calls as objects.

    Raises `ApiError` 400 for what does not belong to the role.
    """
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _check_role(message, where)
        content = message.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        entry = msgspec.to_builtins(message) | {"content": content or ""}
        if message.tool_calls:
            calls = enumerate(message.tool_calls)
            entry["tool_calls"] = [_template_call(call, f"{where}.tool_calls[{number}]") for number, call in calls]
        else:
            entry.pop("tool_calls", None)
        plain.append(entry)
    return plain


def _check_role(message: Message, where: str) -> None:
    if message.role == "tool":
        if message.tool_call_id is None:
            raise invalid(f"{where}.tool_call_id", f"{where}.tool_call_id: is required in a message of a tool")
        if message.content is None:
            raise invalid(f"{where}.content", f"{where}.content: is required in a message of a tool")
    elif message.tool_call_id is not None:
        raise invalid(f"{where}.tool_call_id", f'{where}.tool_call_id: is for the role "tool" only')
    if message.role != "assistant":
        for name, value in (("tool_calls", message.tool_calls), ("reasoning_content", message.reasoning_content)):
            if value:
                raise invalid(f"{where}.{name}", f'{where}.{name}: is for the role "assistant" only')


def _template_call(call: ToolCall, where: str) -> dict[str, Any]:
    field = f"{where}.function.arguments"
    try:
        # Some clients send nothing for a call without arguments.
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(field, f"{field}: must be the text of a JSON object: {error}") from error
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def template_options(request: Conversation, enable_thinking: bool | None) -> dict[str, Any]:
    """The options that go to the template; `enable_thinking` is the server's, for requests that do not set it."""
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    options |= request.chat_template_kwargs or {}
    if request.enable_thinking is not None:
        options["enable_thinking"] = request.enable_thinking
    return options


def check_options(request: Conversation, known: Collection[str]) -> None:
    """Raise `ApiError` 400 for an option that the template, whose options are `known`, would ignore.

    An option that is switched off may be unknown: it says what is so anyway.
    """
    for name, value in (request.chat_template_kwargs or {}).items():
        if name not in known and value not in (None, False):
            field = "chat_template_kwargs"
            raise invalid(field, f"{field}: the model's chat template has no option {shorten(name)!r}")
    if request.enable_thinking and "enable_thinking" not in known:
        raise invalid("enable_thinking", "enable_thinking: the model's chat template has no such option")


def tools_of(request: Conversation) -> list[Tool]:
    """The tools that the model is to be shown. Raises `ApiError` 400."""
    tools = request.tools or []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function"
        name = tool.function.name
        if not _TOOL_NAME.fullmatch(name):
            raise invalid(
                f"{where}.name",
                f"{where}.name: must have 1 to 128 letters, digits, '_', '-' or '.', got {shorten(name)!r}",
            )
        if name in names:
            raise invalid(f"{where}.name", f"{where}.name: {shorten(name)!r} is the name of another tool too")
        names.add(name)
        if tool.function.strict:
            raise unsupported(
                f"{where}.strict", f"{where}.strict is not supported yet: arguments are not forced into the schema"
            )
    if isinstance(request, ChatRequest):
        choice = request.tool_choice
        if choice == "none":
            # The model cannot call what it is not shown.
            return []
        if choice not in (None, "auto"):
            raise unsupported(
                "tool_choice", 'tool_choice is not supported yet: a call cannot be forced; use "auto" or "none"'
            )
    return tools


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools as templates take them; None when there are none."""
    return [msgspec.to_builtins(tool) for tool in tools] or None
