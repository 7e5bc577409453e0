"""Messages of the token and text streams: engine core -> detokenizer -> frontend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from rlt_protocols.codec import Decoder
from rlt_protocols.engine import EngineStats, Route
from rlt_protocols.params import ResolvedParams

FinishReason = Literal["stop", "length", "error"]


class OpenText(msgspec.Struct, frozen=True, tag="open"):
    """Announces a request to the detokenizer; always before its first tokens on the same ordered stream."""

    request_id: str
    route: Route
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    #: the request's min_tokens: stop strings are not looked for before
    min_tokens: int = 0
    #: last prompt tokens: an unfinished character at the prompt's end is completed by the answer
    prompt_tail: tuple[int, ...] = ()


def open_text(request_id: str, route: Route, params: ResolvedParams, prompt_tail: Sequence[int]) -> OpenText:
    """The announcement of a request with these parameters."""
    return OpenText(
        request_id=request_id,
        route=route,
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        prompt_tail=tuple(prompt_tail),
    )


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probability of a generated token under the model alone: before temperature, penalties and filters.

    `top` has the likeliest tokens with theirs, in descending order; what cannot be generated has minus infinity.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A token, its log-probability, and its spelling, which need not be whole characters."""

    token_id: int
    logprob: float
    spelling: bytes


class SpelledLogprob(msgspec.Struct, frozen=True, array_like=True):
    """`TokenLogprob` with spellings."""

    token: Candidate
    top: tuple[Candidate, ...] = ()


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """New tokens of one request, each with the loops it ran. The last message of a request has a finish reason."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    #: what ended the text: a stop token id, None for the model's own end
    stop_reason: int | None = None
    error: str | None = None
    cached_tokens: int = 0
    #: one per token of a request that asks for them, else none
    logprobs: tuple[TokenLogprob, ...] = ()


class CloseText(msgspec.Struct, frozen=True, tag="close"):
    """The request was aborted: forget it without a final event."""

    request_id: str


class TokenBatch(msgspec.Struct, frozen=True, tag="batch"):
    """What one tick produced."""

    engine: int
    items: tuple[OpenText | Tokens | CloseText, ...]


detokenizer_inbox: Decoder[TokenBatch] = Decoder(TokenBatch)


class TextDelta(msgspec.Struct, frozen=True, tag="delta"):
    """New text of one request; the last one has a finish reason (the one final event) and the totals.

    `token_ids` and `depths` are the tokens consumed since the last delta, also when `text` is held back.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cached_tokens: int = 0
    #: one per token of a request that asks for them, else none
    logprobs: tuple[SpelledLogprob, ...] = ()


class TextBatch(msgspec.Struct, frozen=True, tag="text"):
    items: tuple[TextDelta, ...]


FrontendInbox = TextBatch | EngineStats
frontend_inbox: Decoder[FrontendInbox] = Decoder(FrontendInbox)
