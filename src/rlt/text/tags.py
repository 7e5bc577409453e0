"""The tags with which models divide their answers, and how much text may still become one."""

from __future__ import annotations

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
#: Some tokenizers call these tokens special; they are kept in the text all the same, since it cannot be read without.
TAGS = frozenset({THINK, THINK_END, CALL, CALL_END})


def held_chars(text: str, tag: str, padding: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `tag`, with any `padding` before it.

    A whole tag in the text does not count. `tag` has a "<" at its beginning and nowhere else.
    """
    end = len(text)
    start = text.rfind("<")
    if start >= 0 and end - start < len(tag) and tag.startswith(text[start:]):
        end = start
    return len(text) - len(text[:end].rstrip(padding))
