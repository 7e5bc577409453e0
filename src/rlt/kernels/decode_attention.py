"""Attention of decode rows, one query position each, over paged keys and values.

A row's keys are spread over several page lists with a count each. Attention is a sum over keys in any order, so the
lists are read as one sequence of `sum(counts)` keys, cut into splits of equal size that run in parallel. The split of a
row that ends last joins the splits' results, in a fixed order: no second launch, and no result depends on timing.

The file is long because a kernel names each of its thirty parameters, and there are two.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
#: programs that keep one multiprocessor busy: about what fits at a time
PROGRAMS_PER_MULTIPROCESSOR = 4
MOST_SPLITS = 64


class DecodeWorkspace(NamedTuple):
    """Partial results, float32 and flat, and how many splits of each (row, kv head) have arrived (zero between calls).

    Calls on one stream may share it.
    """

    sums: Tensor
    peaks: Tensor
    masses: Tensor
    arrivals: Tensor


def decode_workspace(*, rows: int, heads: int, head_dim: int, splits: int, device: torch.device) -> DecodeWorkspace:
    """A workspace for calls with at most `rows` * `splits` pieces of work and `rows` rows."""
    pieces = rows * heads * splits
    return DecodeWorkspace(
        torch.empty(pieces * head_dim, dtype=torch.float32, device=device),
        torch.empty(pieces, dtype=torch.float32, device=device),
        torch.empty(pieces, dtype=torch.float32, device=device),
        torch.zeros(rows * heads, dtype=torch.int32, device=device),
    )


def decode_splits(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Splits per row, a power of two, that occupy the device when `rows` rows are about equally long."""
    wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // max(rows * kv_heads, 1))
    return min(1 << (wanted - 1).bit_length(), MOST_SPLITS)


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    counts: Tensor,
    out: Tensor,
    workspace: DecodeWorkspace,
    *,
    splits: int,
    matrix: bool | None = None,
    block: int | None = None,
    stages: int = 3,
    warps: int = 4,
) -> None:
    """Set `out` [rows, heads, head_dim] to the attention of `query` (same shape), with scale head_dim ** -0.5.

    Row r attends, for each list l, to the first `counts[r, l]` positions of the pages `tables[r, l]`; a row without
    any gets zeros. `keys` and `values` are one layer's [pages, page_size, kv_heads, head_dim]; `tables`
    [rows, lists, places] and `counts` [rows, lists] are int32 or int64. All strides are free but those of the last
    dimensions, which are 1. Queries of one kv head are consecutive heads.

    `splits` is the most parts a row is cut into; a part is never smaller than `block` keys. `matrix` computes on
    tensor cores, with the queries of a kv head padded to 16; by default where a kv head has several queries.
    """
    rows, heads, head_dim = query.shape
    page_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    matrix = group > 1 if matrix is None else matrix
    assert matrix or group == 1
    assert query.stride(2) == keys.stride(3) == values.stride(3) == out.stride(2) == 1
    assert tables.stride(2) == 1 or tables.shape[2] <= 1
    assert counts.stride(1) == 1 or counts.shape[1] <= 1
    assert workspace.peaks.numel() >= rows * heads * splits
    assert workspace.sums.numel() >= rows * heads * splits * head_dim
    if rows == 0:
        return
    lists = counts.shape[1]
    common = {
        "heads": heads,
        "SPLITS": splits,
        "SPLITS_PAD": triton.next_power_of_2(splits),
        "LISTS": lists,
        "LISTS_PAD": triton.next_power_of_2(lists),
        "PAGE": page_size,
        "D": head_dim,
        "D_PAD": max(16, triton.next_power_of_2(head_dim)),
        "STAGES": stages,
        "num_warps": warps,
    }
    places = (*query.stride()[:2], *out.stride()[:2], *keys.stride()[:3], *values.stride()[:3])
    pointers = (query, keys, values, tables, counts, out, *workspace)
    scale = head_dim**-0.5 * LOG2_E
    table_strides = (*tables.stride()[:2], counts.stride(0))
    grid = (kv_heads, rows, splits)
    if matrix:
        group_pad = max(16, triton.next_power_of_2(group))
        _grouped[grid](
            *pointers,
            scale,
            *places,
            *table_strides,
            **common,
            GROUP=group,
            GROUP_PAD=group_pad,
            BLOCK=block or (32 if keys.dtype == torch.float32 else 64),
        )
    else:
        _single[grid](*pointers, scale, *places, *table_strides, **common, BLOCK=block or 32)


@triton.jit
def _share(counts, LISTS: tl.constexpr, LISTS_PAD: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Ends of the lists in the row's sequence of keys, its length, its blocks, and into how many splits they go."""
    which = tl.arange(0, LISTS_PAD)
    held = tl.load(counts + which, mask=which < LISTS, other=0).to(tl.int32)
    total = tl.sum(held, 0)
    blocks = tl.cdiv(total, BLOCK)
    return tl.cumsum(held, 0), total, blocks, tl.minimum(blocks, SPLITS)


@triton.jit
def _place(index, live, ends, table, list_stride, LISTS: tl.constexpr, PAGE: tl.constexpr):
    """Page (int64) and offset in it of the row's keys number `index`."""
    if LISTS > 1:
        before = index[:, None] >= ends[None, :]
        index -= tl.max(tl.where(before, ends[None, :], 0), 1)
        table += tl.sum(before.to(tl.int32), 1) * list_stride
    page = tl.load(table + index // PAGE, mask=live, other=0)
    return page.to(tl.int64), index % PAGE


@triton.jit
def _join(sums, peaks, masses, out, used, SPLITS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """Store the result of a head whose splits are all there. L1 may hold older copies of their lines: pass it by."""
    split = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, D_PAD)
    peak = tl.load(peaks + split, mask=split < used, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(masses + split, mask=split < used, other=0.0, cache_modifier=".cg")
    weight = tl.exp2(peak - tl.max(peak, 0))
    parts = tl.load(
        sums + split[:, None] * D + dim[None, :],
        mask=(split < used)[:, None] & (dim < D)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    result = tl.sum(parts * weight[:, None], 0) / tl.sum(mass * weight, 0)
    tl.store(out + dim, result.to(out.dtype.element_ty), mask=dim < D)


@triton.jit
def _single(
    query,
    keys,
    values,
    tables,
    counts,
    out,
    sums,
    peaks,
    masses,
    arrivals,
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
    table_list,
    count_row,
    heads,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    LISTS: tl.constexpr,
    LISTS_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One query per kv head, without tensor cores.

    Each of the BLOCK places of a block keeps its own maximum, mass and sum: nothing is exchanged between threads but
    once at the end.
    """
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    ends, total, blocks, used = _share(counts + row * count_row, LISTS, LISTS_PAD, SPLITS, BLOCK)
    if split >= tl.maximum(used, 1):
        return
    dim = tl.arange(0, D_PAD)
    inside = dim < D
    target = out + row * out_row + head * out_head
    if total == 0:
        tl.store(target + dim, tl.zeros([D_PAD], out.dtype.element_ty), mask=inside)
        return
    wanted = tl.load(query + row * query_row + head * query_head + dim, mask=inside, other=0.0).to(tl.float32) * scale
    table = tables + row * table_row
    keys += head * key_head
    values += head * value_head
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D_PAD], tl.float32)
    for number in tl.range(split * blocks // used, (split + 1) * blocks // used, num_stages=STAGES):
        index = number * BLOCK + tl.arange(0, BLOCK)
        live = index < total
        page, offset = _place(index, live, ends, table, table_list, LISTS, PAGE)
        mask = live[:, None] & inside[None, :]
        key_place = page * key_page + offset * key_position
        value_place = page * value_page + offset * value_position
        key = tl.load(keys + key_place[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.load(values + value_place[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        score = tl.where(live, tl.sum(key * wanted[None, :], 1), float("-inf"))
        higher = tl.maximum(peak, score)
        # A place that has seen no key yet: -inf minus -inf is not a number.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(peak - base), tl.exp2(score - base)
        mass = mass * fade + weight
        acc = acc * fade[:, None] + weight[:, None] * value
        peak = higher
    top = tl.max(peak, 0)
    share = tl.exp2(peak - top)
    whole = tl.sum(mass * share, 0)
    result = tl.sum(acc * share[:, None], 0)
    if used == 1:
        tl.store(target + dim, (result / whole).to(out.dtype.element_ty), mask=inside)
        return
    first = (row * heads + head) * SPLITS
    tl.store(sums + (first + split) * D + dim, result, mask=inside)
    tl.store(peaks + first + split, top)
    tl.store(masses + first + split, whole)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + row * heads + head, 1, sem="acq_rel", scope="gpu")
    if arrived == used - 1:
        tl.store(arrivals + row * heads + head, 0)
        _join(sums + first * D, peaks + first, masses + first, target, used, SPLITS_PAD, D, D_PAD)


@triton.jit
def _grouped(
    query,
    keys,
    values,
    tables,
    counts,
    out,
    sums,
    peaks,
    masses,
    arrivals,
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
    table_list,
    count_row,
    heads,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    LISTS: tl.constexpr,
    LISTS_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
):
    """All queries of one kv head at once, as the rows of a matrix product."""
    kv_head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    ends, total, blocks, used = _share(counts + row * count_row, LISTS, LISTS_PAD, SPLITS, BLOCK)
    if split >= tl.maximum(used, 1):
        return
    member, dim = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    head = kv_head * GROUP + member
    inside = dim < D
    both = (member < GROUP)[:, None] & inside[None, :]
    target = out + row * out_row + head[:, None] * out_head + dim[None, :]
    if total == 0:
        tl.store(target, tl.zeros([GROUP_PAD, D_PAD], out.dtype.element_ty), mask=both)
        return
    wanted = tl.load(query + row * query_row + head[:, None] * query_head + dim[None, :], mask=both, other=0.0)
    table = tables + row * table_row
    keys += kv_head * key_head
    values += kv_head * value_head
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for number in tl.range(split * blocks // used, (split + 1) * blocks // used, num_stages=STAGES):
        index = number * BLOCK + tl.arange(0, BLOCK)
        live = index < total
        page, offset = _place(index, live, ends, table, table_list, LISTS, PAGE)
        mask = live[:, None] & inside[None, :]
        key_place = page * key_page + offset * key_position
        value_place = page * value_page + offset * value_position
        key = tl.load(keys + key_place[:, None] + dim[None, :], mask=mask, other=0.0)
        value = tl.load(values + value_place[:, None] + dim[None, :], mask=mask, other=0.0)
        score = tl.dot(wanted, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(live[None, :], score, float("-inf"))
        # Each block has a live key, so the maximum is a number.
        higher = tl.maximum(peak, tl.max(score, 1))
        fade, weight = tl.exp2(peak - higher), tl.exp2(score - higher[:, None])
        mass = mass * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
        peak = higher
    if used == 1:
        tl.store(target, (acc / mass[:, None]).to(out.dtype.element_ty), mask=both)
        return
    piece = (row * heads + head) * SPLITS + split
    tl.store(sums + piece[:, None] * D + dim[None, :], acc, mask=both)
    tl.store(peaks + piece, peak, mask=member < GROUP)
    tl.store(masses + piece, mass, mask=member < GROUP)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + row * heads + kv_head, 1, sem="acq_rel", scope="gpu")
    if arrived == used - 1:
        tl.store(arrivals + row * heads + kv_head, 0)
        for each in range(GROUP):
            single = kv_head * GROUP + each
            first = (row * heads + single) * SPLITS
            goal = out + row * out_row + single * out_head
            _join(sums + first * D, peaks + first, masses + first, goal, used, SPLITS_PAD, D, D_PAD)
