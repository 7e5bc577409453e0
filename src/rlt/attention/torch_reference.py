"""Attention in plain torch operations: the definition that other back ends are held against, and the CPU's path."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlt.attention.interface import KvPool, TickBatch


class TorchAttention:
    """Gathers pages into dense keys and values, then one masked product for all decode rows and one per prompt span."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._offsets = torch.arange(pool.page_size, device=pool.keys.device)
        self._batch: TickBatch
        self._decode_index: Tensor
        self._decode_mask: Tensor | None
        self._prompt_index: list[Tensor]
        self._prompt_mask: list[Tensor]

    def begin(self, batch: TickBatch) -> None:
        self._batch = batch
        device = batch.write.device
        if len(batch.counts):
            self._decode_index, self._decode_mask = self._decode_reads(batch.tables, batch.counts)
        self._prompt_index = [self._positions(span.pages[None])[0, : span.length] for span in batch.prompts]
        self._prompt_mask = [
            torch.ones(span.count, span.length, dtype=torch.bool, device=device).tril(span.length - span.count)
            for span in batch.prompts
        ]

    def _decode_reads(self, tables: Tensor, counts: Tensor) -> tuple[Tensor, Tensor | None]:
        """Flat positions [rows, longest] that the decode rows read, and the mask of the valid ones if some are not."""
        rows, lists = counts.shape
        positions = self._positions(tables.flatten(0, 1)).view(rows, lists, -1)
        used = self._arange(positions.shape[2]) < counts[:, :, None]
        lengths = counts.sum(1)
        longest = int(lengths.max())
        valid = self._arange(longest) < lengths[:, None]
        # Positions past a row's end point at the dummy page, which is finite.
        index = torch.zeros(rows, longest, dtype=torch.int64, device=counts.device)
        index[valid] = positions[used]
        return index, valid[:, None, None, :] if rows > 1 else None

    def _arange(self, end: int) -> Tensor:
        return torch.arange(end, device=self._offsets.device)

    def _positions(self, pages: Tensor) -> Tensor:
        """Flat positions [rows, pages * page_size] of page lists [rows, pages]."""
        return (pages[..., None] * self._pool.page_size + self._offsets).flatten(1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._pool.flat_keys[layer], self._pool.flat_values[layer]
        keys.index_copy_(0, self._batch.write, key)
        values.index_copy_(0, self._batch.write, value)
        grouped = query.shape[1] != key.shape[1]
        out = torch.empty_like(query)
        decode_rows = len(self._batch.counts)
        if decode_rows:
            # [rows, heads, 1, head_dim] against [rows, kv_heads, longest, head_dim]
            out[:decode_rows] = scaled_dot_product_attention(
                query[:decode_rows, :, None],
                _gather(keys, self._decode_index).transpose(1, 2),
                _gather(values, self._decode_index).transpose(1, 2),
                attn_mask=self._decode_mask,
                enable_gqa=grouped,
            )[:, :, 0]
        for span, index, mask in zip(self._batch.prompts, self._prompt_index, self._prompt_mask, strict=True):
            rows = slice(span.row, span.row + span.count)
            attended = scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],
                keys.index_select(0, index).transpose(0, 1)[None],
                values.index_select(0, index).transpose(0, 1)[None],
                attn_mask=mask,
                enable_gqa=grouped,
            )
            out[rows] = attended[0].transpose(0, 1)
        return out


def _gather(source: Tensor, index: Tensor) -> Tensor:
    """`source[index]` for a 2-D index; index_select is several times faster than advanced indexing on a CPU."""
    return source.index_select(0, index.flatten()).view(*index.shape, *source.shape[1:])
