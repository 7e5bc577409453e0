"""What a tick tells an attention back end, and what every back end offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class KvPool:
    """Keys and values: two tensors [layers, pages, page_size, kv_heads, head_dim].

    A page belongs to one page list of a request and holds the same positions in every layer: those that loop, or as
    many of the outer ones (`ModelSpec.outer_lists`). Keys are stored after RoPE.
    Page 0 is the dummy page. Only it is cleared: masked keys must be finite numbers.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, pages + 1, page_size, kv_heads, head_dim)
        self.page_size = page_size
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.keys[:, 0] = 0
        self.values[:, 0] = 0
        #: the same memory as [layers, positions, kv_heads, head_dim]: position = page * page_size + offset
        self.flat_keys = self.keys.view(layers, -1, kv_heads, head_dim)
        self.flat_values = self.values.view(layers, -1, kv_heads, head_dim)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the keys and values of flat positions `source` to `target` (both [n], int64) in every layer."""
        self.flat_keys[:, target] = self.flat_keys[:, source]
        self.flat_values[:, target] = self.flat_values[:, source]


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Rows `row .. row + count` of the tick are consecutive positions of one prompt at one loop.

    `pages` [n] are the pages of that plane in order; row i attends to the first `length - count + i + 1` positions.
    """

    row: int
    count: int
    length: int
    pages: Tensor


@dataclass(frozen=True, slots=True)
class TickBatch:
    """Rows of a tick as attention sees them: decode rows first, then the prompt spans.

    `write` [rows] is the flat position that takes each row's key and value. Decode row i attends, for each list l, to
    the first `counts[i, l]` positions of the pages `tables[i, l]` ([decode rows, lists, places] and
    [decode rows, lists], int64); the row's own position is one of them.
    """

    write: Tensor
    tables: Tensor
    counts: Tensor
    prompts: tuple[PromptSpan, ...]


class AttentionBackend(Protocol):
    """Writes a layer's new keys and values and attends over the pages."""

    def begin(self, batch: TickBatch) -> None:
        """Prepare what the next layers share, until `begin` is called again."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store `key` and `value` [rows, kv_heads, head_dim], then return the attention of `query`
        [rows, heads, head_dim] over the stored positions, in the same shape. Scale is head_dim ** -0.5.
        """
        ...
