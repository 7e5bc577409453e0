"""Log-probabilities as the two APIs write them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from rlt_protocols.answers import AlternativeLogprob, ChatLogprob, ChatLogprobs, CompletionLogprobs
from rlt_protocols.text import Candidate, SpelledLogprob

#: what JSON gets for minus infinity, which it cannot write
LOWEST = -9999.0

_utf8 = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Where each token of one answer begins, in characters of its text; one that is part of a character, where that
    begins."""

    def __init__(self) -> None:
        self._decoder = _utf8(errors="replace")
        self._characters = 0

    def next(self, spelling: bytes) -> int:
        """The place of the next token."""
        place = self._characters
        self._characters += len(self._decoder.decode(spelling))
        return place


def completion_logprobs(logprobs: Sequence[SpelledLogprob], offsets: TextOffsets) -> CompletionLogprobs:
    """Of the tokens that follow those that `offsets` has seen."""
    return CompletionLogprobs(
        tokens=[_text(entry.token) for entry in logprobs],
        token_logprobs=[_finite(entry.token.logprob) for entry in logprobs],
        # Of tokens with the same text the likelier one is told; the token itself always is.
        top_logprobs=[
            {_text(other): _finite(other.logprob) for other in (*reversed(entry.top), entry.token)}
            for entry in logprobs
        ],
        text_offset=[offsets.next(entry.token.spelling) for entry in logprobs],
    )


def chat_logprobs(logprobs: Sequence[SpelledLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatLogprob(
                *_fields(entry.token),
                [AlternativeLogprob(*_fields(other)) for other in entry.top],
            )
            for entry in logprobs
        ]
    )


def _fields(candidate: Candidate) -> tuple[str, float, list[int]]:
    return _text(candidate), _finite(candidate.logprob), list(candidate.spelling)


def _text(candidate: Candidate) -> str:
    """Its spelling; one that is no whole characters is written as its bytes, so that different tokens stay apart."""
    try:
        text = candidate.spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.spelling)
    return text or f"token_id:{candidate.token_id}"


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
