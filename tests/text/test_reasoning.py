from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt.errors import ModelError
from rlt.text.chat import ChatTemplate
from rlt.text.reasoning import (
    Begin,
    ReasoningMode,
    ReasoningSetting,
    ReasoningSplitter,
    Split,
    begin_of,
    check_thinking,
    reasoning_mode,
)
from rlt.text.tags import THINK_END, held_chars
from text.pieces import cut, texts

BEGINS: list[Begin] = ["inside", "tagged"]
TEXTS = texts("<think>", "</think>", "\n\n", "<tool_call>")
#: In the manner of Ouro-Thinking, Nanbeige and Qwen3: what each writes for thinking on, off and not said.
OURO = "{{ messages[0].content }}A:{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
NANBEIGE = (
    "{{ messages[0].content }}A:<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n"
    "{% endif %}"
)
QWEN = (
    "{{ messages[0].content }}A:{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}"
)


def split(pieces: list[str], begin: Begin) -> tuple[Split, ReasoningSplitter]:
    """All pieces joined, and the splitter at the end."""
    splitter = ReasoningSplitter(begin)
    parts = [splitter.feed(piece) for piece in pieces]
    parts.append(splitter.feed("", final=True))
    return Split("".join(part.reasoning for part in parts), "".join(part.content for part in parts)), splitter


@pytest.mark.parametrize(
    ("begin", "text", "reasoning", "content"),
    [
        ("inside", "why\n</think>\n\nbecause", "why", "because"),
        ("inside", "\nwhy</think>because", "why", "because"),
        ("inside", "<think>\nwhy\n</think>\n\nbecause", "why", "because"),
        ("inside", "cut in the midd", "cut in the midd", ""),
        ("inside", "cut\n</thi", "cut\n</thi", ""),
        ("inside", "</think>\n\nHi", "", "Hi"),
        ("inside", "a\n\nb </think> c\n", "a\n\nb ", " c\n"),
        ("inside", "a</think>b</think><think>c", "a", "b</think><think>c"),
        ("inside", "a <think> b</think>c", "a <think> b", "c"),
        ("inside", "", "", ""),
        ("tagged", "Hi\n", "", "Hi\n"),
        ("tagged", "<think>\nwhy\n</think>\n\nbecause", "why", "because"),
        ("tagged", " \n<think>why</think>because", "why", "because"),
        ("tagged", " \n<thin", "", " \n<thin"),
        ("tagged", "a</think>b", "", "a</think>b"),
        ("tagged", "Hi <think>why</think>", "", "Hi <think>why</think>"),
        ("tagged", "<think>why", "why", ""),
    ],
)
def test_where_a_text_is_divided(begin: Begin, text: str, reasoning: str, content: str) -> None:
    assert split([text], begin)[0] == (reasoning, content)
    assert split(list(text), begin)[0] == (reasoning, content)


@given(cut(TEXTS), st.sampled_from(BEGINS))
def test_the_cuts_do_not_matter_and_no_text_is_lost(pieces: list[str], begin: Begin) -> None:
    text = "".join(pieces)
    joined, splitter = split(pieces, begin)
    inside = re.match(r"\s*<think>(.*)" if begin == "tagged" else r"(?:\s*<think>)?(.*)", text, re.DOTALL)
    assert splitter.reasoned == (inside is not None)
    if inside is None:
        assert joined == ("", text)
        return
    reasoning, tag, content = inside[1].lstrip("\n").partition(THINK_END)
    assert splitter.ended == bool(tag)
    assert joined == (reasoning.rstrip("\n") if tag else reasoning, content.lstrip("\n"))


@given(cut(TEXTS))
def test_only_what_may_be_part_of_a_tag_is_held_back(pieces: list[str]) -> None:
    splitter = ReasoningSplitter("inside")
    splitter.feed("x")
    taken, given_out = "", ""
    for piece in pieces:
        taken += piece
        given_out += splitter.feed(piece).reasoning
        if splitter.ended:
            return
        rest = taken[len(given_out) :]
        beginning = rest.lstrip("\n")
        assert rest == "" or (THINK_END.startswith(beginning) and beginning != THINK_END)
        assert taken == given_out + rest


@given(TEXTS)
def test_held_chars_is_the_longest_such_end(text: str) -> None:
    ends = [
        size
        for size in range(len(text) + 1)
        if re.fullmatch(r"\n*", text[len(text) - size :].removesuffix(tail := _tag_tail(text[len(text) - size :])))
        and (tail == "" or text.endswith(tail))
    ]
    assert held_chars(text, THINK_END, "\n") == max(ends)


def _tag_tail(text: str) -> str:
    """The longest end of `text` that begins the tag without being it."""
    return max((THINK_END[:size] for size in range(len(THINK_END)) if text.endswith(THINK_END[:size])), key=len)


@pytest.mark.parametrize(
    ("source", "mode"),
    [
        (OURO, "always"),
        (NANBEIGE, "tagged"),
        (QWEN, "tagged"),
        ("{{ messages[0].content }}", "off"),
        ("{% if enable_thinking %}{{ raise_exception('<think>') }}{% endif %}", "tagged"),
    ],
)
def test_what_auto_means_is_read_from_the_template(source: str, mode: ReasoningMode) -> None:
    assert reasoning_mode("auto", ChatTemplate(source)) == mode


@pytest.mark.parametrize("template", [None, ChatTemplate("{{ messages }}")])
def test_thinking_needs_a_template_that_can(template: ChatTemplate | None) -> None:
    with pytest.raises(ModelError, match=r"model\.enable_thinking: the model's chat template has no such option"):
        check_thinking(True, template)
    for off in (None, False):
        check_thinking(off, template)
    check_thinking(True, ChatTemplate(OURO))


def test_other_settings_mean_themselves() -> None:
    settings: list[ReasoningSetting] = ["always", "tagged", "off"]
    assert [reasoning_mode(setting, ChatTemplate(OURO)) for setting in settings] == settings
    assert reasoning_mode("auto", None) == "off"


@pytest.mark.parametrize(
    ("source", "begins"),
    [
        (OURO, ("inside", "inside", "inside")),
        (NANBEIGE, ("inside", "tagged", "inside")),
        (QWEN, ("tagged", "tagged", "tagged")),
        ("{{ messages[0].content }}", (None, None, None)),
    ],
)
def test_where_answers_start_with_thinking_on_off_and_not_said(source: str, begins: tuple[Begin | None, ...]) -> None:
    template = ChatTemplate(source)
    mode = reasoning_mode("auto", template)
    prompts = [
        template.render([{"role": "user", "content": "Hi"}], kwargs=options)
        for options in ({"enable_thinking": True}, {"enable_thinking": False}, {})
    ]
    assert tuple(begin_of(prompt, mode) for prompt in prompts) == begins


def test_a_tag_in_a_message_opens_nothing() -> None:
    template = ChatTemplate(QWEN)
    prompt = template.render([{"role": "user", "content": "What is <think>\n"}])
    assert begin_of(prompt, "tagged") == "tagged"
    assert begin_of(prompt, "always") == "inside"
    assert begin_of("A:<think>\n", "off") is None
