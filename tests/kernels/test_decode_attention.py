"""Decode attention against its definition: any lengths, lists, heads, splits and strides; nothing unused is read."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.paged import Pages, attention, tables_of
from kernels.places import Place
from rlt.kernels.decode_attention import decode_attention, decode_splits, decode_workspace


def check(
    place: Place,
    counts: list[list[int]],
    *,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 4,
    splits: int = 4,
    matrix: bool | None = None,
    block: int | None = None,
    index_dtype: torch.dtype = torch.int32,
    seed: int = 0,
) -> None:
    pages = sum(-(-count // page_size) for row in counts for count in row) + 1
    store = Pages(place, pages=pages, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, seed=seed)
    query = place.spread(len(counts), heads, head_dim)
    query.copy_(place.normal(len(counts), heads, head_dim, seed=seed + 1000))
    tables, wanted = [], []
    for row, wants in zip(counts, query, strict=True):
        lists = [store.fill(count) for count in row]
        tables.append([pages for pages, _, _ in lists])
        keys, values = (torch.cat([entry[part] for entry in lists]) for part in (1, 2))
        wanted.append(attention(wants, keys, values) if len(keys) else torch.zeros_like(wants).double())
    out = place.spread(len(counts), heads, head_dim)
    workspace = decode_workspace(rows=len(counts), heads=heads, head_dim=head_dim, splits=splits, device=place.device)
    for tensor in workspace[:3]:
        tensor.fill_(torch.nan)
    arguments = (
        query,
        store.keys,
        store.values,
        tables_of(tables, place.device, index_dtype),
        torch.tensor(counts, dtype=index_dtype, device=place.device),
        out,
        workspace,
    )
    decode_attention(*arguments, splits=splits, matrix=matrix, block=block)
    place.close(out, torch.stack(wanted))
    first = out.clone()
    decode_attention(*arguments, splits=splits, matrix=matrix, block=block)
    assert torch.equal(out, first), "the second run differs: the workspace was not left as it was found"


@pytest.mark.parametrize("matrix", [False, True])
def test_lists_and_lengths(place: Place, matrix: bool) -> None:
    counts = [[0, 3, 5], [1, 0, 0], [0, 0, 0], [17, 40, 9], [0, 0, 33]]
    check(place, counts, splits=3, matrix=matrix, block=16)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (12, 2), (4, 2)])
def test_grouped_queries(place: Place, heads: int, kv_heads: int) -> None:
    check(place, [[20], [70]], heads=heads, kv_heads=kv_heads, splits=2, block=16)


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("head_dim", [24, 96])
def test_head_sizes_that_are_no_power_of_two(place: Place, head_dim: int, matrix: bool) -> None:
    check(place, [[9, 20]], head_dim=head_dim, heads=3, kv_heads=3, matrix=matrix, block=16)


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_splits(place: Place, splits: int) -> None:
    check(place, [[1], [16], [17], [130]], splits=splits, block=16)


def test_odd_page_sizes_and_wide_indices(place: Place) -> None:
    check(place, [[7, 8], [1, 30]], page_size=5, block=16, index_dtype=torch.int64)


@pytest.mark.parametrize("seed", range(4))
def test_random(place: Place, seed: int) -> None:
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 3])
    lists = draw.choice([1, 2, 4])
    check(
        place,
        [[draw.choice([0, 1, 7, draw.randrange(60)]) for _ in range(lists)] for _ in range(draw.randrange(1, 4))],
        heads=kv_heads * draw.choice([1, 3]),
        kv_heads=kv_heads,
        head_dim=draw.choice([16, 32, 40]),
        page_size=draw.choice([1, 2, 16]),
        splits=draw.choice([1, 2, 5]),
        block=draw.choice([16, 32]),
        seed=seed,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("matrix", [False, True])
def test_real_sizes(place: Place, head_dim: int, matrix: bool) -> None:
    if place.interpreted:
        pytest.skip("too large for the interpreter")
    counts = [[random.Random(row).randrange(1500), 3, 0, 200] for row in range(9)]
    check(place, counts, heads=16, kv_heads=16, head_dim=head_dim, page_size=16, splits=8, matrix=matrix)
    check(place, counts, heads=48, kv_heads=8, head_dim=head_dim, page_size=16, splits=16)


@pytest.mark.gpu
def test_addresses_beyond_32_bits(place: Place) -> None:
    if place.interpreted or place.dtype == torch.float32:
        pytest.skip("needs pages of 5 GiB")
    pages, size, heads, dim = 1 << 17, 16, 10, 128
    keys, values = (torch.zeros(pages, size, heads, dim, device=place.device, dtype=place.dtype) for _ in range(2))
    assert keys.numel() > 2**31
    keys[-1], values[-1] = place.normal(2, size, heads, dim, seed=0)
    query, out = place.normal(1, heads, dim, seed=1), place.spread(1, heads, dim)
    tables = torch.tensor([[[pages - 1]]], dtype=torch.int32, device=place.device)
    counts = torch.tensor([[size]], dtype=torch.int32, device=place.device)
    workspace = decode_workspace(rows=1, heads=heads, head_dim=dim, splits=1, device=place.device)
    for matrix in (False, True):
        decode_attention(query, keys, values, tables, counts, out, workspace, splits=1, matrix=matrix)
        place.close(out[0], attention(query[0], keys[-1], values[-1]))


def test_splits_fill_the_device_and_no_more() -> None:
    assert decode_splits(1, 16, 132) == 64
    assert decode_splits(8, 16, 132) == 8
    assert decode_splits(128, 16, 132) == 1
    assert decode_splits(1, 1, 132) == 64
