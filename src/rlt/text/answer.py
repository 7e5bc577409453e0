"""From the engine's tokens to the text of one answer: shared by the detokenizer process and `rlt.LLM`."""

from __future__ import annotations

from rlt.text.detokenize import IncrementalText
from rlt.text.tokenizer import Tokenizer
from rlt_protocols.text import OpenText, TextDelta, Tokens


class AnswerText:
    """The text of the request that `opened` announces.

    An end token is counted but not spelled out. A stop string ends the answer with the token that completed it: the
    caller then drops the request in the engine (`TextDelta.stop_reason` is a string exactly then).
    """

    def __init__(self, tokenizer: Tokenizer | None, opened: OpenText) -> None:
        self.request_id = opened.request_id
        self.route = opened.route
        self._text = IncrementalText(
            tokenizer,
            stop=opened.stop,
            include_stop_str_in_output=opened.include_stop_str_in_output,
            skip_special_tokens=opened.skip_special_tokens,
            min_tokens=opened.min_tokens,
            prompt_tail=opened.prompt_tail,
        )

    def take(self, tokens: Tokens) -> TextDelta:
        """The next part of the answer. Raises `TokenizerError` for an id that the tokenizer does not have."""
        ids, depths = tokens.token_ids, tokens.depths
        spelled = ids[:-1] if tokens.finish_reason == "stop" else ids
        piece = self._text.feed(spelled)
        text, stop = piece.text, piece.stop
        if stop is not None:
            ids, depths = ids[: piece.consumed], depths[: piece.consumed]
        elif tokens.finish_reason is not None:
            tail = self._text.finish()
            text, stop = text + tail.text, tail.stop
        return TextDelta(
            self.request_id,
            text=text,
            token_ids=ids,
            depths=depths,
            finish_reason=tokens.finish_reason if stop is None else "stop",
            stop_reason=tokens.stop_reason if stop is None else stop,
            error=tokens.error,
            cached_tokens=tokens.cached_tokens,
        )
