"""A chat answer in its parts: reasoning, content and tool calls, out of a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlt.text.reasoning import Begin, ReasoningSplitter
from rlt.text.toolcalls import CallParser, CallStyle, ToolCall, ToolSchemas


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What is known about an answer before it begins."""

    #: None: reasoning is not looked for
    begin: Begin | None = None
    #: None: calls are not looked for
    style: CallStyle | None = None
    tools: ToolSchemas | None = None
    #: at most one call is wanted
    one_call: bool = False
    #: the id of `</think>`, where that is one token
    think_end_id: int | None = None


UNDIVIDED = AnswerForm()


class Parts(NamedTuple):
    """What is new, in this order."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class AnswerParts:
    """Divides one answer. The parts, joined, do not depend on the pieces in which the text came."""

    def __init__(self, form: AnswerForm) -> None:
        self._splitter = ReasoningSplitter(form.begin) if form.begin is not None else None
        self._parser = CallParser(form.style, form.tools or {}, one=form.one_call) if form.style is not None else None
        self._end_id = form.think_end_id
        self._tokens = 0
        self._end_token_seen = False

    def feed(self, text: str, token_ids: Sequence[int], *, final: bool) -> Parts:
        """Take the next text and tokens; with `final` nothing is held back any more.

        Tokens may come before their text, never after it.
        """
        self._count(token_ids)
        reasoning = ""
        if self._splitter is not None:
            reasoning, text = self._splitter.feed(text, final=final)
        if self._parser is None:
            return Parts(reasoning, text)
        content, calls = self._parser.feed(text, final=final)
        return Parts(reasoning, content, calls)

    @property
    def called(self) -> bool:
        """Whether there was a tool call."""
        return self._parser is not None and self._parser.called

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens up to the one that ended the reasoning, that one included; all while it has not ended.

        None when they cannot be counted: reasoning is not looked for, or ended without a token of its own for that.
        """
        if self._splitter is None or (self._splitter.ended and not self._end_token_seen):
            return None
        return self._tokens if self._splitter.reasoned else 0

    def _count(self, token_ids: Sequence[int]) -> None:
        if self._end_token_seen:
            return
        if self._end_id is not None and self._end_id in token_ids:
            self._end_token_seen = True
            token_ids = token_ids[: list(token_ids).index(self._end_id) + 1]
        self._tokens += len(token_ids)
