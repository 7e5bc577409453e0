"""The detokenizer: streams by request, stop strings, failures that stay where they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zmq

from rlt.text.tokenizer import Tokenizer
from rlt_protocols.codec import encode
from rlt_protocols.control import FromChild, PeerDown, PeerUp, StatusQuery, StatusReply, Stop
from rlt_protocols.engine import AbortRequest, Route, engine_inbox
from rlt_protocols.text import CloseText, OpenText, TextBatch, TextDelta, TokenBatch, Tokens, frontend_inbox
from rltd.detokenizer.detokenizer import Detokenizer
from rltd.detokenizer.wire import DetokenizerWire
from rltd.link.address import Peer
from rltd.link.inbox import bind_inbox
from rltd.link.outbox import Outboxes
from text import small_tokenizers

TOKENIZER = Tokenizer(small_tokenizers.byte_level())
ROUTE = Route(frontend=1, engine=2, detokenizer=3)


def ids(text: str) -> tuple[int, ...]:
    """One token per byte, so that tests can count them."""
    by_byte = {TOKENIZER.token_bytes(i): i for i in range(330) if TOKENIZER.has(i)}
    return tuple(by_byte[bytes([byte])] for byte in text.encode())


class Bench:
    def __init__(self, tokenizer: Tokenizer | None = TOKENIZER) -> None:
        self.deltas: list[tuple[int, TextDelta]] = []
        self.aborts: list[tuple[int, int, tuple[str, ...]]] = []
        self.batches = 0
        self.detokenizer = Detokenizer(tokenizer, self._text, self._abort)

    def _text(self, generation: int, batch: TextBatch) -> None:
        self.batches += 1
        self.deltas += [(generation, delta) for delta in batch.items]

    def _abort(self, engine: int, generation: int, message: AbortRequest) -> None:
        self.aborts.append((engine, generation, message.request_ids))

    def give(self, *items: OpenText | Tokens | CloseText, engine: int = 0) -> list[TextDelta]:
        """The deltas of one batch."""
        before = len(self.deltas)
        self.detokenizer.on_batch(TokenBatch(engine, items))
        return [delta for _, delta in self.deltas[before:]]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def tokens(text: str, name: str = "a", **fields: object) -> Tokens:
    return Tokens(name, ids(text), tuple(range(1, len(ids(text)) + 1)), **fields)  # type: ignore[arg-type]


def test_text_flows_with_its_tokens_and_depths(bench: Bench) -> None:
    (delta,) = bench.give(OpenText("a", ROUTE), tokens("hi", cached_tokens=5))
    assert delta == TextDelta("a", "hi", ids("hi"), (1, 2), cached_tokens=5)
    assert bench.give(tokens("€"[:0] + "!", finish_reason="length"))[0].finish_reason == "length"
    assert bench.detokenizer.active == 0
    assert bench.deltas[0][0] == ROUTE.frontend


def test_the_token_that_ends_the_text_is_counted_and_hidden(bench: Bench) -> None:
    (delta,) = bench.give(OpenText("a", ROUTE), tokens("hi#", finish_reason="stop", stop_reason=77))
    assert delta == TextDelta("a", "hi", ids("hi#"), (1, 2, 3), "stop", 77)


def test_a_stop_string_ends_the_text_and_the_request(bench: Bench) -> None:
    bench.give(OpenText("a", ROUTE, stop=("END",)), tokens("xE"), engine=4)
    (delta,) = bench.give(tokens("NDyz"), engine=4)
    assert delta == TextDelta("a", "", ids("ND"), (1, 2), "stop", "END")
    assert bench.deltas[0][1].text == "x"
    assert bench.aborts == [(4, 2, ("a",))]
    assert bench.give(tokens("more", finish_reason="length"), CloseText("a")) == []


def test_a_stop_string_in_the_last_tokens_needs_no_abort(bench: Bench) -> None:
    (delta,) = bench.give(OpenText("a", ROUTE, stop=("EN",)), tokens("ENx", finish_reason="length"))
    assert (delta.finish_reason, delta.stop_reason, delta.token_ids) == ("stop", "EN", ids("EN"))
    assert bench.aborts == []


def test_held_text_leaves_at_the_end(bench: Bench) -> None:
    (delta,) = bench.give(OpenText("a", ROUTE, stop=("END",)), tokens("xEN", finish_reason="length"))
    assert (delta.text, delta.finish_reason) == ("xEN", "length")


def test_min_tokens_and_the_included_stop_string(bench: Bench) -> None:
    opened = OpenText("a", ROUTE, stop=("b",), min_tokens=2, include_stop_str_in_output=True)
    (delta,) = bench.give(opened, tokens("abcb?"))
    assert (delta.text, delta.token_ids) == ("abcb", ids("abcb"))


def test_an_id_without_a_token_ends_only_its_request(bench: Bench) -> None:
    deltas = bench.give(OpenText("a", ROUTE), OpenText("b", ROUTE), Tokens("a", (9999,), (1,)), tokens("ok", "b"))
    assert [(delta.request_id, delta.finish_reason, delta.text) for delta in deltas] == [
        ("a", "error", ""),
        ("b", None, "ok"),
    ]
    assert "9999" in (deltas[0].error or "")
    assert bench.aborts == [(0, 2, ("a",))]
    assert bench.batches == 1


def test_a_bug_ends_only_its_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.give(OpenText("a", ROUTE), OpenText("b", ROUTE))
    monkeypatch.setattr(bench.detokenizer._streams["a"].answer, "take", lambda _: 1 / 0)
    deltas = bench.give(tokens("x", "a"), tokens("y", "b"))
    assert [delta.error is not None for delta in deltas] == [True, False]
    assert "division" not in (deltas[0].error or "")


def test_an_error_of_the_engine_passes_through(bench: Bench) -> None:
    (delta,) = bench.give(OpenText("a", ROUTE), Tokens("a", finish_reason="error", error="no"))
    assert (delta.finish_reason, delta.error) == ("error", "no")
    assert bench.aborts == []


def test_closed_and_unknown_requests_are_ignored(bench: Bench) -> None:
    assert bench.give(tokens("x", "nobody"), CloseText("nobody")) == []
    assert bench.give(OpenText("a", ROUTE), CloseText("a"), tokens("x")) == []
    assert bench.detokenizer.active == 0


def test_without_a_tokenizer_ids_flow() -> None:
    (delta,) = Bench(None).give(OpenText("a", ROUTE, stop=("x",)), Tokens("a", (5, 6), (1, 1), finish_reason="length"))
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", (5, 6), "length")


@pytest.mark.parametrize(
    ("peer", "left"),
    [
        (PeerDown("frontend", 0, 1), {"b"}),
        (PeerDown("engine", 0, 2), {"b", "c"}),
        (PeerDown("engine", 1, 2), {"a"}),
        (PeerDown("engine", 0, 1), {"a", "b", "c"}),
    ],
)
def test_requests_of_a_dead_process_are_forgotten(bench: Bench, peer: PeerDown, left: set[str]) -> None:
    bench.give(OpenText("a", ROUTE), engine=0)
    bench.give(OpenText("b", Route(2, 2, 3)), OpenText("c", ROUTE), engine=1)
    bench.detokenizer.on_peer_down(peer)
    survivors = {delta.request_id for name in "abc" for delta in bench.give(tokens("x", name))}
    assert survivors == left
    assert bench.aborts == []


def test_what_a_dead_engine_left_in_the_inbox_is_not_begun(bench: Bench) -> None:
    bench.detokenizer.on_peer_down(PeerDown("engine", 0, 2))
    assert bench.give(OpenText("a", ROUTE), tokens("x")) == []
    assert len(bench.give(OpenText("b", Route(1, 3, 3)), tokens("x", "b"))) == 1


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with TemporaryDirectory(prefix="rlt-") as path:
        yield Path(path)


def test_over_the_wire(run_dir: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reports: list[FromChild] = []
    me = Peer("detokenizer", 0, 3)
    with (
        DetokenizerWire(context, str(run_dir), me) as wire,
        bind_inbox(context, run_dir, Peer("frontend", 0, 1)) as frontend,
        bind_inbox(context, run_dir, Peer("engine", 0, 2)) as engine,
        Outboxes(context, run_dir) as outboxes,
    ):
        for inbox in (frontend, engine):
            inbox.setsockopt(zmq.RCVTIMEO, 10_000)
        detokenizer = Detokenizer(TOKENIZER, wire.to_frontend, wire.to_engine)
        thread = threading.Thread(target=wire.run, args=(detokenizer, reports.append))
        thread.start()
        outboxes.send("detokenizer", 0, 3, [b"rubbish"])
        batch = TokenBatch(0, (OpenText("a", ROUTE, stop=("!",)), tokens("hi!")))
        outboxes.send("detokenizer", 0, 3, [encode(batch)])
        text = frontend_inbox.decode(frontend.recv())
        assert text == TextBatch((TextDelta("a", "hi", ids("hi!"), (1, 2, 3), "stop", "!"),))
        assert engine_inbox.decode(engine.recv()) == AbortRequest(("a",))
        wire.put_order(PeerUp("engine", 0, 2))
        wire.put_order(PeerDown("engine", 0, 2))
        wire.put_order(StatusQuery(9))
        wire.put_order(Stop())
        thread.join(10)
        assert not thread.is_alive()
    assert reports == [StatusReply(9, {"active": 0.0})]
    context.term()
