"""RoPE and the write into the pages against RoPE in float64; padded rows write nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.places import Place
from rlt.kernels.rope import rope_write_halves, rope_write_pairs

POSITIONS = 50


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 16), (12, 2, 8), (5, 5, 24), (16, 16, 128)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rope_write(place: Place, pairs: bool, heads: int, kv_heads: int, head_dim: int, in_place: bool) -> None:
    turned = heads + kv_heads
    qkv = place.spread(4, turned + kv_heads, head_dim)
    qkv.copy_(place.normal(4, turned + kv_heads, head_dim, seed=0))
    positions = torch.tensor([0, 49, 7, 1], device=place.device)
    write = torch.tensor([9, 3, -1, 14], device=place.device)
    pool = torch.full((2, 5, 3, kv_heads + 1, head_dim + 16), 7.0, device=place.device, dtype=place.dtype)
    keys, values = pool[:, :, :, :kv_heads, :head_dim]
    angles = torch.rand(POSITIONS, head_dim // 2, generator=torch.Generator().manual_seed(1)).to(place.device) * 7
    cos, sin = (torch.cat([f, f], -1).to(place.dtype) for f in (angles.cos(), angles.sin()))
    turns = torch.stack([angles.cos(), angles.sin()], -1)
    bias = place.normal(turned, head_dim, seed=2)
    wanted, size = turn(qkv[:, :turned], turns[positions] if pairs else (cos[positions], sin[positions]), bias)
    raw_values = qkv[:, turned:].clone()
    query = qkv[:, :heads] if in_place else place.spread(4, heads, head_dim)
    if pairs:
        rope_write_pairs(qkv, bias, turns, positions, write, query, keys, values)
    else:
        rope_write_halves(qkv, cos, sin, positions, write, query, keys, values)
    close(query, wanted[:, :heads], size[:, :heads])
    for row, flat in enumerate(write.tolist()):
        if flat >= 0:
            close(keys[flat // 3, flat % 3], wanted[row, heads:], size[row, heads:])
            assert torch.equal(values[flat // 3, flat % 3], raw_values[row])
            keys[flat // 3, flat % 3] = values[flat // 3, flat % 3] = 7.0
    assert (pool == 7.0).all(), "something else was written"


def turn(heads: Tensor, turns: Tensor | tuple[Tensor, Tensor], bias: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, in float64: (a, b) becomes (a cos - b sin, b cos + a sin); and |a cos| + |b sin| and so on.

    Pairs are the halves where `turns` are cos and sin [rows, head_dim], and neighbours, after `bias` is added, where
    they are [rows, head_dim / 2, 2].
    """
    half = heads.shape[-1] // 2
    if isinstance(turns, Tensor):
        first, second = (heads.double() + bias.double()).unflatten(-1, (half, 2)).unbind(-1)
        cos, sin = turns.double()[:, None].unbind(-1)
    else:
        first, second = heads.double().split(half, -1)
        cos, sin = (table.double()[:, None, :half] for table in turns)
    products = (first * cos, -second * sin), (second * cos, first * sin)
    sums = [a + b for a, b in products], [a.abs() + b.abs() for a, b in products]
    wanted, size = (torch.stack(pair, -1 if isinstance(turns, Tensor) else -2).flatten(-2) for pair in sums)
    return wanted, size


def close(got: Tensor, wanted: Tensor, size: Tensor) -> None:
    """Three roundings of half a step lie between operands and result, at the size of the products or below.

    They are of the sum with the bias (or, by halves, of none), of the products, and of the sum. A compiler may leave
    out some of them.
    """
    # Below the normal numbers of float16 its steps do not shrink any more.
    excess = ((got.double() - wanted).abs() - 1.5 * torch.finfo(got.dtype).eps * size - 2e-7).max()
    assert excess <= 0, f"{excess.item():.3g} more than rounding"


@pytest.mark.gpu
def test_addresses_beyond_32_bits(place: Place) -> None:
    if place.interpreted or place.dtype == torch.float32:
        pytest.skip("needs pages of 5 GiB")
    pages, size, heads, dim = 1 << 17, 16, 10, 128
    keys, values = (torch.zeros(pages, size, heads, dim, device=place.device, dtype=place.dtype) for _ in range(2))
    qkv = place.normal(1, 3 * heads, dim, seed=0)
    ones, zeros = (torch.full((1, dim), fill, device=place.device, dtype=place.dtype) for fill in (1.0, 0.0))
    first = torch.zeros(1, dtype=torch.int64, device=place.device)
    rope_write_halves(qkv, ones, zeros, first, first + pages * size - 1, qkv[:, :heads], keys, values)
    assert torch.equal(keys[-1, -1], qkv[0, heads : 2 * heads])
    assert torch.equal(values[-1, -1], qkv[0, 2 * heads :])
    assert not keys[:-1].any()
