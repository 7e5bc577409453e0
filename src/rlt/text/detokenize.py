"""Text out of a growing list of token ids: incremental, on bytes, with stop strings held back exactly."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from rlt.text.tokenizer import Tokenizer

#: Prompt tokens that can matter to the first characters: an unfinished UTF-8 character has at most 3 bytes.
PROMPT_TAIL_TOKENS = 3

_utf8 = codecs.getincrementaldecoder("utf-8")


class TextPiece(NamedTuple):
    """What became of some tokens: `text` that may leave now, and how many of the tokens belong to the answer."""

    text: str
    consumed: int
    #: the stop string that ended the text; nothing may follow it
    stop: str | None = None


class IncrementalText:
    """The text of one answer.

    Only whole characters leave. With stop strings, text that may be the beginning of one is held exactly as long as
    that is possible, across token and character borders. The stop string that is complete first ends the text (of two
    that end at the same character, the longer one), whatever the tokens are split into. A stop string counts only if
    it is completed by a token after the first `min_tokens`.

    A prompt's unfinished last character (`prompt_tail` has the prompt's last ids) is completed by the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._hidden = tokenizer.special_ids if tokenizer is not None and skip_special_tokens else frozenset[int]()
        self._min_tokens = min_tokens
        self._tokens = 0
        self._decoder = _utf8(errors="replace")
        self._held = ""
        self._at_start = not prompt_tail
        self._first = True
        self._prompt_bytes = _unfinished(tokenizer, prompt_tail) if tokenizer is not None else b""

    def feed(self, token_ids: Sequence[int]) -> TextPiece:
        """Take new tokens. Raises `TokenizerError` for an id that the tokenizer does not have."""
        if self._tokenizer is None:
            return TextPiece("", len(token_ids))
        if not self._stop:
            data = b"".join([self._bytes(token_id) for token_id in token_ids])
            return TextPiece(self._decode(data), len(token_ids))
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            self._tokens += 1
            piece, stop = self._release(self._decode(self._bytes(token_id)))
            text += piece
            if stop is not None:
                return TextPiece(text, count, stop)
        return TextPiece(text, len(token_ids))

    def finish(self) -> TextPiece:
        """The text still held back at the end; an unfinished character becomes U+FFFD."""
        # A prompt's own unfinished character was never part of the answer.
        piece, stop = self._release("" if self._prompt_bytes else self._decoder.decode(b"", final=True))
        if stop is None:
            piece, self._held = piece + self._held, ""
        return TextPiece(piece, 0, stop)

    def _bytes(self, token_id: int) -> bytes:
        assert self._tokenizer is not None
        if token_id in self._hidden:
            return b""
        if self._at_start:
            piece, self._at_start = self._tokenizer.first_bytes(token_id)
        else:
            piece = self._tokenizer.token_bytes(token_id)
        if self._first:
            self._first = False
            return piece
        return self._tokenizer.joint + piece

    def _decode(self, data: bytes) -> str:
        if self._prompt_bytes and data:
            # The prompt's bytes count only if the first byte of the answer continues their character.
            joined = self._prompt_bytes + data
            probe = _utf8(errors="replace").decode(joined[: len(self._prompt_bytes) + 1])
            data = data if probe.startswith("\N{REPLACEMENT CHARACTER}") else joined
            self._prompt_bytes = b""
        return self._decoder.decode(data)

    def _release(self, new: str) -> tuple[str, str | None]:
        """Add `new` to the held text; return what may leave and the stop string that was completed, if any."""
        if not self._stop:
            return new, None
        held, text = len(self._held), self._held + new
        if new and self._tokens > self._min_tokens and (hit := self._find(text, held)) is not None:
            start, stop = hit
            self._held = ""
            return text[: start + len(stop) if self._include_stop else start], stop
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def _find(self, text: str, held: int) -> tuple[int, str] | None:
        """Start and value of the stop string that ends first in `text`, after its first `held` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, held - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if stop[size - 1] == text[-1] and text.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def _unfinished(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """The bytes at the end of these tokens that begin a character without ending it."""
    data = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids if tokenizer.has(token_id))
    decoder = _utf8(errors="replace")
    decoder.decode(data)
    return decoder.getstate()[0]
