"""Deliberate mistakes in the engine: each must be seen by the comparison that the other tests rely on."""

from __future__ import annotations

import pytest

from rlt.kv.prefix import PrefixCache
from rlt.sched.plan import DecodeRows
from rlt.sched.scheduler import Scheduler
from support import Golden, resolved, run_to_end

Q = "0.7"


def right(engine, golden: Golden, names=("p7", "p33", "p130")) -> bool:
    """Whether all golden prompts, run together, give the golden tokens and depths."""
    runs = golden.facts["runs"]["last_exited"][Q]
    for name in names:
        prompt = golden.prompts[name]
        engine.add(name, prompt, resolved(engine, prompt, exit_threshold=float(Q)))
    done = run_to_end(engine)
    return all((done[n].tokens, done[n].depths) == (runs[n]["tokens"], runs[n]["exit_depth"]) for n in names)


def test_without_a_mistake_the_comparison_passes(ouro_golden, make_engine):
    assert right(make_engine(), ouro_golden)


def test_reading_one_plane_too_low_is_seen(ouro_golden, make_engine):
    engine = make_engine()
    planes = engine.runner._planes
    reads = planes.reads

    def lower(slots, loops):
        return reads(slots, loops)._replace(tables=reads(slots, (loops - 1).clamp(min=0)).tables)

    planes.reads = lower
    assert not right(engine, ouro_golden)


def test_a_stale_page_in_the_table_is_seen(ouro_golden, make_engine):
    engine = make_engine()
    grant = engine.runner.pages.grant
    # The third page of a list is never entered: what stood there before stays.
    engine.runner.pages.grant = lambda grants: grant([g for g in grants if g.place != 2])
    assert not right(engine, ouro_golden)


def test_an_exited_token_left_in_its_place_is_seen(ouro_golden, make_engine):
    engine = make_engine()
    engine.runner.pool.copy = lambda source, target: None
    assert not right(engine, ouro_golden)


def test_a_dropped_reference_to_a_cached_block_is_seen(ouro_golden, make_engine, monkeypatch):
    monkeypatch.setattr(PrefixCache, "acquire", lambda self, blocks: None)
    engine = make_engine()
    assert right(engine, ouro_golden, names=["p33"])
    with pytest.raises(AssertionError, match="read"):
        right(engine, ouro_golden, names=["p33"])


def test_a_page_given_back_while_it_is_in_use_is_seen(ouro_golden, make_engine):
    engine = make_engine(engine={"prefill_chunk": 8})
    prompt = ouro_golden.prompts["p33"]
    engine.add("r", prompt, resolved(engine, prompt))
    engine.step()
    engine.scheduler.supply.pool.release(engine.scheduler.requests["r"].lists[0][:1])
    with pytest.raises(AssertionError, match="not all pages once"):
        engine.scheduler.check_integrity()


def answer_after_an_abort(engine, golden: Golden) -> list[int]:
    """Tokens of a request that got the slot of one that was aborted with a tick under way."""
    old, new = golden.prompts["p7"], golden.prompts["p33"]
    # With one loop, every tick gives a token: also the one under way.
    engine.add("old", old, resolved(engine, old, max_loops=1))
    for _ in range(5):
        engine.step()
    engine.abort("old")
    engine.add("new", new, resolved(engine, new, exit_threshold=float(Q)))
    return run_to_end(engine)["new"].tokens


def test_a_result_credited_to_the_slots_new_owner_is_seen(ouro_golden, make_engine, monkeypatch):
    want = ouro_golden.facts["runs"]["last_exited"][Q]["p33"]["tokens"]
    settings = {"max_seqs": 1, "async_scheduling": True}
    assert answer_after_an_abort(make_engine(engine=settings), ouro_golden) == want
    apply = Scheduler.apply

    def by_slot(self, plan, results):
        owners = {request.slot: request for request in self.places.running}
        decode = plan.decode
        plan.decode = DecodeRows(
            tuple(owners.get(slot, request) for slot, request in zip(decode.slots, decode.requests, strict=True)),
            decode.slots,
        )
        return apply(self, plan, results)

    monkeypatch.setattr(Scheduler, "apply", by_slot)
    assert answer_after_an_abort(make_engine(engine=settings), ouro_golden) != want
