"""RMS norms, alone and together with the residual sums before and after them.

y = cast(x * rsqrt(mean(x²) + eps)) * weight, the inside in float32, the product with the weight in the rows' dtype:
the roundings are those of the unfused operations, unless the compiler leaves some out. One program per row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlt.models.ops import Placement

_PLACEMENTS: dict[Placement, int] = {"plain": 0, "branch": 1, "sum": 2}


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
    """Set `out` [rows, width] to the norm of `x` (same shape, may be the same tensor)."""
    assert x.stride(1) == out.stride(1) == weight.stride(0) == 1
    if len(x):
        block = triton.next_power_of_2(x.shape[1])
        _norm[(len(x),)](x, weight, out, eps, x.stride(0), out.stride(0), x.shape[1], block, num_warps=_warps(block))


def add_rms_norm(
    residual: Tensor,
    branch: Tensor,
    new: Tensor,
    out: Tensor | None,
    *,
    placement: Placement,
    branch_weight: Tensor | None,
    out_weight: Tensor | None,
    eps: float,
) -> None:
    """Set `new` to `residual` plus `branch`, then `out` to the norm of `new`; all [rows, width].

    `new` may be `residual`, and `out` may be `branch`. `branch_weight` [width] is that of the norm inside of placements
    "branch" and "sum"; "plain" has none. Without `out` and `out_weight` only `new` is set.
    """
    assert (placement == "plain") == (branch_weight is None)
    assert (out is None) == (out_weight is None)
    assert residual.stride(1) == branch.stride(1) == new.stride(1) == 1
    assert out is None or out.stride(1) == 1
    if len(residual) == 0:
        return
    width = residual.shape[1]
    block = triton.next_power_of_2(width)
    # An absent tensor's place is taken by one that is not used.
    _add_norm[(len(residual),)](
        residual,
        branch,
        new,
        new if out is None else out,
        branch if branch_weight is None else branch_weight,
        branch if out_weight is None else out_weight,
        eps,
        residual.stride(0),
        branch.stride(0),
        new.stride(0),
        new.stride(0) if out is None else out.stride(0),
        width,
        block,
        _PLACEMENTS[placement],
        out is not None,
        num_warps=_warps(block),
    )


def _warps(block: int) -> int:
    """Eight elements, 16 bytes of bfloat16, per thread and access."""
    return min(max(block // 256, 1), 16)


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """The norm of float32 `x`, rounded to `dtype` twice as in the unfused operations, as float32."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    return ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def _norm(x, weight, out, eps, x_row, out_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    result = _normed(values, scale, eps, WIDTH, dtype)
    tl.store(out + row * out_row + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm(
    residual,
    branch,
    target,
    out,
    branch_weight,
    out_weight,
    eps,
    residual_row,
    branch_row,
    target_row,
    out_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACEMENT: tl.constexpr,
    WITH_OUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    dtype: tl.constexpr = residual.dtype.element_ty
    # All loads first: one wait for memory instead of two.
    old = tl.load(residual + row * residual_row + column, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(branch + row * branch_row + column, mask=inside, other=0.0).to(tl.float32)
    if PLACEMENT != 0:
        inner = tl.load(branch_weight + column, mask=inside, other=0.0).to(tl.float32)
    if WITH_OUT:
        outer = tl.load(out_weight + column, mask=inside, other=0.0).to(tl.float32)
    if PLACEMENT == 1:
        added = _normed(added, inner, eps, WIDTH, dtype)
    new = (old + added).to(dtype).to(tl.float32)
    if PLACEMENT == 2:
        new = _normed(new, inner, eps, WIDTH, dtype)
    tl.store(target + row * target_row + column, new.to(dtype), mask=inside)
    if WITH_OUT:
        result = _normed(new, outer, eps, WIDTH, dtype)
        tl.store(out + row * out_row + column, result.to(out.dtype.element_ty), mask=inside)
