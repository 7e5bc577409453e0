"""Random paged keys and values, and their attention by definition, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.places import Place


class Pages:
    """One layer's pages, all NaN but for the positions that somebody owns, inside of a larger NaN tensor."""

    def __init__(self, place: Place, *, pages: int, page_size: int, kv_heads: int, head_dim: int, seed: int) -> None:
        self.place, self.size, self.seed = place, page_size, seed
        # Strides as in a pool whose layers or planes are interleaved: none is what the shape suggests.
        shape = (pages, page_size + 1, kv_heads + 1, head_dim + 16)
        self.keys, self.values = (
            torch.full(shape, torch.nan, device=place.device, dtype=place.dtype)[:, :page_size, :kv_heads, :head_dim]
            for _ in range(2)
        )
        self._free = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()

    def fill(self, count: int) -> tuple[list[int], Tensor, Tensor]:
        """A page list with `count` new positions, and their keys and values [count, kv_heads, head_dim]."""
        pages = [self._free.pop() for _ in range(-(-count // self.size))]
        self.seed += 2
        heads, dim = self.keys.shape[2:]
        keys = self.place.normal(count, heads, dim, seed=self.seed)
        values = self.place.normal(count, heads, dim, seed=self.seed + 1)
        for start, page in zip(range(0, count, self.size), pages, strict=True):
            part = slice(start, start + self.size)
            used = len(keys[part])
            self.keys[page, :used], self.values[page, :used] = keys[part], values[part]
        return pages, keys, values


def attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one query [heads, head_dim] over all of `keys` and `values` [count, kv_heads, head_dim]."""
    group = query.shape[0] // keys.shape[1]
    wide = [x.double().repeat_interleave(group, 1) for x in (keys, values)]
    scores = torch.einsum("hd,khd->hk", query.double(), wide[0]) * query.shape[1] ** -0.5
    return torch.einsum("hk,khd->hd", scores.softmax(-1), wide[1])


def tables_of(lists: list[list[list[int]]], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """[rows, lists, places] of page lists; the places that are not used name a page that does not exist."""
    places = max((len(pages) for row in lists for pages in row), default=0) + 1
    return torch.tensor(
        [[[*pages, *[1 << 20] * (places - len(pages))] for pages in row] for row in lists], dtype=dtype, device=device
    )
