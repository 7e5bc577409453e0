"""Messages into an engine core's inbox, and what an engine reports about itself."""

from __future__ import annotations

import msgspec

from rlt_protocols.codec import Decoder
from rlt_protocols.params import ResolvedParams


class Route(msgspec.Struct, frozen=True, array_like=True):
    """The generation of each process that serves a request.

    The supervisor counts a role's restarts in its generation. A request lives exactly as long as its whole route:
    when any process of it dies, the others drop the request and the frontend tells its client.
    """

    frontend: int
    engine: int
    detokenizer: int


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """A new request. The prompt's token ids follow in a frame of their own (`codec.pack_ids`)."""

    request_id: str
    route: Route
    params: ResolvedParams
    #: last prompt tokens matter to the detokenizer's first characters; the engine passes this on unread
    prompt_tail: tuple[int, ...] = ()


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Drop these requests without further output; unknown ids are ignored."""

    request_ids: tuple[str, ...]


EngineInbox = AddRequest | AbortRequest
engine_inbox: Decoder[EngineInbox] = Decoder(EngineInbox)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Gauges and counters of one engine, sent to the frontend a few times a second while they change."""

    engine: int
    running: int
    waiting: int
    #: pages by state: free, used (and more states as features need them)
    kv_pages: dict[str, int]
    ticks: int
    #: rows executed since start by kind: decode, prefill
    tick_rows: dict[str, int]
    #: wall seconds of the ticks since the last report
    tick_seconds: tuple[float, ...] = ()
    tokens: int = 0
    #: loops executed for the tokens counted in `tokens`
    token_loops: int = 0
