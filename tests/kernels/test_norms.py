"""Norms and residual sums against the unfused operations of the models, rounding for rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.places import Place
from rlt.kernels.norms import Placement, add_rms_norm, rms_norm
from rlt.models import layers

EPS = 1e-5


def rows_of(place: Place, width: int, seed: int) -> Tensor:
    rows = place.spread(3, width)
    rows.copy_(place.normal(3, width, seed=seed) * torch.tensor([[1e-3], [1.0], [50.0]], device=place.device))
    return rows


def close(place: Place, got: Tensor, wanted: Tensor) -> None:
    """Equal but for the rounding of a root and a mean: at most a step of the dtype, in few places."""
    torch.testing.assert_close(got, wanted, rtol=2 * torch.finfo(place.dtype).eps, atol=1e-6)
    if place.dtype != torch.float32:
        assert (got != wanted).float().mean() < 0.02


@pytest.mark.parametrize("width", [16, 100])
def test_rms_norm(place: Place, width: int) -> None:
    x, weight, out = rows_of(place, width, 0), place.normal(width, seed=1), place.spread(3, width)
    rms_norm(x, weight, out, eps=EPS)
    wanted = layers.rms_norm(x, weight, EPS)
    close(place, out, wanted)
    rms_norm(x, weight, x, eps=EPS)
    close(place, x, wanted)


@pytest.mark.parametrize("placement", ["plain", "branch", "sum"])
@pytest.mark.parametrize("width", [16, 100, 2048])
def test_add_rms_norm(place: Place, placement: Placement, width: int) -> None:
    residual, branch = rows_of(place, width, 0), rows_of(place, width, 1)
    first, second = place.normal(width, seed=2), place.normal(width, seed=3)
    if placement == "plain":
        new = residual + branch
    elif placement == "branch":
        new = residual + layers.rms_norm(branch, first, EPS)
    else:
        new = layers.rms_norm(residual + branch, first, EPS)
    out = place.spread(3, width)
    weight = None if placement == "plain" else first
    only = residual.clone()
    add_rms_norm(residual, branch, out, placement=placement, branch_weight=weight, out_weight=second, eps=EPS)
    close(place, residual, new)
    close(place, out, layers.rms_norm(residual, second, EPS))
    add_rms_norm(only, branch, None, placement=placement, branch_weight=weight, out_weight=None, eps=EPS)
    assert torch.equal(only, residual)


def test_no_rows(place: Place) -> None:
    none = torch.empty(0, 16, device=place.device, dtype=place.dtype)
    rms_norm(none, none.new_ones(16), none, eps=EPS)
    add_rms_norm(none, none, None, placement="plain", branch_weight=None, out_weight=None, eps=EPS)
