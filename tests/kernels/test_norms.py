"""Norms and residual sums against their formulas in float64.

With y(x, w) = x / sqrt(mean(x²) + eps) * w, an update of the residual is
plain: r + b; branch: r + y(b, w); sum: y(r + b, w); and what the next layer gets is y(updated residual, w').
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.places import Place
from rlt.kernels.norms import Placement, add_rms_norm, rms_norm

EPS = 1e-5


def rows_of(place: Place, width: int, seed: int) -> Tensor:
    rows = place.spread(3, width)
    rows.copy_(place.normal(3, width, seed=seed) * torch.tensor([[1e-3], [1.0], [50.0]], device=place.device))
    return rows


def norm(rows: Tensor, weight: Tensor) -> Tensor:
    wide = rows.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def close(place: Place, got: Tensor, wanted: Tensor, *operands: Tensor) -> None:
    """Within two steps of the dtype at the size of the largest of the result and the `operands` of its last sum.

    Up to four roundings to the dtype, of half a step each, lie behind a result: of x / rms, of its product with the
    weight and of both sums. A compiler may leave out some of them. In float32 the mean and the root round as well.
    """
    steps = 4 if place.dtype == torch.float32 else 2
    size = torch.stack([wanted.abs(), *(operand.double().abs() for operand in operands)]).amax(0)
    # Below the normal numbers of float16 its steps do not shrink any more.
    limit = steps * torch.finfo(place.dtype).eps * size + 2e-7
    excess = ((got.double() - wanted).abs() - limit).max()
    assert excess <= 0, f"{excess.item():.3g} more than rounding"


@pytest.mark.parametrize("width", [16, 100])
def test_rms_norm(place: Place, width: int) -> None:
    x, weight, out = rows_of(place, width, 0), place.normal(width, seed=1), place.spread(3, width)
    rms_norm(x, weight, out, eps=EPS)
    wanted = norm(x, weight)
    close(place, out, wanted)
    rms_norm(x, weight, x, eps=EPS)
    close(place, x, wanted)


@pytest.mark.parametrize("placement", ["plain", "branch", "sum"])
@pytest.mark.parametrize("width", [16, 100, 2048])
@pytest.mark.parametrize("in_place", [False, True])
def test_add_rms_norm(place: Place, placement: Placement, width: int, in_place: bool) -> None:
    residual, branch = rows_of(place, width, 0), rows_of(place, width, 1)
    first, second = place.normal(width, seed=2), place.normal(width, seed=3)
    wide = residual.double(), branch.double()
    added = norm(branch, first) if placement == "branch" else wide[1]
    operands = () if placement == "sum" else (wide[0], added)
    wanted = norm(wide[0] + added, first) if placement == "sum" else wide[0] + added
    weight = None if placement == "plain" else first
    for with_out in (False, True):
        old = rows_of(place, width, 0)
        new = old if in_place else place.spread(3, width)
        out = place.spread(3, width) if with_out else None
        add_rms_norm(
            old,
            branch,
            new,
            out,
            placement=placement,
            branch_weight=weight,
            out_weight=second if with_out else None,
            eps=EPS,
        )
        close(place, new, wanted, *operands)
        if out is not None:
            close(place, out, norm(new, second))
        assert in_place or torch.equal(old, residual)


def test_no_rows(place: Place) -> None:
    none = torch.empty(0, 16, device=place.device, dtype=place.dtype)
    rms_norm(none, none.new_ones(16), none, eps=EPS)
    add_rms_norm(none, none, none, None, placement="plain", branch_weight=None, out_weight=None, eps=EPS)
