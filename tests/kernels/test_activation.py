"""The gated activation against the unfused operations."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from kernels.places import Place
from rlt.kernels.activation import silu_mul


@pytest.mark.parametrize(("rows", "inner"), [(0, 8), (1, 8), (3, 100), (2, 2050)])
def test_silu_mul(place: Place, rows: int, inner: int) -> None:
    gate_up, out = place.spread(rows, 2 * inner), place.spread(rows, inner)
    gate_up.copy_(place.normal(rows, 2 * inner, seed=0) * 4)
    silu_mul(gate_up, out)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(out, silu(gate) * up, rtol=2 * torch.finfo(place.dtype).eps, atol=1e-7)


# On the CPU an overflow to infinity, which is meant, is a warning.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_gates(place: Place) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=place.device, dtype=place.dtype)
    out = place.spread(1, 2)
    silu_mul(gate_up, out)
    assert out.tolist() == [[0.0, 200.0]]
