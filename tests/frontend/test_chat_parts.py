"""Reasoning and tool calls in chat answers, whole and in chunks."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from frontend import harness
from frontend.harness import Served, answered, error_of, events, on_socket, served
from rlt.text.chat import ChatTemplate
from rlt.text.tokenizer import Tokenizer
from text import small_tokenizers

OURO = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}A:{% if enable_thinking %}<think>\n{% endif %}")
TOOLS_TEMPLATE = ChatTemplate(
    "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}{% endfor %}A:"
)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ASKED = {"role": "user", "content": "x"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "r"}


@pytest.fixture(autouse=True)
def longer_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "INFO", msgspec.structs.replace(harness.INFO, max_model_len=1000))


def deltas(text: str, index: int = 0) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in events(text) if chunk["choices"][0]["index"] == index]


def joined(found: Sequence[dict[str, Any]], name: str) -> str:
    return "".join(delta.get(name) or "" for delta in found)


async def test_reasoning_is_told_apart() -> None:
    async with served(template=OURO, pieces=("why", "\n</thi", "nk>\n\n", "be", "cause")) as server:
        (choice,) = (await server.chat()).json()["choices"]
    assert choice["message"] == {"role": "assistant", "reasoning_content": "why", "content": "because"}
    assert choice["finish_reason"] == "stop"


async def test_streamed_reasoning() -> None:
    pieces = ("wh", "y\n</thi", "nk>\n\n", "be", "cause")
    async with served(template=OURO, hold=True, pieces=pieces) as server:
        response = await answered(server, server.chat(stream=True, n=2))
    for index in range(2):
        assert deltas(response.text, index) == [
            {"role": "assistant", "reasoning_content": "wh"},
            {"reasoning_content": "y"},
            {"content": "be"},
            {"content": "cause"},
        ]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1000])
async def test_whole_and_streamed_answers_have_the_same_parts(size: int) -> None:
    text = f"<think>\nwhy\n</think>\n\nSo:\n{CALL}\n<tool_call>broken</tool_call> end"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    async with served(template=TOOLS_TEMPLATE, reasoning="tagged", hold=True, pieces=pieces) as server:
        found = deltas((await answered(server, server.chat(stream=True, tools=[TOOL]))).text)
        server.backend.hold = False
        (choice,) = (await server.chat(tools=[TOOL])).json()["choices"]
    message = choice["message"]
    assert joined(found, "reasoning_content") == message["reasoning_content"] == "why"
    assert joined(found, "content") == message["content"] == "So:\n<tool_call>broken</tool_call> end"
    (streamed,) = [call for delta in found for call in delta.get("tool_calls", ())]
    (whole,) = message["tool_calls"]
    assert streamed["function"] == whole["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("options", "reasoning", "content"),
    [
        ({}, "a", "b"),
        ({"reasoning": "tagged"}, None, "a</think>b"),
        ({"reasoning": "tagged", "enable_thinking": True}, "a", "b"),
        ({"reasoning": "off", "enable_thinking": True}, None, "a</think>b"),
        ({"template": ChatTemplate("A:"), "reasoning": "always"}, "a", "b"),
        ({"template": ChatTemplate("A:")}, None, "a</think>b"),
    ],
)
async def test_settings_of_the_server(options: dict[str, Any], reasoning: str | None, content: str) -> None:
    async with served(**{"template": OURO, "pieces": ("a</think>b",)} | options) as server:
        message = (await server.chat()).json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
        prompt = harness.TOKENIZER.decode(server.backend.added[0].prompt)
        assert prompt.endswith("A:<think>\n" if options.get("enable_thinking") else "A:")


@pytest.mark.parametrize("off", [{"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}])
async def test_a_request_wins_over_the_servers_thinking(off: dict[str, Any]) -> None:
    async with served(template=OURO, enable_thinking=True) as server:
        await server.chat(**off)
        assert harness.TOKENIZER.decode(server.backend.added[0].prompt).endswith("A:")


async def test_reasoning_that_is_cut_by_the_length() -> None:
    async with served(template=OURO, pieces=("why ", "and how\n</th"), finish_reason="length") as server:
        (choice,) = (await server.chat()).json()["choices"]
        response = await server.chat(stream=True)
    assert choice["message"] == {"role": "assistant", "reasoning_content": "why and how\n</th", "content": None}
    assert choice["finish_reason"] == "length"
    assert joined(deltas(response.text), "reasoning_content") == "why and how\n</th"


async def test_an_error_in_the_middle_of_reasoning() -> None:
    async with served(template=OURO, hold=True) as server:
        task = asyncio.create_task(server.chat(stream=True))
        (added,) = await server.backend.wait_added()
        server.backend.deliver(added, text="why <", token_ids=(1,), depths=(1,))
        await asyncio.sleep(0.01)
        server.backend.deliver(added, finish_reason="error", error="broken")
        first, last = events((await task).text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "reasoning_content": "why "}
    assert last["error"]["message"] == "broken"


async def test_reasoning_tokens() -> None:
    inner = small_tokenizers.byte_level()
    inner.add_special_tokens(["<think>", "</think>"])
    end = inner.token_to_id("</think>")
    async with served(template=OURO, tokenizer=Tokenizer(inner), hold=True) as server:
        for fields in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            server.backend.added.clear()
            task = asyncio.create_task(server.chat(n=2, **fields))
            first, second = await server.backend.wait_added(2)
            server.backend.deliver(first, text="why</think>so", token_ids=(1, 2, end, 3), depths=(1,) * 4)
            server.backend.deliver(first, token_ids=(0,), depths=(1,), finish_reason="stop")
            server.backend.deliver(second, text="why", token_ids=(1, 2), depths=(1, 1), finish_reason="length")
            text = (await task).text
            usage = (events(text)[-1] if fields else json.loads(text))["usage"]
            assert usage["completion_tokens"] == 7
            assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}
    async with served(template=OURO, pieces=("a</think>b",)) as server:
        assert "completion_tokens_details" not in (await server.chat()).json()["usage"]


async def test_a_whole_tool_call() -> None:
    async with served(template=TOOLS_TEMPLATE, pieces=(CALL, CALL, ""), stop_reason=None) as server:
        (choice,) = (await server.chat(tools=[TOOL])).json()["choices"]
    calls = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None}
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": '{"a": 1}'}] * 2
    assert all(call["type"] == "function" and re.fullmatch(r"call_[0-9a-f]{24}", call["id"]) for call in calls)
    assert calls[0]["id"] != calls[1]["id"]


async def test_streamed_tool_calls() -> None:
    async with served(template=TOOLS_TEMPLATE, hold=True, pieces=("Well", CALL, f"{CALL}\n", "")) as server:
        response = await answered(server, server.chat(stream=True, tools=[TOOL]))
    chunks = [chunk["choices"][0] for chunk in events(response.text)]
    ids = [call.pop("id") for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert [chunk["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "Well"},
        {"tool_calls": [{"index": 0, "type": "function", "function": function}]},
        {"tool_calls": [{"index": 1, "type": "function", "function": function}]},
        {},
    ]
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, None, "tool_calls"]
    assert len(set(ids)) == 2


async def test_a_call_that_is_cut_by_the_length_is_text() -> None:
    async with served(template=TOOLS_TEMPLATE, pieces=(CALL, CALL[:-3]), finish_reason="length") as server:
        (choice,) = (await server.chat(tools=[TOOL])).json()["choices"]
    assert choice["message"]["content"] == CALL[:-3]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{"tool_choice": "none", "tools": [TOOL]}, {"tools": []}, {"tool_choice": "auto"}])
async def test_without_tools_nothing_is_shown_and_nothing_parsed(fields: dict[str, Any]) -> None:
    async with served(template=TOOLS_TEMPLATE, pieces=(CALL,)) as server:
        (choice,) = (await server.chat(**fields)).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": CALL}
        assert choice["finish_reason"] == "stop"
        assert harness.TOKENIZER.decode(server.backend.added[0].prompt) == "u:helloA:"


async def test_one_call_at_most() -> None:
    async with served(template=TOOLS_TEMPLATE, pieces=(CALL, CALL)) as server:
        (choice,) = (await server.chat(tools=[TOOL], parallel_tool_calls=False)).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_own_messages_can_be_sent_back(stream: bool) -> None:
    """The official client leaves fields of its own in them, more of them when it joins a stream."""
    tools: Any = [TOOL]
    async with (
        served(template=TOOLS_TEMPLATE, pieces=(CALL, CALL)) as server,
        on_socket(server.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        chat: Any = client.chat.completions
        asked = [ASKED]
        for _ in range(2):
            if stream:
                async with chat.stream(model="tiny", messages=asked, tools=tools) as events:
                    answer = await events.get_final_completion()
            else:
                answer = await chat.create(model="tiny", messages=asked, tools=tools)
            message = answer.choices[0].message
            assert len(message.tool_calls) == 2
            asked = [ASKED, message, RESULT, message.to_dict()]
        prompt = harness.TOKENIZER.decode(server.backend.added[1].prompt)
    assert prompt == "<tool_call>fu:xa:f1f1t:ra:f1f1A:"


async def test_earlier_calls_and_their_results_reach_the_template() -> None:
    async with served(template=TOOLS_TEMPLATE) as server:
        messages = [ASKED, CALLED | {"reasoning_content": "why"}, RESULT]
        assert (await server.chat(messages=messages, tools=[TOOL])).status_code == 200
        assert harness.TOKENIZER.decode(server.backend.added[0].prompt) == "<tool_call>fu:xa:f7t:rA:"


def _tool(**function: Any) -> list[dict[str, Any]]:
    return [TOOL, {"type": "function", "function": {"name": "g"} | function}]


def _called(**function: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"} | function}
    return [ASKED, CALLED | {"tool_calls": [call]}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": {}}, "tools", "array"),
        ({"tools": [5]}, "tools[0]", "object"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]", "retrieval"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "function"),
        ({"tools": _tool(name=5)}, "tools[1]", "$.function.name"),
        ({"tools": _tool(parameters=[])}, "tools[1]", "$.function.parameters"),
        ({"tools": _tool(extra=1)}, "tools[1]", "extra"),
        ({"tools": _tool(name="a b")}, "tools[1].function.name", "letters, digits"),
        ({"tools": _tool(name="")}, "tools[1].function.name", "1 to 128"),
        ({"tools": _tool(name="f")}, "tools[1].function.name", "another tool"),
        ({"tools": _tool(strict=True)}, "tools[1].function.strict", "not supported yet"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "cannot be forced"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "cannot be forced",
        ),
        ({"tool_choice": "any"}, "tool_choice", "any"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "function"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "bool"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is required"),
        ({"messages": [RESULT | {"content": None}]}, "messages[0].content", "is required"),
        ({"messages": [ASKED | {"tool_call_id": "1"}]}, "messages[0].tool_call_id", 'role "tool"'),
        ({"messages": [CALLED | {"role": "user"}]}, "messages[0].tool_calls", 'role "assistant"'),
        ({"messages": [ASKED | {"reasoning_content": "x"}]}, "messages[0].reasoning_content", 'role "assistant"'),
        ({"messages": [CALLED | {"tool_calls": [{}]}]}, "messages[0]", "tool_calls[0]"),
        ({"messages": [CALLED | {"tool_calls": [5]}]}, "messages[0].tool_calls[0]", "must be an object"),
        ({"messages": _called(extra=1)}, "messages[1].tool_calls[0].function.extra", "unknown field"),
        ({"messages": _called(parsed_arguments={})}, "messages[1].tool_calls[0].function.parsed_arguments", "not supp"),
        ({"messages": [CALLED | {"tool_calls": [{"index": 1}]}]}, "messages[0].tool_calls[0].index", "not supported"),
        ({"messages": [CALLED | {"tool_calls": [{"function": 5}]}]}, "messages[0]", "function"),
        ({"messages": _called(arguments={})}, "messages[1]", "$.tool_calls[0].function.arguments"),
        ({"messages": _called(arguments="{")}, "messages[1].tool_calls[0].function.arguments", "JSON object"),
        ({"messages": _called(arguments="[1]")}, "messages[1].tool_calls[0].function.arguments", "JSON object"),
        ({"messages": _called(arguments="[" * 9999)}, "messages[1].tool_calls[0].function.arguments", "JSON object"),
    ],
)
async def test_a_bad_field_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    async with served(template=TOOLS_TEMPLATE) as server:
        response = await server.chat(**fields)
        assert response.status_code == 400
        assert error_of(response)["param"] == param
        assert words in error_of(response)["message"]
        assert len(error_of(response)["message"]) < 500
        assert server.backend.added == []


async def test_a_template_without_tools_refuses_them() -> None:
    async with served() as server:
        for fields, param in (({"tools": [TOOL]}, "tools"), ({"messages": [ASKED, CALLED]}, "messages[1].tool_calls")):
            for path in ("/v1/chat/completions", "/tokenize"):
                response = await server.http.post(path, json={"messages": [ASKED]} | fields)
                assert response.status_code == 400
                assert error_of(response)["param"] == param
                assert error_of(response)["code"] == "unsupported_parameter"
        assert (await server.chat(tools=[TOOL], tool_choice="none")).status_code == 200
        for path in ("/v1/completions", "/tokenize"):
            response = await server.http.post(path, json={"prompt": "x", "tools": [TOOL]})
            assert response.status_code == 400
            assert error_of(response)["param"] == "tools"


async def test_the_official_client_reads_reasoning_and_calls() -> None:
    text = f"<think>\nwhy\n</think>\n\nWell\n{CALL}"
    pieces = [text[start : start + 7] for start in range(0, len(text), 7)]
    async with (
        served(template=TOOLS_TEMPLATE, reasoning="tagged", pieces=pieces, hold=True) as server,
        on_socket(server.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        asking: Any = {"model": "tiny", "messages": [ASKED], "tools": [TOOL]}
        feeding = asyncio.create_task(_feed(server))
        async with client.chat.completions.stream(**asking) as stream:
            reasoning = [
                event.chunk.choices[0].delta.model_extra.get("reasoning_content")
                async for event in stream
                if event.type == "chunk" and event.chunk.choices[0].delta.model_extra
            ]
            streamed = (await stream.get_final_completion()).choices[0]
        await feeding
        server.backend.hold = False
        whole = (await client.chat.completions.create(**asking)).choices[0]
        assert "".join(part or "" for part in reasoning) == "why"
        assert whole.message.model_extra == {"reasoning_content": "why"}
        for choice in (streamed, whole):
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Well"
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            assert isinstance(call, ChatCompletionMessageFunctionToolCall)
            assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": 1})
        # The client sends the message back as it got it.
        turns: Any = [ASKED, whole.message.model_dump(), RESULT | {"tool_call_id": call.id}]
        await client.chat.completions.create(model="tiny", messages=turns, tools=asking["tools"])


async def _feed(server: Served) -> None:
    (added,) = await server.backend.wait_added()
    for number, piece in enumerate(server.backend.pieces):
        last = number == len(server.backend.pieces) - 1
        server.backend.deliver(added, text=piece, token_ids=(1,), depths=(1,), finish_reason="stop" if last else None)
        await asyncio.sleep(0.002)
