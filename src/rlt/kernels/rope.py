"""Rotary positions for queries and keys, and keys and values into the pages, out of the fused projection's rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_HEADS_PER_PROGRAM = 8


def rope_write_halves(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    write: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """RoPE that pairs feature j with j + head_dim / 2 (Ouro, Nanbeige), in operations of the dtype.

    `qkv` [rows, heads + 2 * kv_heads, head_dim]: queries, keys, values. `cos` and `sin` [positions, head_dim] repeat
    their first half, in the dtype of the rows. `positions` and `write` [rows] are int64: a row's position, and the flat
    position (page * page_size + offset) that takes its key and value; negative: none does. `query`
    [rows, heads, head_dim] takes the turned queries and may be the first heads of `qkv`. `keys` and `values` are one
    layer's [pages, page_size, kv_heads, head_dim]. All last strides are 1.
    """
    _launch(qkv, cos, sin, qkv, positions, write, query, keys, values, pairs=False)


def rope_write_pairs(
    qkv: Tensor,
    bias: Tensor,
    turns: Tensor,
    positions: Tensor,
    write: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """RoPE that pairs features 2 j and 2 j + 1 (Huginn), in float32, after a bias on queries and keys.

    As `rope_write_halves`, but for `turns` [positions, head_dim / 2, 2], cos and sin in float32, and `bias`
    [heads + kv_heads, head_dim], whose sum is rounded to the dtype.
    """
    assert bias.is_contiguous()
    assert turns.stride()[1:] == (2, 1)
    _launch(qkv, turns, turns, bias, positions, write, query, keys, values, pairs=True)


def _launch(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    bias: Tensor,
    positions: Tensor,
    write: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    pairs: bool,
) -> None:
    rows, heads, head_dim = query.shape
    page_size, kv_heads = keys.shape[1:3]
    assert qkv.shape == (rows, heads + 2 * kv_heads, head_dim)
    assert qkv.stride(2) == query.stride(2) == keys.stride(3) == values.stride(3) == 1
    assert cos.stride(0) == sin.stride(0)
    assert cos.stride(-1) == sin.stride(-1) == 1
    if rows == 0:
        return
    _rope_write[(rows, triton.cdiv(heads + 2 * kv_heads, _HEADS_PER_PROGRAM))](
        qkv,
        cos,
        sin,
        bias,
        positions,
        write,
        query,
        keys,
        values,
        *qkv.stride()[:2],
        cos.stride(0),
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        heads,
        kv_heads,
        page_size,
        head_dim,
        triton.next_power_of_2(head_dim // 2),
        _HEADS_PER_PROGRAM,
        pairs,
        num_warps=4,
    )


@triton.jit
def _rope_write(
    qkv,
    cos,
    sin,
    bias,
    positions,
    write,
    query,
    keys,
    values,
    in_row,
    in_head,
    turn_row,
    query_row,
    query_head,
    key_page,
    key_position,
    key_head,
    value_page,
    value_position,
    value_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """`first` and `second` are the halves, or the even and the odd features, of BLOCK heads: [BLOCK, D / 2]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, HALF)
    source = qkv + row * in_row + head[:, None] * in_head
    dtype: tl.constexpr = qkv.dtype.element_ty
    turned = head < HEADS + KV_HEADS
    alive = head < HEADS + 2 * KV_HEADS
    position = tl.load(positions + row)
    flat = tl.load(write + row)
    inside = (pair < D // 2)[None, :]
    if PAIRS:
        # Loaded as they lie, in wide accesses, and taken apart in registers.
        dim = tl.arange(0, 2 * HALF)
        raw = tl.load(source + dim[None, :], mask=alive[:, None] & (dim < D)[None, :], other=0.0)
        shift = tl.load(bias + head[:, None] * D + dim[None, :], mask=turned[:, None] & (dim < D)[None, :], other=0.0)
        raw = (raw.to(tl.float32) + shift.to(tl.float32)).to(dtype).to(tl.float32)
        first, second = tl.split(tl.reshape(raw, [BLOCK, HALF, 2]))
        c = tl.load(cos + position * turn_row + 2 * pair, mask=pair < D // 2, other=0.0)[None, :]
        s = tl.load(sin + position * turn_row + 2 * pair + 1, mask=pair < D // 2, other=0.0)[None, :]
        new_first, new_second = first * c - second * s, second * c + first * s
    else:
        mask = alive[:, None] & inside
        first = tl.load(source + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + D // 2 + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        c = tl.load(cos + position * turn_row + pair, mask=pair < D // 2, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + position * turn_row + pair, mask=pair < D // 2, other=0.0).to(tl.float32)[None, :]
        # Each product and the sum are rounded, as in operations of the rows' dtype, unless the compiler fuses them.
        new_first = (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)
        new_second = (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)
    # Values pass as they are.
    first = tl.where(turned[:, None], new_first, first).to(dtype)
    second = tl.where(turned[:, None], new_second, second).to(dtype)
    page, offset = flat // PAGE, flat % PAGE
    is_key = turned & (head >= HEADS) & (flat >= 0)
    is_value = alive & (head >= HEADS + KV_HEADS) & (flat >= 0)
    to_query = query + row * query_row + head * query_head
    to_key = keys + page * key_page + offset * key_position + (head - HEADS) * key_head
    to_value = values + page * value_page + offset * value_position + (head - HEADS - KV_HEADS) * value_head
    if PAIRS:
        whole = tl.reshape(tl.join(first, second), [BLOCK, 2 * HALF])
        _store(to_query, to_key, to_value, head < HEADS, is_key, is_value, dim, dim < D, whole)
    else:
        _store(to_query, to_key, to_value, head < HEADS, is_key, is_value, pair, pair < D // 2, first)
        _store(to_query, to_key, to_value, head < HEADS, is_key, is_value, D // 2 + pair, pair < D // 2, second)


@triton.jit
def _store(to_query, to_key, to_value, is_query, is_key, is_value, dim, inside, block):
    tl.store(to_query[:, None] + dim[None, :], block, mask=is_query[:, None] & inside[None, :])
    tl.store(to_key[:, None] + dim[None, :], block, mask=is_key[:, None] & inside[None, :])
    tl.store(to_value[:, None] + dim[None, :], block, mask=is_value[:, None] & inside[None, :])
