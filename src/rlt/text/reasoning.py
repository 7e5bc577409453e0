"""Reasoning apart from the answer: `<think>…</think>` at the beginning of a text that comes in pieces."""

from __future__ import annotations

from enum import Enum, auto
from typing import Literal, NamedTuple

from rlt.errors import ModelError
from rlt.text.chat import ChatTemplate, ChatTemplateError
from rlt.text.tags import THINK, THINK_END, held_chars

#: Where an answer's text starts: inside the reasoning, or outside, with reasoning only after a `<think>` of its own.
Begin = Literal["inside", "tagged"]
#: `model.reasoning`
ReasoningSetting = Literal["auto", "always", "tagged", "off"]
ReasoningMode = Literal["always", "tagged", "off"]

_PROBE = ({"role": "user", "content": "Hi"},)


def reasoning_mode(setting: ReasoningSetting, template: ChatTemplate | None) -> ReasoningMode:
    """What "auto" means with this template; other settings mean themselves.

    "off" when the template knows no `<think>`. "always" when it opens the block if thinking is asked for and, if it is
    not, leaves the prompt as it is instead of closing an empty block: such a checkpoint reasons in either case, and
    often without a tag of its own. Else "tagged".
    """
    if setting != "auto":
        return setting
    if template is None or THINK not in template.source:
        return "off"
    try:
        opened, neutral = (template.render(_PROBE, kwargs={"enable_thinking": asked}) for asked in (True, False))
    except ChatTemplateError:
        return "tagged"
    return "always" if _ends_with(opened, THINK) and not _ends_with(neutral, THINK, THINK_END) else "tagged"


def check_thinking(enable_thinking: bool | None, template: ChatTemplate | None) -> None:
    """Raise `ModelError` when `model.enable_thinking` is true and the template has no such option."""
    if enable_thinking and (template is None or "enable_thinking" not in template.options):
        raise ModelError("model.enable_thinking: the model's chat template has no such option; leave it out")


def begin_of(prompt: str, mode: ReasoningMode) -> Begin | None:
    """Where the answer to a rendered `prompt` starts; None: it is not divided.

    The end of the prompt decides, since that is all that the model sees. `mode` is for prompts that neither open a
    block nor close one.
    """
    if mode == "off":
        return None
    if _ends_with(prompt, THINK) or (mode == "always" and not _ends_with(prompt, THINK_END)):
        return "inside"
    return "tagged"


def _ends_with(prompt: str, *tags: str) -> bool:
    return prompt.rstrip().endswith(tags)


class Split(NamedTuple):
    """New text of both kinds; the reasoning comes first."""

    reasoning: str = ""
    content: str = ""


class _State(Enum):
    #: nothing but white space yet; a `<think>` may come
    START = auto()
    #: inside, behind line breaks that belong to the tag
    OPENED = auto()
    REASONING = auto()
    #: behind the end tag and line breaks that belong to it
    CLOSED = auto()
    CONTENT = auto()


class ReasoningSplitter:
    """Divides one text, whatever pieces it comes in.

    Only what may be part of a tag, or line breaks around one, is held back. The tags and the line breaks around the
    reasoning are left out. There is one block, at the beginning: a later `<think>` is ordinary text.
    """

    def __init__(self, begin: Begin) -> None:
        self._inside = begin == "inside"
        self._state = _State.START
        self._held = ""

    @property
    def reasoned(self) -> bool:
        """Whether the text has a part for reasoning, be it empty."""
        return self._inside

    @property
    def ended(self) -> bool:
        """Whether the end tag has come."""
        return self._inside and self._state in (_State.CLOSED, _State.CONTENT)

    def feed(self, text: str, *, final: bool = False) -> Split:
        """Take the next piece; with `final` nothing is held back any more."""
        text, self._held = self._held + text, ""
        if self._state is _State.START:
            if (rest := self._begin(text, final)) is None:
                self._held = text
                return Split()
            text = rest
        if self._state is _State.OPENED:
            text = text.lstrip("\n")
            if text:
                self._state = _State.REASONING
        reasoning = ""
        if self._state is _State.REASONING:
            end = text.find(THINK_END)
            if end < 0:
                keep = 0 if final else held_chars(text, THINK_END, "\n")
                self._held = text[len(text) - keep :]
                return Split(text[: len(text) - keep])
            reasoning, text = text[:end].rstrip("\n"), text[end + len(THINK_END) :]
            self._state = _State.CLOSED
        if self._state is _State.CLOSED:
            text = text.lstrip("\n")
            if text:
                self._state = _State.CONTENT
        return Split(reasoning, text)

    def _begin(self, text: str, final: bool) -> str | None:
        """Leave the start: the text behind a start tag, or all of it; None while a tag is still possible."""
        body = text.lstrip()
        if body.startswith(THINK):
            self._inside = True
            body = body.removeprefix(THINK)
        elif not final and THINK.startswith(body):
            return None
        else:
            body = text
        self._state = _State.OPENED if self._inside else _State.CONTENT
        return body
