"""Prompt attention against its definition: packed spans at any first position, each over its own pages."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kernels.paged import Pages, attention, tables_of
from kernels.places import Place
from rlt.kernels.prompt_attention import prompt_attention


def check(
    place: Place,
    spans: list[tuple[int, int]],
    *,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 4,
    gap: int = 0,
    seed: int = 0,
    **tiles: int,
) -> None:
    """`spans` are (rows, first position); `gap` rows before each belong to none."""
    lengths = [count + first for count, first in spans]
    pages = sum(-(-length // page_size) for length in lengths) + 1
    store = Pages(place, pages=pages, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, seed=seed)
    rows = sum(count + gap for count, _ in spans)
    query, out = place.spread(rows, heads, head_dim), place.spread(rows, heads, head_dim, fill=7.0)
    query.copy_(place.normal(rows, heads, head_dim, seed=seed + 1000))
    wanted = torch.full((rows, heads, head_dim), 7.0, dtype=torch.float64, device=place.device)
    row, packed, tables = 0, [], []
    for (count, first), length in zip(spans, lengths, strict=True):
        row += gap
        page_list, keys, values = store.fill(length)
        tables.append([page_list])
        packed.append((row, count, first))
        for each in range(count):
            seen = first + each + 1
            wanted[row + each] = attention(query[row + each], keys[:seen], values[:seen])
        row += count
    prompt_attention(
        query,
        store.keys,
        store.values,
        torch.tensor(packed, dtype=torch.int32, device=place.device),
        tables_of(tables, place.device)[:, 0],
        out,
        **tiles,
    )
    place.close(out, wanted)


def test_packed_spans(place: Place) -> None:
    check(place, [(5, 0), (1, 30), (40, 13), (0, 0), (17, 16)], block_m=16, block_n=16, warps=4)


def test_rows_of_no_span_stay_as_they_are(place: Place) -> None:
    check(place, [(3, 2), (20, 0)], gap=3, block_m=16, block_n=16, warps=4)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 1, 24), (4, 2, 16), (3, 3, 48)])
def test_heads(place: Place, heads: int, kv_heads: int, head_dim: int) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    check(place, [(18, 3), (2, 0)], page_size=5, block_m=16, block_n=32, warps=4, **shape)


@pytest.mark.parametrize("seed", range(2))
def test_random(place: Place, seed: int) -> None:
    draw = random.Random(seed)
    spans = [(draw.randrange(40), draw.choice([0, draw.randrange(40)])) for _ in range(draw.randrange(1, 3))]
    check(place, spans, page_size=draw.choice([1, 3, 16]), seed=seed, block_m=16, block_n=16, warps=4)


def test_nothing_to_do(place: Place) -> None:
    empty: Tensor = torch.zeros(0, 3, dtype=torch.int32, device=place.device)
    pages = torch.zeros(1, 4, 2, 16, device=place.device, dtype=place.dtype)
    rows = torch.ones(2, 2, 16, device=place.device, dtype=place.dtype)
    out = torch.ones_like(rows)
    prompt_attention(rows, pages, pages, empty, empty[:, :1], out)
    assert torch.equal(out, rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 16, 128), (12, 2, 128), (5, 5, 96), (4, 4, 64)])
@pytest.mark.parametrize(("block_m", "warps"), [(128, 8), (64, 4), (16, 4)])
def test_real_sizes(place: Place, heads: int, kv_heads: int, head_dim: int, block_m: int, warps: int) -> None:
    if place.interpreted:
        pytest.skip("too large for the interpreter")
    if place.dtype == torch.float32 and block_m > 16:
        pytest.skip("tiles for tensor cores, which float32 does without")
    block_n = 32 if place.dtype == torch.float32 else 64
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": 16}
    check(place, [(300, 0), (33, 500), (1, 77)], **shape, block_m=block_m, block_n=block_n, warps=warps)
