from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt.text.chat import ChatTemplate
from rlt.text.toolcalls import CallParser, Calls, CallStyle, ToolCall, ToolsError, call_style
from text.pieces import cut, texts

TOOLS: dict[str, dict[str, Any]] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "say": {"type": "object", "properties": {"text": {"type": "string"}}},
}
ADD = ToolCall("add", '{"a": 1, "b": 2}')
ADD_JSON = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD_XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)


def parse(pieces: list[str], style: CallStyle, *, one: bool = False) -> Calls:
    parser = CallParser(style, TOOLS, one=one)
    found = [parser.feed(piece) for piece in pieces]
    found.append(parser.feed("", final=True))
    calls = [call for each in found for call in each.calls]
    assert parser.called == bool(calls)
    return Calls("".join(each.content for each in found), tuple(calls))


def check(text: str, style: CallStyle, content: str, *calls: ToolCall) -> None:
    assert parse([text], style) == (content, calls)
    assert parse(list(text), style) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (ADD_JSON, "", [ADD]),
        (f"{ADD_JSON}\n{ADD_JSON}\n", "", [ADD, ADD]),
        (f"Let me see.\n\n{ADD_JSON}", "Let me see.", [ADD]),
        (f"Before {ADD_JSON}\n\nafter ", "Before\n\nafter", [ADD]),
        (f"\n{ADD_JSON}\n\nafter", "after", [ADD]),
        (f"a{ADD_JSON} b {ADD_JSON}c", "a bc", [ADD, ADD]),
        ('<tool_call>{"arguments":{},"name":"say"}</tool_call>', "", [ToolCall("say", "{}")]),
        ('<tool_call>{"name": "say"}</tool_call>', "", [ToolCall("say", "{}")]),
        (
            '<tool_call>{"name": "say", "arguments": {"text": "a \\"</tool_call>\\" \\\\"}}</tool_call>',
            "",
            [ToolCall("say", '{"text": "a \\"</tool_call>\\" \\\\"}')],
        ),
        ('<tool_call>{"name": "say", "arguments": {"x": 1.50e3}}</tool_call>', "", [ToolCall("say", '{"x": 1.50e3}')]),
        ("no call\n\n", "no call\n\n", []),
        ("a < b <tool", "a < b <tool", []),
        ("</tool_call>", "</tool_call>", []),
    ],
)
def test_calls_as_json(text: str, content: str, calls: list[ToolCall]) -> None:
    check(text, "json", content, *calls)


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>',
        '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}, "id": 1}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}} </tool_call',
        '<tool_call>{"name": "add", "argu',
        '<tool_call>{"name": "say", "arguments": {"text": "never closed',
        "<tool_call></tool_call>",
        "<tool_call>",
        f"<tool_call>{'[' * 5000}</tool_call>",
        ADD_XML,
    ],
)
def test_what_is_no_call_as_json_stays_text(call: str) -> None:
    check(f"So:\n{call}", "json", f"So:\n{call}")


def test_a_broken_string_does_not_hide_the_calls_behind_it() -> None:
    broken = '<tool_call>\n{"name: "add", "arguments": {}}\n</tool_call>'
    check(f"{broken}\n{ADD_JSON}", "json", broken, ADD)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (ADD_XML, "", [ToolCall("add", '{"a":1,"b":2}')]),
        (f"Sum:\n{ADD_XML}\n{ADD_XML}", "Sum:", [ToolCall("add", '{"a":1,"b":2}')] * 2),
        ("<tool_call><function=add></function></tool_call>", "", [ToolCall("add", "{}")]),
        (
            "<tool_call><function=say>\n<parameter=text>\n\n a\n</tool_call>\n\n</parameter>\n</function></tool_call>",
            "",
            [ToolCall("say", '{"text":"\\n a\\n</tool_call>\\n"}')],
        ),
        (
            "<tool_call><function=say><parameter=text>5</parameter><parameter=new>{}</parameter></function></tool_call>",
            "",
            [ToolCall("say", '{"text":"5","new":"{}"}')],
        ),
    ],
)
def test_calls_as_xml(text: str, content: str, calls: list[ToolCall]) -> None:
    check(text, "xml", content, *calls)


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call><function=sub></function></tool_call>",
        "<tool_call><function=add></tool_call>",
        "<tool_call><function=add>1</function></tool_call>",
        "<tool_call><function=add><parameter=a>1</parameter>",
        "<tool_call><function=say><parameter=text>never closed</function></tool_call>",
        "<tool_call><function=add><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "<tool_call>\n</tool_call>",
        ADD_JSON,
    ],
)
def test_what_is_no_call_as_xml_stays_text(call: str) -> None:
    check(f"So:\n{call}", "xml", f"So:\n{call}")


def test_at_most_one_call() -> None:
    text = f"a {ADD_JSON}\n{ADD_JSON} b"
    assert parse([text], "json", one=True) == ("a b", (ADD,))


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", '{"name": "say", "arguments": {"text": "', '"', "}}", "\\"),
    *("<function=say>", "</function>", "<parameter=text>", "</parameter>", ADD_JSON, ADD_XML),
)


@given(cut(texts(*FRAGMENTS)), st.sampled_from(["json", "xml"]))
def test_the_cuts_do_not_matter(pieces: list[str], style: CallStyle) -> None:
    assert parse(pieces, style) == parse(["".join(pieces)], style)


@given(cut(texts(*FRAGMENTS)), st.sampled_from(["json", "xml"]))
def test_nothing_is_lost(pieces: list[str], style: CallStyle) -> None:
    """All characters but white space and the well-formed calls are in the content, in their order."""
    text = "".join(pieces)
    content, calls = parse(pieces, style)
    if not calls:
        assert content == text
    position = 0
    for char in content:
        position = text.index(char, position) + 1
    left_out = len("".join(text.split())) - len("".join(content.split()))
    assert left_out >= len(calls) * len("<tool_call></tool_call>")
    assert (left_out == 0) == (not calls)


@given(st.lists(st.text(max_size=20), max_size=3), st.sampled_from(["", "x", "x\n"]))
def test_any_text_goes_through_a_call_as_json(values: list[str], before: str) -> None:
    arguments = [json.dumps({"text": value}, ensure_ascii=False) for value in values]
    text = before + "\n".join(
        f'<tool_call>\n{{"name": "say", "arguments": {each}}}\n</tool_call>' for each in arguments
    )
    check(text, "json", before.strip() if values else before, *(ToolCall("say", each) for each in arguments))


def test_text_leaves_at_once_and_a_call_with_its_end() -> None:
    parser = CallParser("json", TOOLS)
    assert parser.feed("Well, a <") == ("Well, a", ())
    assert parser.feed(" b\n<tool") == (" < b", ())
    assert parser.feed('_call>{"name": "say"}</tool_cal') == ("", ())
    assert parser.feed("l>") == ("", (ToolCall("say", "{}"),))
    assert parser.feed("\n") == ("", ())
    assert parser.feed("so") == ("\nso", ())


HERMES = (
    '{% if tools %}Write <tool_call>{"name": …}</tool_call>. {% for t in tools %}{{ t | tojson }}{% endfor %}'
    "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
XML = HERMES.replace('{"name": …}', "<function=f><parameter=a>…</parameter></function>")
BOTH = "{% if tool_call_format | default('xml') == 'xml' %}" + XML + "{% else %}" + HERMES + "{% endif %}"
#: Shows the tools without a word about the form of calls.
BY_EXAMPLE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)


def test_the_form_of_calls_is_what_the_template_teaches() -> None:
    assert call_style(ChatTemplate(HERMES), {}) == "json"
    assert call_style(ChatTemplate(XML), {}) == "xml"
    assert call_style(ChatTemplate(BOTH), {}) == "xml"
    assert call_style(ChatTemplate(BOTH), {"tool_call_format": "json"}) == "json"
    assert call_style(ChatTemplate(BY_EXAMPLE), {}) == "json"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[0].content }}", "does not show tools"),
        ("{# tools #}{{ messages[0].content }}", "does not show tools"),
        ("{{ tools | tojson }}[TOOL_CALLS]", "in a form that is not parsed"),
        ("{{ tools | tojson }}{{ messages[1].content + 1 if messages | length > 1 }}", "in a form that is not parsed"),
        ("{% if tools %}{{ raise_exception('no tools here') }}{% endif %}", "no tools here"),
    ],
)
def test_templates_that_cannot_be_used_with_tools(source: str, words: str) -> None:
    with pytest.raises(ToolsError, match=words):
        call_style(ChatTemplate(source), {})
