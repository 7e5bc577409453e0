"""Parity with tensors computed by the published Ouro code, and proof that the comparison can fail."""

from __future__ import annotations

import pytest
import torch

from rlt.depth.ouro import ouro_exit
from support import Golden, prompt_states, resolved, run_to_end

LIMIT = 5e-4
PROMPTS = ["p1", "p7", "p33", "p130"]


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_states_gates_logits_and_planes(ouro_golden: Golden, make_engine, name):
    engine, want = make_engine(), ouro_golden.tensors
    states, pages = prompt_states(engine, ouro_golden.prompts[name])
    model = engine.runner.model
    torch.testing.assert_close(states, want[f"{name}.h"], atol=LIMIT, rtol=0)
    gates = torch.stack([model.gate(state) for state in states])
    torch.testing.assert_close(gates, want[f"{name}.gate_logit"], atol=LIMIT, rtol=0)
    logits = torch.stack([model.head(state) for state in states])
    torch.testing.assert_close(logits, want[f"{name}.loop_logits"], atol=LIMIT, rtol=0)
    if f"{name}.k_planes" in want:
        count, pool = len(ouro_golden.prompts[name]), engine.runner.pool
        for loop in range(4):
            keys = pool.keys[:, pages[loop]].flatten(1, 2)[:, :count]
            values = pool.values[:, pages[loop]].flatten(1, 2)[:, :count]
            torch.testing.assert_close(keys, want[f"{name}.k_planes"][loop], atol=LIMIT, rtol=0)
            torch.testing.assert_close(values, want[f"{name}.v_planes"][loop], atol=LIMIT, rtol=0)


@pytest.mark.parametrize("name", PROMPTS)
def test_cdf_is_the_published_one(ouro_golden: Golden, name):
    gates = ouro_golden.tensors[f"{name}.gate_logit"]
    survival = torch.ones(gates.shape[1])
    ones = torch.ones(gates.shape[1], dtype=torch.int64)
    for loop in range(3):
        survival, _ = ouro_exit(gates[loop], survival, ones * (loop + 1), survival * 0 + 2, ones)
        torch.testing.assert_close(1 - survival, ouro_golden.tensors[f"{name}.cdf"][loop], atol=5e-5, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk": 5, "max_tick_tokens": 24}, {"prefill_chunk": 1}])
def test_full_depth_tokens(ouro_golden: Golden, make_engine, settings):
    engine = make_engine(engine=settings)
    for name in PROMPTS:
        prompt = ouro_golden.prompts[name]
        engine.add(name, prompt, resolved(engine, prompt, exit_threshold=1.0))
    done = run_to_end(engine)
    for name in PROMPTS:
        assert done[name].tokens == ouro_golden.facts["runs"]["full_depth"][name]["tokens"]
        assert set(done[name].depths) == {4}
        assert done[name].finish == "length"


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"kv": {"layout": "last_exited_copy"}},
        {"engine": {"async_scheduling": True, "prefill_chunk": 7, "max_tick_tokens": 32}},
        {
            "engine": {"async_scheduling": True, "mixed": False, "wavefront": False},
            "kv": {"layout": "last_exited_copy"},
        },
        {"kv": {"pages": 110, "page_size": 8}, "engine": {"prefill_chunk": 16}},
        {"kv": {"pages": 110, "page_size": 8}, "engine": {"async_scheduling": True}},
    ],
    ids=["default", "copies", "async-chunks", "async-apart-copies", "preempted", "preempted-async"],
)
def test_exits_tokens_and_depths_all_thresholds_in_one_batch(ouro_golden: Golden, make_engine, sections):
    engine = make_engine(
        **({"engine": {}, "kv": {}} | sections | {"engine": {"max_seqs": 20} | sections.get("engine", {})})
    )
    runs = ouro_golden.facts["runs"]["last_exited"]
    for q in runs:
        for name in PROMPTS:
            prompt = ouro_golden.prompts[name]
            engine.add(f"{q}/{name}", prompt, resolved(engine, prompt, exit_threshold=float(q)))
    done = run_to_end(engine)
    for q, by_prompt in runs.items():
        for name, want in by_prompt.items():
            assert done[f"{q}/{name}"].tokens == want["tokens"], (q, name)
            assert done[f"{q}/{name}"].depths == want["exit_depth"], (q, name)
    assert (engine.scheduler.preemptions > 0) == ("pages" in sections.get("kv", {}))


def test_exited_loops_are_not_computed(ouro_golden: Golden, make_engine):
    engine = make_engine()
    prompt = ouro_golden.prompts["p7"]
    engine.add("r", prompt, resolved(engine, prompt, exit_threshold=0.5))
    depths = run_to_end(engine)["r"].depths
    # The last token needs no run of its own; every other decode token ran exactly its depth.
    assert engine.stats().tick_rows == {"prefill": 4 * 7, "decode": sum(depths[1:])}


@pytest.mark.parametrize("name", ["p7", "p33", "p130"])
def test_negative_control_one_aliased_plane_gives_the_known_wrong_tokens(ouro_golden: Golden, make_engine, name):
    engine = make_engine()
    grant = engine.runner.pages.grant
    first: dict[tuple[int, int], int] = {}

    def aliased(grants):
        grant([g._replace(page=first.setdefault((g.slot, g.place), g.page)) for g in grants])

    engine.runner.pages.grant = aliased
    prompt = ouro_golden.prompts[name]
    engine.add("r", prompt, resolved(engine, prompt, exit_threshold=1.0))
    tokens = run_to_end(engine)["r"].tokens
    wrong = ouro_golden.facts["negative_controls"][name]["greedy"]["kv_alias_one_slot_decode_only"]
    assert tokens == wrong["tokens"]
    assert tokens != ouro_golden.facts["runs"]["full_depth"][name]["tokens"]


def test_exit_rule_table(ouro_golden: Golden):
    for case in ouro_golden.facts["exit_rule_cases"]:
        gates, q = case["gate_logits"], case["q"]
        assert depth_of(gates, q) == case["depth"], case


def depth_of(gates, q, min_loops=1):
    survival = torch.ones(1)
    for loop, gate in enumerate(gates, 1):
        survival, stop = ouro_exit(
            torch.tensor([gate]), survival, torch.tensor([loop]), torch.tensor([q]), torch.tensor([min_loops])
        )
        if stop.item():
            return loop
    return len(gates)


def test_exit_limits():
    assert depth_of([20.0] * 4, 0.5, min_loops=3) == 3
    assert depth_of([20.0] * 4, 1.0) == 4


@pytest.mark.parametrize("name", PROMPTS)
def test_bf16_is_close_where_the_gap_is_large(ouro_golden: Golden, make_engine, name):
    engine = make_engine(model={"dtype": "bfloat16"})
    prompt = ouro_golden.prompts[name]
    want = ouro_golden.facts["runs"]["full_depth"][name]
    for index, (token, gap) in enumerate(zip(want["tokens"], want["gap"], strict=True)):
        if gap > 4.0:
            context = prompt + want["tokens"][:index]
            engine.add("r", context, resolved(engine, context, max_tokens=1))
            assert run_to_end(engine)["r"].tokens == [token], (index, gap)
