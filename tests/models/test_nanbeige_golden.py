"""Parity with a float32 reference of Nanbeige4.2 at small size, and proof that the comparison can fail."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlt.models import layers
from rlt.models.families import FAMILIES
from rlt.models.ops import TORCH, TorchOps
from support import Golden, prompt_states, resolved, run_to_end

LIMIT = 5e-4
PROMPTS = ["p1", "p7", "p33", "p130"]

Make = Callable[..., Any]


@pytest.fixture
def make(make_engine: Make, nanbeige_golden: Golden) -> Make:
    """`make_engine` on the golden Nanbeige."""

    def build(**sections: dict[str, Any]) -> Any:
        model = {"path": str(nanbeige_golden.directory)} | sections.pop("model", {})
        return make_engine(model=model, **sections)

    return build


@pytest.fixture
def copy(nanbeige_golden: Golden, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the checkpoint with other values in its config.json."""

    def build(**values: Any) -> Path:
        config = json.loads((nanbeige_golden.directory / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | values))
        shutil.copy(nanbeige_golden.directory / "model.safetensors", tmp_path)
        return tmp_path

    return build


def tokens_of(engine: Any, golden: Golden, names: list[str]) -> dict[str, list[int]]:
    """Greedy tokens of golden prompts that run together."""
    for name in names:
        prompt = golden.prompts[name]
        engine.add(name, prompt, resolved(engine, prompt))
    done = run_to_end(engine)
    for name in names:
        assert done[name].finish == "length"
        assert set(done[name].depths) == {2}
    return {name: done[name].tokens for name in names}


def golden_tokens(golden: Golden, names: list[str]) -> dict[str, list[int]]:
    return {name: golden.facts["runs"]["full_depth"][name]["tokens"] for name in names}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_states_logits_and_planes(nanbeige_golden: Golden, make: Make, name: str) -> None:
    engine, want = make(), nanbeige_golden.tensors
    states, pages = prompt_states(engine, nanbeige_golden.prompts[name])
    torch.testing.assert_close(states, want[f"{name}.h"], atol=LIMIT, rtol=0)
    logits = torch.stack([engine.runner.model.head(state) for state in states])
    torch.testing.assert_close(logits, want[f"{name}.loop_logits"], atol=LIMIT, rtol=0)
    if f"{name}.k_planes" in want:
        count, pool = len(nanbeige_golden.prompts[name]), engine.runner.pool
        for loop in range(2):
            keys = pool.keys[:, pages[loop]].flatten(1, 2)[:, :count]
            values = pool.values[:, pages[loop]].flatten(1, 2)[:, :count]
            torch.testing.assert_close(keys, want[f"{name}.k_planes"][loop], atol=LIMIT, rtol=0)
            torch.testing.assert_close(values, want[f"{name}.v_planes"][loop], atol=LIMIT, rtol=0)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"engine": {"prefill_chunk": 5, "max_tick_tokens": 24}},
        {"engine": {"prefill_chunk": 1}},
        {"kv": {"layout": "last_exited_copy"}},
        {"kv": {"prefix_cache": False}},
        {"engine": {"async_scheduling": True, "prefill_chunk": 7, "max_tick_tokens": 32}},
        {"engine": {"async_scheduling": True, "mixed": False, "wavefront": False}},
        {"kv": {"pages": 56, "page_size": 8}, "engine": {"prefill_chunk": 16}},
        {"kv": {"pages": 56, "page_size": 8, "layout": "last_exited_copy"}, "engine": {"async_scheduling": True}},
    ],
    ids=["default", "chunks", "rows", "copies", "uncached", "async", "async-apart", "preempted", "preempted-async"],
)
def test_greedy_tokens(nanbeige_golden: Golden, make: Make, sections: dict[str, dict[str, Any]]) -> None:
    engine = make(**sections)
    assert tokens_of(engine, nanbeige_golden, PROMPTS) == golden_tokens(nanbeige_golden, PROMPTS)
    assert (engine.scheduler.preemptions > 0) == ("pages" in sections.get("kv", {}))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_cached_prompt_gives_the_same_tokens(nanbeige_golden: Golden, make: Make, asynchronous: bool) -> None:
    engine = make(engine={"async_scheduling": asynchronous})
    want = golden_tokens(nanbeige_golden, ["p33", "p130"])
    assert tokens_of(engine, nanbeige_golden, ["p33", "p130"]) == want
    before = engine.stats().tick_rows["prefill"]
    assert before == 2 * (33 + 130)
    assert tokens_of(engine, nanbeige_golden, ["p33", "p130"]) == want
    # Two loops over what is left of each prompt after its full pages of 16.
    assert engine.stats().tick_rows["prefill"] - before == 2 * (1 + 2)


@pytest.mark.parametrize("name", PROMPTS)
def test_bf16_is_close_where_the_gap_is_large(nanbeige_golden: Golden, make: Make, name: str) -> None:
    engine, prompt = make(model={"dtype": "bfloat16"}), nanbeige_golden.prompts[name]
    want = nanbeige_golden.facts["runs"]["full_depth"][name]
    for index, (token, gap) in enumerate(zip(want["tokens"], want["gap"], strict=True)):
        if gap > 4.0:
            context = prompt + want["tokens"][:index]
            engine.add("r", context, resolved(engine, context, max_tokens=1))
            assert run_to_end(engine)["r"].tokens == [token], (index, gap)


def test_a_checkpoint_in_shards(nanbeige_golden: Golden, make: Make, copy: Callable[..., Path]) -> None:
    directory = copy()
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in shards.items() for name in own}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    engine = make(model={"path": str(directory)})
    assert tokens_of(engine, nanbeige_golden, ["p7"]) == golden_tokens(nanbeige_golden, ["p7"])


# -- negative controls: deliberate mistakes, and the wrong results that they are known to give ------------------------


def check_control(engine: Any, golden: Golden, name: str, control: str, head: Make | None = None) -> None:
    """The logits at the end of the prompt are as wrong as the control says."""
    states, _ = prompt_states(engine, golden.prompts[name])
    logits = (head or engine.runner.model.head)(states[-1][-1:])[0]
    right = golden.tensors[f"{name}.loop_logits"][-1, -1]
    want = golden.facts["negative_controls"][name]["prefill_last_position"][control]
    assert logits.argmax() == want["argmax"]
    # The facts have four decimals.
    assert (logits - right).abs().max().item() == pytest.approx(want["max_abs_logit_diff"], abs=2 * LIMIT)
    assert (logits.argmax() != right.argmax()).item() == want["changes_argmax"]


@pytest.mark.parametrize("name", PROMPTS)
def test_control_no_norm_between_loops(
    nanbeige_golden: Golden, make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = make()
    closing, ends = engine.runner.model._norm, itertools.count()

    class Skipping(TorchOps):
        def add_norm(self, *operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
            *others, out_weight, eps = operands
            skip = out_weight is closing and next(ends) == 0
            return super().add_norm(*others, None if skip else out_weight, eps)

    monkeypatch.setattr(engine.runner.model, "_ops", Skipping())
    check_control(engine, nanbeige_golden, name, "no_norm_between_loops")


@pytest.mark.parametrize("name", PROMPTS)
def test_control_norm_twice_before_the_head(nanbeige_golden: Golden, make: Make, name: str) -> None:
    engine = make()
    model = engine.runner.model
    check_control(
        engine,
        nanbeige_golden,
        name,
        "norm_applied_twice_before_head",
        lambda rows: model.head(TORCH.rms_norm(rows, model._norm, model.spec.norm_eps)),
    )


@pytest.mark.parametrize("name", PROMPTS)
def test_control_adjacent_pairs_in_rope(
    nanbeige_golden: Golden, make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def adjacent(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = heads.shape[-1] // 2
        cos, sin = (table[..., :half] for table in (cos, sin))
        even, odd = heads[..., ::2], heads[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)

    monkeypatch.setattr(layers, "rotate_halves", adjacent)
    check_control(make(), nanbeige_golden, name, "adjacent_pair_rope")


@pytest.mark.parametrize("name", PROMPTS)
def test_control_interleaved_kv_heads(nanbeige_golden: Golden, make: Make, name: str) -> None:
    engine = make()
    attend, spec = engine.runner._attention.attend, engine.runner.model.spec
    # Query head h reads kv head h mod kv_heads, as if equal heads were not neighbours.
    order = torch.arange(spec.heads).view(-1, spec.kv_heads).T.flatten()

    def interleaved(layer: int, query: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return attend(layer, query[:, order], *rest)[:, order.argsort()]

    engine.runner._attention.attend = interleaved
    check_control(engine, nanbeige_golden, name, "interleaved_kv_heads")


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize(
    ("control", "values"), [("theta_1e4", {"rope_theta": 10000.0}), ("one_loop_only", {"num_loops": 1})]
)
def test_controls_of_the_config(
    nanbeige_golden: Golden, make: Make, copy: Callable[..., Path], name: str, control: str, values: dict[str, Any]
) -> None:
    check_control(make(model={"path": str(copy(**values))}), nanbeige_golden, name, control)


@pytest.mark.parametrize(
    ("layout", "control"),
    [("last_step", "kv_alias_one_slot_decode_only"), ("shared", "kv_alias_one_slot_token_by_token")],
)
def test_the_layouts_that_are_refused_are_the_known_aliasings(
    nanbeige_golden: Golden, make: Make, monkeypatch: pytest.MonkeyPatch, layout: str, control: str
) -> None:
    monkeypatch.setitem(FAMILIES, "nanbeige", replace(FAMILIES["nanbeige"], full_depth=None))
    tokens = tokens_of(make(kv={"layout": layout}), nanbeige_golden, PROMPTS)
    for name in PROMPTS:
        assert tokens[name] == nanbeige_golden.facts["negative_controls"][name]["greedy"][control]["tokens"]
        assert tokens[name] != golden_tokens(nanbeige_golden, PROMPTS)[name]


@pytest.mark.parametrize("name", PROMPTS)
def test_control_all_loops_read_the_first(nanbeige_golden: Golden, make: Make, name: str) -> None:
    engine = alias_first_loop(make())
    check_control(engine, nanbeige_golden, name, "kv_alias_first_loop")
    engine = alias_first_loop(make())
    want = nanbeige_golden.facts["negative_controls"][name]["greedy"]["kv_alias_first_loop"]
    assert tokens_of(engine, nanbeige_golden, [name])[name] == want["tokens"]


def alias_first_loop(engine: Any) -> Any:
    """Let both loops of a request that runs alone have the pages of the first, and only the first write."""
    runner, first = engine.runner, {}
    grant, core, attention, runs = runner.pages.grant, runner.model.core, runner._attention, itertools.count()

    def aliased(grants: list[Any]) -> None:
        grant([g._replace(page=first.setdefault((g.slot, g.place), g.page)) for g in grants])

    def reading(hidden: torch.Tensor, positions: torch.Tensor, attend: layers.Attend) -> torch.Tensor:
        again = next(runs) % 2

        def unwritten(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            if again:
                where = attention._batch.write
                key, value = runner.pool.flat_keys[layer][where], runner.pool.flat_values[layer][where]
            return attend(layer, query, key, value)

        return core(hidden, positions, unwritten)

    runner.pages.grant, runner.model.core = aliased, reading
    return engine
