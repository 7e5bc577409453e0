"""Parity of the engine with what Huginn's published code computed, and proof that the comparison can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlt.exec.batches import OuterAttention
from support import Golden, resolved, run_to_end

STATES, LOGITS = 3e-4, 2e-3
PROMPTS = ["p1", "p7", "p33", "p130"]
RULES = {
    "latent-diff": "latent_diff",
    "cosine": "cosine",
    "entropy-diff": "entropy",
    "kl": "kl",
    "minp-kl": "minp_kl",
    "argmax-stability": "argmax",
}


class Case(NamedTuple):
    golden: Golden
    #: build an engine on the golden model
    make: Callable[..., Any]

    def answers(self, engine: Any, names: list[str] = PROMPTS, **params: Any) -> dict[str, Any]:
        """Tokens and depths of prompts that run together."""
        for name in names:
            engine.add(name, self.golden.prompts[name], resolved(engine, self.golden.prompts[name], **params))
        return run_to_end(engine)


@pytest.fixture(params=["huginn-tiny", "huginn-tiny-core4"])
def case(request: pytest.FixtureRequest, make_engine: Callable[..., Any]) -> Case:
    golden = Golden(request.param)

    def make(**sections: dict[str, Any]) -> Any:
        sections["model"] = {"path": str(golden.directory)} | sections.get("model", {})
        sections["kv"] = {"pages": 2000} | sections.get("kv", {})
        return make_engine(**sections)

    return Case(golden, make)


def start_from(engine: Any, golden: Golden, kind: str) -> None:
    """Make tokens start from the golden file's states by position, which no seed gives."""
    if kind == "table":
        table = golden.tensors["init_states"]
        engine.runner.model.initial_state = lambda kind, seeds, positions: table[positions]


@pytest.mark.parametrize("kind", ["zero", "table"])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_states_and_logits(case: Case, name: str, kind: str) -> None:
    """Prelude outputs, states after each loop and logits of the last position, of a prompt in one chunk."""
    engine, want, prompt = case.make(), case.golden.tensors, case.golden.prompts[name]
    start_from(engine, case.golden, kind)
    model, head = engine.runner.model, []
    take = model.head
    model.head = lambda hidden: head.append(take(hidden)) or head[-1].clone()
    engine.add("r", prompt, resolved(engine, prompt, max_tokens=1))
    for states in want[f"{name}.{kind}.states"]:
        plan = engine.scheduler.plan()
        results = engine.runner.submit(plan).read()
        rows = engine.runner.hidden[plan.prompts[0].rows]
        torch.testing.assert_close(rows[:, states.shape[1] :], want[f"{name}.prelude"], atol=STATES, rtol=0)
        torch.testing.assert_close(rows[-len(states) :, : states.shape[1]], states, atol=STATES, rtol=0)
        engine.scheduler.apply(plan, results)
    torch.testing.assert_close(head[-1][0], want[f"{name}.{kind}.logits"][-1], atol=LOGITS, rtol=0)


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "copies": {"kv": {"layout": "last_exited_copy"}},
    "async chunks": {"engine": {"async_scheduling": True, "prefill_chunk": 7, "max_tick_tokens": 32}},
    "apart": {"engine": {"mixed": False, "wavefront": False, "prefill_chunk": 16}},
    "preempted": {"kv": {"pages": 100, "page_size": 8}, "engine": {"prefill_chunk": 16, "async_scheduling": True}},
}


@pytest.mark.parametrize(("kind", "setting"), [*(("zero", setting) for setting in SETTINGS), ("table", "preempted")])
def test_greedy_tokens(case: Case, kind: str, setting: str) -> None:
    sections = SETTINGS[setting]
    engine = case.make(**sections)
    start_from(engine, case.golden, kind)
    names = PROMPTS[:3] if setting == "preempted" else PROMPTS
    done = case.answers(engine, names)
    for name in names:
        assert done[name].tokens == case.golden.facts["runs"][f"greedy_{kind}_state"][name]["tokens"]
        assert set(done[name].depths) == {engine.info.loops}
    assert (engine.scheduler.preemptions > 0) == (setting == "preempted")


@pytest.mark.parametrize("criterion", RULES)
def test_tokens_and_depths_with_exits(case: Case, criterion: str) -> None:
    runs = case.golden.facts["runs"]["adaptive_last_exited"][criterion]
    settings = {"async_scheduling": True, "prefill_chunk": 7, "max_tick_tokens": 32}
    engine = case.make(engine=settings, exit={"rule": RULES[criterion], "threshold": runs["p7"]["threshold"]})
    done = case.answers(engine)
    for name in PROMPTS:
        assert done[name].tokens == runs[name]["tokens"]
        assert done[name].depths == runs[name]["loops_executed"]


def test_one_overwritten_plane_is_the_published_compression(case: Case) -> None:
    done = case.answers(case.make(kv={"layout": "cyclic:1"}))
    for name in PROMPTS:
        wrong = case.golden.facts["negative_controls"][name]["greedy"]["kv_alias_one_slot_decode_only"]
        assert done[name].tokens == wrong["tokens"]


def test_only_looks_cost_coda_and_head(case: Case) -> None:
    """A criterion on logits runs them once per look and once per token that reaches its limit, and no others do."""
    for rule, threshold in (("latent_diff", 0.1), ("kl", 0.09)):
        engine = case.make(exit={"rule": rule, "threshold": threshold, "min_loops": 3})
        model, rows = engine.runner.model, []
        take = model.head
        model.head = lambda hidden, take=take, rows=rows: rows.append(len(hidden)) or take(hidden)
        depths = case.answers(engine, ["p7"])["p7"].depths
        assert min(depths) < max(depths)
        assert sum(rows) == (1 + sum(depth - 2 for depth in depths[1:]) if rule == "kl" else len(depths))


@pytest.mark.parametrize("mistake", ["coda not stored", "prelude not stored", "coda of prompts skipped"])
def test_a_mistake_in_the_outer_layers_is_seen(case: Case, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = case.make()
    spec, pool = engine.runner.model.spec, engine.runner.pool
    pool.keys.zero_()
    pool.values.zero_()
    right = OuterAttention.__call__

    def forgets(self: OuterAttention, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = right(self, layer, query, key, value)
        in_coda = layer >= spec.prelude_layers
        prompt = bool(self._rows[1])
        if {
            "coda not stored": in_coda,
            "prelude not stored": not in_coda,
            "coda of prompts skipped": in_coda and prompt,
        }[mistake]:
            pool.flat_keys[layer % spec.layers, self._backend._batch.write] = 0
            pool.flat_values[layer % spec.layers, self._backend._batch.write] = 0
        return out

    monkeypatch.setattr(OuterAttention, "__call__", forgets)
    tokens = case.answers(engine, ["p33"])["p33"].tokens
    assert tokens != case.golden.facts["runs"]["greedy_zero_state"]["p33"]["tokens"]


def test_bf16_is_close_where_the_gap_is_large(case: Case) -> None:
    engine, checked = case.make(model={"dtype": "bfloat16"}), 0
    assert engine.runner.pool.keys.dtype == torch.bfloat16
    want, prompt = case.golden.facts["runs"]["greedy_zero_state"]["p7"], case.golden.prompts["p7"]
    for index, (token, gap) in enumerate(zip(want["tokens"], want["gap"], strict=True)):
        if gap > 4.0:
            context = prompt + want["tokens"][:index]
            engine.add("r", context, resolved(engine, context, max_tokens=1))
            assert run_to_end(engine)["r"].tokens == [token], (index, gap)
            checked += 1
    assert checked > 3


def test_no_page_is_wasted_on_layers_that_do_not_loop(case: Case) -> None:
    engine = case.make(kv={"prefix_cache": False, "layout": "last_exited_copy"})
    spec, prompt = engine.runner.model.spec, case.golden.prompts["p33"]
    assert engine.runner.pool.keys.shape[0] == spec.layers
    engine.add("r", prompt, resolved(engine, prompt, max_tokens=2))
    engine.step()
    used, pages = engine.scheduler.supply.pool.used, -(-33 // 16)
    # prelude and coda in as few lists as hold their layers, beside one list per loop
    assert used == pages * (spec.loops + -(-(spec.prelude_layers + spec.coda_layers) // spec.layers))
