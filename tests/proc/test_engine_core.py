"""The engine core's loop and its socket threads, around a fake engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import pytest
import zmq

from proc.fakes.fake_engine import INFO, FakeEngine
from rlt_protocols.codec import encode, pack_ids
from rlt_protocols.control import AbortAnswer, Done, PeerDown, PeerUp, ResetCache, StatusQuery, StatusReply, Stop
from rlt_protocols.engine import AbortRequest, AddRequest, EngineStats, Route
from rlt_protocols.params import ResolvedParams
from rlt_protocols.text import CloseText, OpenText, TokenBatch, Tokens, detokenizer_inbox, frontend_inbox
from rltd.engine_core.core import (
    Command,
    EngineCore,
    Forget,
    Meet,
    NewRequest,
    Outgoing,
    ToDetokenizer,
    ToFrontend,
    ToSupervisor,
)
from rltd.engine_core.wire import EngineWire
from rltd.link.address import Peer
from rltd.link.inbox import bind_inbox
from rltd.link.outbox import Outboxes

ME = Peer("engine", 0, 5)
WAIT_S = 10.0


def params(max_tokens: int = 3) -> ResolvedParams:
    return ResolvedParams(
        max_tokens=max_tokens,
        min_tokens=0,
        temperature=0,
        top_p=1,
        top_k=0,
        min_p=0,
        seed=1,
        end_token_ids=(2,),
        stop_token_ids=(),
        min_loops=1,
        max_loops=4,
        exit_threshold=1,
        stop=("END",),
    )


def new(name: str, *, frontend: int = 1, engine: int = 5, detokenizer: int = 2, tokens: int = 3) -> NewRequest:
    header = AddRequest(name, Route(frontend, engine, detokenizer), params(tokens), prompt_tail=(8, 9))
    return NewRequest(header, [7, 8, 9])


@dataclass
class Bench:
    """A core on a thread of its own, whose output ends in a list."""

    engine: FakeEngine
    commands: SimpleQueue[Command] = field(default_factory=SimpleQueue)
    sent: SimpleQueue[Outgoing] = field(default_factory=SimpleQueue)
    seen: list[Outgoing] = field(default_factory=list)

    def next(self, kind: type) -> Outgoing:
        """The next output of this kind; the ones before it are kept in `seen`."""
        while True:
            outgoing = self.sent.get(timeout=WAIT_S)
            self.seen.append(outgoing)
            if isinstance(outgoing, kind):
                return outgoing

    def batch(self) -> ToDetokenizer:
        outgoing = self.next(ToDetokenizer)
        assert isinstance(outgoing, ToDetokenizer)
        return outgoing


@contextmanager
def running(gate: threading.Semaphore | None = None) -> Iterator[Bench]:
    bench = Bench(FakeEngine(gate))
    core = EngineCore(bench.engine, ME, bench.commands, bench.sent.put)
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    yield bench
    bench.commands.put(Stop())
    if gate is not None:
        gate.release(100)
    thread.join(WAIT_S)
    assert not thread.is_alive()


def names(batch: TokenBatch) -> list[str]:
    return [f"{type(item).__name__} {item.request_id}" for item in batch.items]


def test_the_way_to_a_process_is_opened_when_it_is_up() -> None:
    with running() as bench:
        bench.commands.put(PeerUp("detokenizer", 0, 2))
        assert bench.next(Meet) == Meet(Peer("detokenizer", 0, 2))


def test_a_request_is_opened_before_its_tokens_and_each_tick_is_one_batch() -> None:
    with running() as bench:
        bench.commands.put(new("a"))
        first, second, third = bench.batch(), bench.batch(), bench.batch()
    opened, tokens = first.batch.items
    assert opened == OpenText("a", Route(1, 5, 2), stop=("END",), prompt_tail=(8, 9))
    assert tokens == Tokens("a", token_ids=(0,), depths=(2,))
    assert names(second.batch) == ["Tokens a"]
    assert third.batch.items == (Tokens("a", token_ids=(2,), depths=(2,), finish_reason="length"),)
    assert first.generation == 2
    assert bench.engine.prompts["a"] == [7, 8, 9]


def test_an_abort_takes_effect_before_the_next_tick() -> None:
    gate = threading.Semaphore(0)
    with running(gate) as bench:
        bench.commands.put(new("a", tokens=50))
        assert bench.engine.stepping.wait(WAIT_S)
        bench.commands.put(new("b", tokens=50))
        bench.commands.put(AbortRequest(("a", "never heard of", "a")))
        gate.release()  # the tick that was running when the abort came
        assert names(bench.batch().batch) == ["OpenText a", "Tokens a"]
        gate.release()
        assert names(bench.batch().batch) == ["OpenText b", "CloseText a", "Tokens b"]
        assert bench.engine.aborted == ["a"]


def test_an_abort_of_the_last_request_is_told_without_a_tick() -> None:
    gate = threading.Semaphore(0)
    with running(gate) as bench:
        bench.commands.put(new("a", tokens=50))
        assert bench.engine.stepping.wait(WAIT_S)
        bench.commands.put(AbortRequest(("a",)))
        gate.release()
        bench.batch()
        assert bench.batch().batch.items == (CloseText("a"),)
        assert bench.engine.ticks == 1


@pytest.mark.parametrize("role", ["frontend", "detokenizer"])
def test_a_dead_process_takes_only_the_requests_of_its_generation_along(role: str) -> None:
    gate = threading.Semaphore(0)
    with running(gate) as bench:
        bench.commands.put(new("old", tokens=50))
        bench.commands.put(new("new", frontend=2, detokenizer=3, tokens=50))
        assert bench.engine.stepping.wait(WAIT_S)
        generation = 1 if role == "frontend" else 2
        bench.commands.put(PeerDown(role, 0, generation))  # type: ignore[arg-type]
        bench.commands.put(new("late", tokens=50))
        gate.release()
        forget = bench.next(Forget)
        assert forget == Forget(Peer(role, 0, generation))  # type: ignore[arg-type]
        assert set(bench.engine.requests) == {"new"}
        assert bench.engine.aborted == ["old"]


def test_requests_of_another_engine_generation_and_used_ids_are_dropped() -> None:
    with running() as bench:
        bench.commands.put(new("stale", engine=4))
        bench.commands.put(new("a", tokens=1))
        bench.commands.put(new("a", tokens=2))
        assert names(bench.batch().batch) == ["OpenText a", "Tokens a"]
    assert bench.engine.prompts.keys() == {"a"}
    assert bench.engine.ticks == 1


def test_a_request_that_the_engine_refuses_ends_with_one_error() -> None:
    with running() as bench:
        bench.commands.put(NewRequest(new("bad").header, [INFO.vocab_size]))
        opened, failed = bench.batch().batch.items
    assert isinstance(opened, OpenText)
    assert failed == Tokens("bad", finish_reason="error", error="prompt: has a token id outside the vocabulary")


def test_the_frontend_gets_figures_while_they_change_and_once_when_idle() -> None:
    with running() as bench:
        bench.commands.put(PeerUp("frontend", 0, 1))
        bench.next(ToFrontend)
        start_s = time.monotonic()
        bench.commands.put(new("a", tokens=30))
        last = bench.next(ToFrontend)
        while isinstance(last, ToFrontend) and last.stats.running:
            last = bench.next(ToFrontend)
        assert isinstance(last, ToFrontend)
        assert (last.generation, last.stats.ticks, last.stats.tokens) == (1, 30, 30)
        reports = [o for o in bench.seen if isinstance(o, ToFrontend)]
        assert sum(len(o.stats.tick_seconds) for o in reports) == 30
        assert len(reports) <= 2 + (time.monotonic() - start_s) / 0.2
        bench.commands.put(StatusQuery(1))
        bench.next(ToSupervisor)
        assert bench.sent.empty()


def test_a_status_query_is_answered_and_takes_no_tick_times_from_the_frontend() -> None:
    with running() as bench:
        bench.commands.put(new("a", tokens=4))
        for _ in range(4):
            bench.batch()
        bench.commands.put(StatusQuery(9))
        answer = bench.next(ToSupervisor)
        bench.commands.put(PeerUp("frontend", 0, 1))
        report = bench.next(ToFrontend)
    values = {"running": 0.0, "waiting": 0.0, "kv": {"free": 7.0, "used": 0.0}, "tokens": 4.0, "token_loops": 8.0}
    assert answer == ToSupervisor(StatusReply(9, values))
    assert isinstance(report, ToFrontend)
    assert len(report.stats.tick_seconds) == 4


def test_a_cache_reset_waits_for_the_end_of_the_tick() -> None:
    gate = threading.Semaphore(0)
    with running(gate) as bench:
        bench.commands.put(new("a", tokens=50))
        assert bench.engine.stepping.wait(WAIT_S)
        bench.commands.put(AbortAnswer(3, "for frontends"))
        bench.commands.put(ResetCache(4))
        gate.release()
        assert bench.next(ToSupervisor) == ToSupervisor(Done(4, 6))
        assert bench.engine.ticks == 1


def test_an_idle_engine_resets_its_cache_at_once_and_tells_the_frontend() -> None:
    with running() as bench:
        bench.commands.put(PeerUp("frontend", 0, 1))
        bench.next(ToFrontend)
        bench.commands.put(ResetCache(4))
        assert bench.next(ToSupervisor) == ToSupervisor(Done(4, 6))
        bench.next(ToFrontend)


def test_a_failing_tick_leaves_the_loop() -> None:
    class Broken(FakeEngine):
        def step(self) -> list[Tokens]:
            raise RuntimeError("NaN everywhere")

    commands: SimpleQueue[Command] = SimpleQueue()
    commands.put(new("a"))
    with pytest.raises(RuntimeError, match="NaN"):
        EngineCore(Broken(), ME, commands, lambda outgoing: None).run()


def test_the_wire_survives_garbage_and_carries_both_ways(short_dir: Path) -> None:
    commands: SimpleQueue[Command] = SimpleQueue()
    replies: SimpleQueue[StatusReply] = SimpleQueue()
    header = new("a").header
    stats = EngineStats(engine=0, running=0, waiting=0, kv_pages={}, ticks=0, tick_rows={})
    batch = TokenBatch(0, (CloseText("a"),))
    wire = EngineWire(str(short_dir), ME, commands, replies.put)
    with zmq.Context() as context, Outboxes(context, short_dir) as outboxes:
        garbage = [
            [b""],
            [b"\xc1\xff"],
            [encode(header)],
            [encode(header), b"odd"],
            [encode(AbortRequest(("a",))), b"extra"],
            [encode(Stop())],
        ]
        for frames in [*garbage, [encode(header), pack_ids([1, 2, 3])], [encode(AbortRequest(("a",)))]]:
            outboxes.send("engine", 0, 5, frames)
        assert commands.get(timeout=WAIT_S) == NewRequest(header, [1, 2, 3])
        assert commands.get(timeout=WAIT_S) == AbortRequest(("a",))
        with (
            bind_inbox(context, short_dir, Peer("detokenizer", 0, 2)) as detokenizer,
            bind_inbox(context, short_dir, Peer("frontend", 0, 1)) as frontend,
        ):
            wire.emit(Meet(Peer("detokenizer", 0, 2)))
            wire.emit(ToDetokenizer(2, batch))
            wire.emit(ToFrontend(1, stats))
            wire.emit(ToSupervisor(StatusReply(1, {})))
            assert detokenizer_inbox.decode(detokenizer.recv()) == batch
            assert frontend_inbox.decode(frontend.recv()) == stats
            assert replies.get(timeout=WAIT_S) == StatusReply(1, {})
            wire.emit(Forget(Peer("detokenizer", 0, 2)))
            wire.emit(ToDetokenizer(2, batch))
            wire.emit(ToFrontend(1, stats))
            frontend.recv()
            assert not detokenizer.poll(0)
    wire.close()
