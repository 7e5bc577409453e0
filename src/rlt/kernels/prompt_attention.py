"""Attention of prompt rows: packed spans of consecutive positions, each over the pages of its own plane."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlt.kernels.decode_attention import LOG2_E


def prompt_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Tensor,
    tables: Tensor,
    out: Tensor,
    *,
    block_m: int = 128,
    block_n: int = 64,
    stages: int = 3,
    warps: int = 8,
) -> None:
    """Set the spans' rows of `out` [rows, heads, head_dim] to the causal attention of `query` (same shape).

    `spans` [spans, 3] (int32) is first row, number of rows and first position of each: rows are consecutive positions,
    and the row at position p attends to positions 0 .. p of the pages `tables` [spans, places] (int32 or int64). A span
    of no rows does nothing, rows of no span are left as they are. `keys` and `values` are one layer's
    [pages, page_size, kv_heads, head_dim]; last strides are 1, the others free. Scale is head_dim ** -0.5.

    The default tiles are for tensor cores; float32, which is computed without, needs far smaller ones (16 by 32).

    The grid follows from the number of rows and spans alone: one program per `block_m` rows of a span and per head.
    """
    rows, heads, head_dim = query.shape
    page_size, kv_heads = keys.shape[1:3]
    count = len(spans)
    assert spans.is_contiguous()
    assert spans.dtype == torch.int32
    assert len(tables) == count
    assert query.stride(2) == keys.stride(3) == values.stride(3) == out.stride(2) == 1
    assert tables.stride(1) == 1 or tables.shape[1] <= 1
    if rows == 0 or count == 0:
        return
    # Every span may end with one block that is not full.
    blocks = min(rows // block_m + count, rows)
    _prompt[(blocks, heads)](
        query,
        keys,
        values,
        spans,
        tables,
        out,
        head_dim**-0.5 * LOG2_E,
        *query.stride()[:2],
        *out.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        tables.stride(0),
        count,
        triton.next_power_of_2(count),
        heads // kv_heads,
        page_size,
        head_dim,
        max(16, triton.next_power_of_2(head_dim)),
        block_m,
        block_n,
        stages,
        num_warps=warps,
    )


@triton.jit
def _prompt(
    query,
    keys,
    values,
    spans,
    tables,
    out,
    scale,
    query_row,
    query_head,
    out_row,
    out_head,
    key_page,
    key_position,
    key_head,
    value_page,
    value_position,
    value_head,
    table_row,
    SPANS: tl.constexpr,
    SPANS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    which = tl.arange(0, SPANS_PAD)
    lengths = tl.load(spans + which * 3 + 1, mask=which < SPANS, other=0)
    ends = tl.cumsum(tl.cdiv(lengths, BLOCK_M), 0)
    span = tl.sum((ends <= block).to(tl.int32), 0)
    if span >= SPANS:
        return
    end = tl.sum(tl.where(which == span, ends, 0), 0)
    first_row = tl.load(spans + span * 3)
    count = tl.load(spans + span * 3 + 1)
    first_position = tl.load(spans + span * 3 + 2)
    # Last blocks first: they have the most keys.
    start = (end - 1 - block) * BLOCK_M
    member, dim = start + tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    row = (first_row + member).to(tl.int64)
    both = (member < count)[:, None] & (dim < D)[None, :]
    wanted = tl.load(query + row[:, None] * query_row + head * query_head + dim[None, :], mask=both, other=0.0)
    table = tables + span.to(tl.int64) * table_row
    keys += (head // GROUP) * key_head
    values += (head // GROUP) * value_head
    position = first_position + member
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    # Keys before `free` are seen by all rows of the block, keys from `length` on by none.
    free = (first_position + start + 1) // BLOCK_N * BLOCK_N
    length = first_position + tl.minimum(start + BLOCK_M, count)
    for base in tl.range(0, free, BLOCK_N, num_stages=STAGES):
        index = base + tl.arange(0, BLOCK_N)
        page = tl.load(table + index // PAGE).to(tl.int64)
        key_place = page * key_page + (index % PAGE) * key_position
        value_place = page * value_page + (index % PAGE) * value_position
        key = tl.load(keys + key_place[:, None] + dim[None, :], mask=(dim < D)[None, :], other=0.0)
        value = tl.load(values + value_place[:, None] + dim[None, :], mask=(dim < D)[None, :], other=0.0)
        score = tl.dot(wanted, tl.trans(key), input_precision="ieee") * scale
        peak, mass, acc = _update(score, value, peak, mass, acc)
    for base in tl.range(free, length, BLOCK_N, num_stages=STAGES):
        index = base + tl.arange(0, BLOCK_N)
        live = index < length
        page = tl.load(table + index // PAGE, mask=live, other=0).to(tl.int64)
        key_place = page * key_page + (index % PAGE) * key_position
        value_place = page * value_page + (index % PAGE) * value_position
        mask = live[:, None] & (dim < D)[None, :]
        key = tl.load(keys + key_place[:, None] + dim[None, :], mask=mask, other=0.0)
        value = tl.load(values + value_place[:, None] + dim[None, :], mask=mask, other=0.0)
        score = tl.dot(wanted, tl.trans(key), input_precision="ieee") * scale
        # Rows past the span's end see what its last row sees, so that no row sees nothing.
        score = tl.where(index[None, :] <= tl.minimum(position, length - 1)[:, None], score, float("-inf"))
        peak, mass, acc = _update(score, value, peak, mass, acc)
    target = out + row[:, None] * out_row + head * out_head + dim[None, :]
    tl.store(target, (acc / mass[:, None]).to(out.dtype.element_ty), mask=both)


@triton.jit
def _update(score, value, peak, mass, acc):
    """One step of the running softmax. The first block has key 0, which every row sees: the maximum is a number."""
    higher = tl.maximum(peak, tl.max(score, 1))
    fade, weight = tl.exp2(peak - higher), tl.exp2(score - higher[:, None])
    mass = mass * fade + tl.sum(weight, 1)
    acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return higher, mass, acc
