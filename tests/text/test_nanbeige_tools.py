"""Tools in the manner of Nanbeige4.2: two forms of calls, results of tools in the user's turn.

The template is our own, of the published one's behaviour: `tool_call_format` is "xml" unless it says "json", values
that are no strings are written as JSON, and results that follow each other share a turn.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rlt.text.chat import ChatTemplate
from rlt.text.parts import AnswerParts
from rlt.text.tokenizer import Tokenizer
from rlt.text.toolcalls import ToolCall
from rlt_protocols.openai import ChatRequest
from rltd.frontend.conversation import template_messages
from rltd.frontend.parse import parse
from rltd.frontend.prepare import Preparer
from text import small_tokenizers
from text.test_nanbeige_chat import INFO

TEMPLATE = """\
{%- set form = tool_call_format if tool_call_format is defined else 'xml' %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {%- if form == 'xml' %}
        {{- '<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}
    {%- else %}
        {{- '<tool_call>\\n{"name": name, "arguments": object}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.role == 'assistant' %}
            {{- '<think>\\n' + message.reasoning_content | default('') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if form == 'xml' %}
                {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
                {%- for key, value in call.function.arguments | items %}
                    {{- '<parameter=' + key + '>\\n' }}
                    {{- value if value is string else value | tojson }}
                    {{- '\\n</parameter>\\n' }}
                {%- endfor %}
                {{- '</function>\\n</tool_call>' }}
            {%- else %}
                {{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
            {%- endif %}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
SYSTEM = (
    '<|im_start|>system\n# Tools\n{"type": "function", "function": {"name": "weather", "description": "The weather.", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}\n'
)
ARGUMENTS = '{"city": "Rome", "days": 2}'
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
    {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": ""}},
]
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Look:", "reasoning_content": "two calls", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rainy"}]},
    {"role": "user", "content": "Bye"},
]
XML_FORM = "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
JSON_FORM = '<tool_call>\n{"name": name, "arguments": object}\n</tool_call><|im_end|>\n'
XML_CALLS = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=weather>\n</function>\n</tool_call>"
)
JSON_CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"messages": TURNS, "tools": [TOOL]} | fields)


@pytest.mark.parametrize(
    ("options", "form", "calls"), [({}, XML_FORM, XML_CALLS), ({"tool_call_format": "json"}, JSON_FORM, JSON_CALLS)]
)
def test_a_conversation_with_tools(options: dict[str, str], form: str, calls: str) -> None:
    request = parse(ChatRequest, body())
    text = ChatTemplate(TEMPLATE).render(template_messages(request.messages), kwargs=options, tools=[TOOL])
    assert text == (
        f"{SYSTEM}{form}<|im_start|>user\nHi<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\ntwo calls\n</think>\n\nLook:\n{calls}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize(("options", "calls"), [({}, XML_CALLS), ({"tool_call_format": "json"}, JSON_CALLS)])
def test_what_the_template_writes_is_what_is_parsed(options: dict[str, str], calls: str) -> None:
    preparer = Preparer(Tokenizer(small_tokenizers.byte_level()), ChatTemplate(TEMPLATE), max_answers=1)
    info = msgspec.structs.replace(INFO, max_model_len=10_000, kv_tokens=10_000)
    form = preparer.chat(body(chat_template_kwargs=options), info).form
    found = AnswerParts(form).feed(f"two calls\n</think>\n\nLook:\n{calls}", (), final=True)
    compact = ARGUMENTS if options else '{"city":"Rome","days":2}'
    assert found == ("two calls", "Look:", (ToolCall("weather", compact), ToolCall("weather", "{}")))


def test_tokenize_counts_the_tools() -> None:
    preparer = Preparer(Tokenizer(small_tokenizers.byte_level()), ChatTemplate(TEMPLATE), max_answers=1)
    info = msgspec.structs.replace(INFO, max_model_len=10_000, kv_tokens=10_000)
    (choice,) = preparer.chat(body(), info).choices
    assert list(choice.prompt) == preparer.tokenize(body(), info).tokens
    (plain,) = preparer.chat(body(tool_choice="none"), info).choices
    assert list(plain.prompt) == preparer.tokenize(body(tools=None), info).tokens
    assert len(plain.prompt) < len(choice.prompt)
