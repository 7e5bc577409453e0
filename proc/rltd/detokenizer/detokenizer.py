"""Tokens of all requests to text. No sockets here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rlt.text.answer import AnswerText
from rlt.text.tokenizer import Tokenizer, TokenizerError
from rlt_protocols.control import PeerDown, Role
from rlt_protocols.engine import AbortRequest, Route
from rlt_protocols.text import CloseText, OpenText, TextBatch, TextDelta, TokenBatch, Tokens

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """One open request."""

    engine: int
    answer: AnswerText

    @property
    def route(self) -> Route:
        return self.answer.route


class Detokenizer:
    """Owns the streams; `to_frontend` and `to_engine` send what becomes of a batch.

    A stream is forgotten with its final event. Tokens of an unknown stream belong to a request whose end was already
    told: they are ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        to_frontend: Callable[[int, TextBatch], None],
        to_engine: Callable[[int, int, AbortRequest], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._to_frontend = to_frontend
        self._to_engine = to_engine
        self._streams: dict[str, _Stream] = {}
        #: the latest dead generation by (role, index): what such an engine left in the inbox is not begun any more
        self._dead: dict[tuple[Role, int], int] = {}

    @property
    def active(self) -> int:
        return len(self._streams)

    def on_batch(self, batch: TokenBatch) -> None:
        """Handle one tick's items: at most one message per frontend and per engine goes out."""
        deltas: dict[int, list[TextDelta]] = {}
        aborts: dict[tuple[int, int], list[str]] = {}
        for item in batch.items:
            if isinstance(item, OpenText):
                if self._route_lives(batch.engine, item.route):
                    self._streams[item.request_id] = _Stream(batch.engine, AnswerText(self._tokenizer, item))
                continue
            stream = self._streams.get(item.request_id)
            if stream is None:
                continue
            if isinstance(item, CloseText):
                del self._streams[item.request_id]
                continue
            delta = self._advance(stream, item)
            deltas.setdefault(stream.route.frontend, []).append(delta)
            if delta.finish_reason is not None:
                del self._streams[item.request_id]
                if item.finish_reason is None:
                    aborts.setdefault((stream.engine, stream.route.engine), []).append(item.request_id)
        for generation, items in deltas.items():
            self._to_frontend(generation, TextBatch(tuple(items)))
        for (engine, generation), request_ids in aborts.items():
            self._to_engine(engine, generation, AbortRequest(tuple(request_ids)))

    def on_peer_down(self, peer: PeerDown) -> None:
        """Forget the requests whose route went through a dead process."""
        self._dead[peer.role, peer.index] = peer.generation
        lost = [request_id for request_id, stream in self._streams.items() if _depends(stream, peer)]
        for request_id in lost:
            del self._streams[request_id]
        if lost:
            log.info("forgot %d requests: the %s is gone", len(lost), peer.role)

    def _route_lives(self, engine: int, route: Route) -> bool:
        dead_engine = self._dead.get(("engine", engine), -1)
        return route.engine > dead_engine and route.frontend > self._dead.get(("frontend", 0), -1)

    def _advance(self, stream: _Stream, item: Tokens) -> TextDelta:
        try:
            return stream.answer.take(item)
        except TokenizerError as error:
            log.warning("request %s: %s", item.request_id, error)
            message = str(error)
        except Exception:
            # Whatever breaks in one request's text must not reach its neighbours.
            log.exception("request %s: its text failed", item.request_id)
            message = "the answer's text could not be made"
        return TextDelta(item.request_id, finish_reason="error", error=message, cached_tokens=item.cached_tokens)


def _depends(stream: _Stream, peer: PeerDown) -> bool:
    if peer.role == "engine":
        return stream.engine == peer.index and stream.route.engine == peer.generation
    return peer.role == "frontend" and stream.route.frontend == peer.generation
