from __future__ import annotations

from hypothesis import given

from rlt.text.parts import UNDIVIDED, AnswerForm, AnswerParts, Parts
from rlt.text.toolcalls import ToolCall
from text.pieces import cut, texts

END = 7
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
FULL = AnswerForm("inside", "json", {"f": {}}, think_end_id=END)


def divide(form: AnswerForm, pieces: list[str]) -> tuple[Parts, AnswerParts]:
    parts = AnswerParts(form)
    found = [parts.feed(piece, (), final=False) for piece in pieces]
    found.append(parts.feed("", (), final=True))
    reasoning, content, calls = zip(*found, strict=True)
    return Parts("".join(reasoning), "".join(content), tuple(call for each in calls for call in each)), parts


def test_all_parts() -> None:
    text = f"why {CALL}\n</think>\n\nSo:\n{CALL}"
    found, parts = divide(FULL, [text])
    assert found == (f"why {CALL}", "So:", (ToolCall("f", "{}"),))
    assert parts.called


def test_an_answer_that_is_not_divided() -> None:
    text = f"why\n</think>\n\n{CALL}"
    found, parts = divide(UNDIVIDED, [text])
    assert found == ("", text, ())
    assert not parts.called
    assert parts.reasoning_tokens is None


@given(cut(texts("<think>", "</think>", CALL, "\n\n")))
def test_the_cuts_do_not_matter(pieces: list[str]) -> None:
    for form in (FULL, AnswerForm("tagged", "json", {"f": {}}), AnswerForm(None, "json", {"f": {}})):
        assert divide(form, pieces)[0] == divide(form, ["".join(pieces)])[0]


def test_tokens_of_the_reasoning_are_counted_up_to_the_end_tag() -> None:
    parts = AnswerParts(FULL)
    parts.feed("a b", (1, 2), final=False)
    assert parts.reasoning_tokens == 2
    # A stop string may hold the text back; the tokens come all the same.
    parts.feed("", (3, END, 4), final=False)
    parts.feed("c</think>d", (5,), final=True)
    assert parts.reasoning_tokens == 4


def test_reasoning_that_does_not_end_or_never_begins() -> None:
    parts = AnswerParts(FULL)
    parts.feed("a b", (1, 2, 3), final=True)
    assert parts.reasoning_tokens == 3
    parts = AnswerParts(AnswerForm("tagged", think_end_id=END))
    parts.feed("a", (1, END), final=True)
    assert parts.reasoning_tokens == 0


def test_an_end_tag_of_several_tokens_cannot_be_counted() -> None:
    for form in (FULL, AnswerForm("inside")):
        parts = AnswerParts(form)
        parts.feed("a</think>b", (1, 2, 3), final=True)
        assert parts.reasoning_tokens is None
