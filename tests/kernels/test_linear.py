"""Skinny products against float64: every number of rows, splits, counts and indices on the device."""

from __future__ import annotations

import pytest
import torch

from kernels.places import Place
from rlt.kernels.linear import LinearPlan, linear_plan, linear_workspace, skinny_linear


def check(
    place: Place,
    rows: int,
    outputs: int,
    inner: int,
    *,
    plan: LinearPlan | None = None,
    count: int | None = None,
    index: list[int] | None = None,
) -> None:
    """The result of the first `count` rows, and that the others stay as they are."""
    plan = plan or linear_plan(rows, outputs, inner, 132)
    held = rows if index is None else max(index) + 1
    x, weight, out = place.spread(held, inner), place.spread(outputs, inner), place.spread(rows, outputs, fill=7.0)
    x.copy_(place.normal(held, inner, seed=rows))
    weight.copy_(place.normal(outputs, inner, seed=1) / inner**0.5)
    workspace = linear_workspace(rows=rows, outputs=outputs, device=place.device)
    workspace.sums.fill_(torch.nan)
    live = rows if count is None else count
    source = x if index is None else x[index]
    wanted = torch.full((rows, outputs), 7.0, dtype=torch.float64)
    wanted[:live] = (source.double() @ weight.double().T)[:live].cpu()
    on_device = None if count is None else torch.tensor([count], dtype=torch.int32, device=place.device)
    where = None if index is None else torch.tensor(index, device=place.device)
    for _ in range(2):  # the second run finds the workspace as the first one left it
        out.fill_(7.0)
        skinny_linear(x, weight, out, workspace, plan=plan, count=on_device, index=where)
        place.close(out, wanted)


@pytest.mark.parametrize("rows", [1, 2, 9, 16])
def test_rows(place: Place, rows: int) -> None:
    check(place, rows, 40, 96)


@pytest.mark.parametrize(("outputs", "inner"), [(33, 100), (4, 33), (70, 256)])
@pytest.mark.parametrize("rows", [1, 3])
def test_odd_shapes(place: Place, rows: int, outputs: int, inner: int) -> None:
    check(place, rows, outputs, inner, plan=LinearPlan(1, 4, 64, 1, 4, 2) if rows == 1 else None)


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_splits(place: Place, splits: int) -> None:
    check(place, 5, 48, 200, plan=LinearPlan(16, 32, 32, splits, 4, 3))
    check(place, 20, 48, 200, plan=LinearPlan(16, 32, 32, splits, 4, 3), count=7)


@pytest.mark.parametrize("count", [0, 1])
def test_one_row_with_a_count(place: Place, count: int) -> None:
    check(place, 1, 24, 64, count=count)
    check(place, 1, 24, 64, count=count, index=[5])


@pytest.mark.parametrize("count", [0, 1, 64, 65, 70])
def test_compacted_rows(place: Place, count: int) -> None:
    check(place, 70, 40, 64, count=count, index=[*range(90, 20, -1)])


def test_no_rows(place: Place) -> None:
    none = torch.empty(0, 16, device=place.device, dtype=place.dtype)
    skinny_linear(
        none,
        none,
        none[:, :0],
        linear_workspace(rows=1, outputs=16, device=place.device),
        plan=linear_plan(1, 1, 16, 1),
    )


def test_float32_results_are_not_rounded_to_the_rows_dtype(place: Place) -> None:
    x = torch.tensor([[1.0, 2.0**-12] + [0.0] * 14], device=place.device, dtype=place.dtype)
    ones = torch.ones(1, 16, device=place.device, dtype=place.dtype)
    out = torch.empty(1, 1, device=place.device)
    skinny_linear(
        x, ones, out, linear_workspace(rows=1, outputs=16, device=place.device), plan=linear_plan(1, 1, 16, 1)
    )
    assert out.item() == 1.0 + 2.0**-12


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inner"), [(6144, 2048), (2048, 5632), (5280, 17920), (9000, 5280)])
@pytest.mark.parametrize("rows", [1, 2, 16, 128])
def test_real_sizes(place: Place, rows: int, outputs: int, inner: int) -> None:
    if place.interpreted:
        pytest.skip("too large for the interpreter")
    check(place, rows, outputs, inner)
    check(place, rows, outputs, inner, count=rows // 2, index=[*range(rows)])


def test_plans_fill_the_device() -> None:
    """Few outputs are cut along the reduction, many are not."""
    assert linear_plan(8, 2048, 5632, 132).splits == 8
    assert linear_plan(8, 49152, 2048, 132).splits == 1
    assert linear_plan(8, 64, 128, 132).splits == 1
    assert linear_plan(1, 2048, 2048, 132).block_m == 1
    assert linear_plan(128, 49152, 2048, 132).block_m == 64
