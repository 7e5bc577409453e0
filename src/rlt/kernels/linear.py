"""Matrix products of few rows with a large weight: limited by reading the weight once, as fast as memory gives it.

The reduction over K may be cut into splits, so that small outputs occupy the whole device too; the split that ends
last adds them up, in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: most rows of the skinny product; beyond, a library's tiled product is no slower
MOST_ROWS = 16
#: programs per multiprocessor that keep enough bytes on their way
_FILL = 2
_MOST_SPLITS = 16


class LinearPlan(NamedTuple):
    """Tile sizes of a product: rows, outputs and reduction per program and step. `block_m` 1: without tensor cores."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int


class LinearWorkspace(NamedTuple):
    """Partial results, float32 and flat, and how many splits of each tile have arrived (zero between calls)."""

    sums: Tensor
    arrivals: Tensor


def linear_workspace(*, rows: int, outputs: int, device: torch.device) -> LinearWorkspace:
    """A workspace for split products of at most `rows` rows with weights of at most `outputs` rows."""
    padded = -(-rows // MOST_ROWS) * MOST_ROWS
    return LinearWorkspace(
        torch.empty(_MOST_SPLITS * padded * outputs, dtype=torch.float32, device=device),
        torch.zeros(padded * outputs // MOST_ROWS, dtype=torch.int32, device=device),
    )


def split_workspace(multiprocessors: int, device: torch.device) -> LinearWorkspace:
    """A workspace for every product of at most `MOST_ROWS` rows as `linear_plan` plans it.

    It splits small outputs only: splits * tiles of 32 outputs stay below 2 * _FILL * multiprocessors.
    """
    outputs = 2 * _FILL * multiprocessors * 32 // _MOST_SPLITS
    return linear_workspace(rows=MOST_ROWS, outputs=outputs, device=device)


def linear_plan(rows: int, outputs: int, inner: int, multiprocessors: int) -> LinearPlan:
    """Tiles for `rows` rows (with a count on the device: the most there may be)."""
    if rows == 1:
        return LinearPlan(1, 4, min(1024, triton.next_power_of_2(inner)), 1, 4, 4)
    block_k = min(128, max(16, triton.next_power_of_2(inner)))
    if rows > MOST_ROWS:
        return LinearPlan(64, 64, min(64, block_k), 1, 4, 4)
    tiles = -(-outputs // 32)
    splits = 1
    while splits < _MOST_SPLITS and tiles * splits < _FILL * multiprocessors and inner >= 4 * block_k * splits:
        splits *= 2
    return LinearPlan(16, 32, block_k, splits, 4, 5)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    workspace: LinearWorkspace,
    *,
    plan: LinearPlan,
    count: Tensor | None = None,
    index: Tensor | None = None,
) -> None:
    """Set `out` [rows, N] to `x` [rows, K] times the transposed `weight` [N, K], added up in float32.

    With `index` [rows] (int32 or int64), row i of `out` is that of row `index[i]` of `x`, which may have any number of
    rows. With `count` [1] (integer, on the device), only the first `count` rows are computed and the others of `out`
    are left as they are; with a count of 0 all programs end at once. `out` may have another dtype than `x`: the sum is
    rounded once.
    """
    inner, outputs = x.shape[1], weight.shape[0]
    rows = out.shape[0]
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    assert weight.shape[1] == inner
    assert out.shape[1] == outputs
    assert index is not None or rows <= x.shape[0]
    if rows == 0:
        return
    shared = {
        "K": inner,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "STAGES": plan.stages,
        "COUNTED": count is not None,
        "INDEXED": index is not None,
        "num_warps": plan.warps,
    }
    # An absent tensor's place is taken by one that is not read.
    pointers = (x, weight, out, x if index is None else index, x if count is None else count)
    strides = (x.stride(0), weight.stride(0), out.stride(0))
    if plan.block_m == 1:
        assert rows == 1
        assert plan.splits == 1
        _one_row[(triton.cdiv(outputs, plan.block_n),)](*pointers, outputs, *strides, **shared)
        return
    grid = (triton.cdiv(rows, plan.block_m), triton.cdiv(outputs, plan.block_n), plan.splits)
    if plan.splits > 1:
        assert workspace.arrivals.numel() >= grid[0] * grid[1]
        assert workspace.sums.numel() >= plan.splits * grid[0] * plan.block_m * outputs
    _tiles[grid](*pointers, *workspace, rows, outputs, *strides, **shared, BLOCK_M=plan.block_m, SPLITS=plan.splits)


@triton.jit
def _one_row(
    x,
    weight,
    out,
    index,
    count,
    N,
    x_row,
    weight_row,
    out_row,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    COUNTED: tl.constexpr,
    INDEXED: tl.constexpr,
):
    if COUNTED and tl.load(count) <= 0:
        return
    if INDEXED:
        x += tl.load(index).to(tl.int64) * x_row
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight += n.to(tl.int64)[:, None] * weight_row
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        row = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        mask = (n < N)[:, None] & (k < K)[None, :]
        part = tl.load(weight + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        acc += part.to(tl.float32) * row[None, :]
    tl.store(out + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _tiles(
    x,
    weight,
    out,
    index,
    count,
    sums,
    arrivals,
    M,
    N,
    x_row,
    weight_row,
    out_row,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    COUNTED: tl.constexpr,
    INDEXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Tiles of the same outputs are neighbours in the grid, so that the later ones find the weight in L2."""
    m_tile, n_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = M
    if COUNTED:
        rows = tl.minimum(M, tl.load(count).to(tl.int32))
    if m_tile * BLOCK_M >= rows:
        return
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    source = m.to(tl.int64)
    if INDEXED:
        source = tl.load(index + m, mask=m < rows, other=0).to(tl.int64)
    x += source[:, None] * x_row
    weight += n.to(tl.int64)[:, None] * weight_row
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    for step in tl.range(split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS, num_stages=STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        left = tl.load(x + k[None, :], mask=(m < rows)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(weight + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    inside = (m < rows)[:, None] & (n < N)[None, :]
    target = out + m.to(tl.int64)[:, None] * out_row + n[None, :]
    if SPLITS > 1:
        size = tl.num_programs(0).to(tl.int64) * BLOCK_M * N
        place = m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(sums + split * size + place, acc, mask=inside)
        tl.debug_barrier()
        tile = m_tile * tl.num_programs(1) + n_tile
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(arrivals + tile, 0)
            # L1 may hold older copies of these lines: pass it by.
            whole = tl.load(sums + place, mask=inside, other=0.0, cache_modifier=".cg")
            for other in range(1, SPLITS):
                whole += tl.load(sums + other * size + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(target, whole.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
