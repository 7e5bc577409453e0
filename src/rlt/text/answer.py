"""From the engine's tokens to the text of one answer: shared by the detokenizer process and `rlt.LLM`."""

from __future__ import annotations

from rlt.text.detokenize import IncrementalText
from rlt.text.tokenizer import Tokenizer
from rlt_protocols.text import Candidate, OpenText, SpelledLogprob, TextDelta, TokenLogprob, Tokens


class AnswerText:
    """The text of the request that `opened` announces.

    An end token is counted but not spelled out. A stop string ends the answer with the token that completed it: the
    caller then drops the request in the engine (`TextDelta.stop_reason` is a string exactly then).
    """

    def __init__(self, tokenizer: Tokenizer | None, opened: OpenText) -> None:
        self._tokenizer = tokenizer
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
        ids, depths, logprobs = tokens.token_ids, tokens.depths, tokens.logprobs
        spelled = ids[:-1] if tokens.finish_reason == "stop" else ids
        piece = self._text.feed(spelled)
        text, stop = piece.text, piece.stop
        if stop is not None:
            count = piece.consumed
            ids, depths, logprobs = ids[:count], depths[:count], logprobs[:count]
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
            logprobs=tuple(
                self._spelled(token, logprob) for token, logprob in zip(ids, logprobs, strict=bool(logprobs))
            ),
        )

    def _spelled(self, token_id: int, logprob: TokenLogprob) -> SpelledLogprob:
        return SpelledLogprob(
            self._candidate(token_id, logprob.logprob), tuple(self._candidate(*other) for other in logprob.top)
        )

    def _candidate(self, token_id: int, logprob: float) -> Candidate:
        # An alternative may be a row of a padded vocabulary, which nothing spells.
        known = self._tokenizer is not None and self._tokenizer.has(token_id)
        spelling = self._tokenizer.token_bytes(token_id) if self._tokenizer is not None and known else b""
        return Candidate(token_id, logprob, spelling)
