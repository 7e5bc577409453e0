"""The layers' operations by kernels against those in torch, and whole models on them against the golden tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.places import Place
from rlt.kernels.linear import MOST_ROWS, linear_plan, split_workspace
from rlt.kernels.ops import TritonOps
from rlt.models.ops import TORCH, Placement
from support import Golden, prompt_states

EPS = 1e-5


@pytest.mark.parametrize("rows", [0, 1, 3, MOST_ROWS, MOST_ROWS + 1])
def test_linear(place: Place, rows: int) -> None:
    ops, x, weight = TritonOps(place.device), place.normal(rows, 96, seed=0), place.normal(40, 96, seed=1) / 8
    for _ in range(2):
        got = ops.linear(x, weight)
        assert got.dtype == place.dtype
        place.close(got, TORCH.linear(x, weight))


def test_norms_and_activation(place: Place) -> None:
    ops, rows, weight = TritonOps(place.device), place.normal(3, 100, seed=0), place.normal(100, seed=1)
    place.close(ops.rms_norm(rows, weight, EPS), TORCH.rms_norm(rows, weight, EPS))
    place.close(ops.silu_mul(rows), TORCH.silu_mul(rows))


@pytest.mark.parametrize("placement", ["plain", "branch", "sum"])
@pytest.mark.parametrize("closing", [False, True])
def test_add_norm(place: Place, placement: Placement, closing: bool) -> None:
    ops, residual, branch = TritonOps(place.device), place.normal(3, 100, seed=0), place.normal(3, 100, seed=1)
    first, second = (place.normal(100, seed=seed) / 4 for seed in (2, 3))
    before = residual.clone(), branch.clone()
    weights = (None if placement == "plain" else first, second if closing else None)
    for got, wanted in zip(
        ops.add_norm(residual, branch, placement, *weights, EPS),
        TORCH.add_norm(residual, branch, placement, *weights, EPS),
        strict=True,
    ):
        place.close(got, wanted)
    assert torch.equal(residual, before[0])
    assert torch.equal(branch, before[1])


def test_every_split_product_has_room() -> None:
    splits = set()
    for multiprocessors, outputs, inner in itertools.product((4, 108, 132), range(1, 20_000, 97), (64, 2048, 17_000)):
        workspace = split_workspace(multiprocessors, torch.device("meta"))
        for rows in (1, 2, MOST_ROWS):
            plan = linear_plan(rows, outputs, inner, multiprocessors)
            splits.add(plan.splits)
            if plan.splits > 1:
                assert workspace.sums.numel() >= plan.splits * plan.block_m * outputs
                assert workspace.arrivals.numel() >= -(-outputs // plan.block_n)
    assert splits == {1, 2, 4, 8, 16}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here; tests/gpu covers engines")
@pytest.mark.parametrize("name", ["ouro-tiny", "nanbeige-tiny", "huginn-tiny"])
def test_golden_logits(make_engine: Callable[..., Any], name: str) -> None:
    golden = Golden(name)
    engine = make_engine(model={"path": str(golden.directory)}, engine={"kernels": "triton"})
    model, logits = engine.runner.model, []
    assert isinstance(model._ops, TritonOps)
    take = model.head
    model.head = lambda hidden: logits.append(take(hidden)) or logits[-1].clone()
    states, _ = prompt_states(engine, golden.prompts["p7"])
    want = golden.tensors
    if name == "huginn-tiny":
        width = model.spec.hidden_size
        torch.testing.assert_close(states[:, :, :width], want["p7.zero.states"][:, -7:], atol=3e-4, rtol=0)
        torch.testing.assert_close(logits[-1][0], want["p7.zero.logits"][-1], atol=2e-3, rtol=0)
    else:
        torch.testing.assert_close(logits[-1][0], want["p7.loop_logits"][-1, -1], atol=5e-4, rtol=0)
        many = torch.stack([take(state) for state in states])
        torch.testing.assert_close(many, want["p7.loop_logits"], atol=5e-4, rtol=0)
