"""The gated activation of the MLPs."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Set `out` [rows, inner] to silu(gate) * up of `gate_up` [rows, 2 * inner], whose first half is the gate.

    silu in float32, rounded to the dtype before the product, as the unfused operations do.
    """
    rows, inner = out.shape
    assert gate_up.shape == (rows, 2 * inner)
    assert gate_up.stride(1) == out.stride(1) == 1
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(inner))
        grid = (rows, triton.cdiv(inner, block))
        _silu_mul[grid](gate_up, out, gate_up.stride(0), out.stride(0), inner, block, num_warps=4)


@triton.jit
def _silu_mul(gate_up, out, in_row, out_row, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    gate = tl.load(gate_up + row * in_row + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * in_row + INNER + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    result = opened.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * out_row + column, result.to(out.dtype.element_ty), mask=inside)
