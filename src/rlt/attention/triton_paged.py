"""Attention by the Triton kernels, straight from the pages: nothing is gathered into dense keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlt.attention.interface import KvPool, TickBatch
from rlt.kernels.available import multiprocessors
from rlt.kernels.decode_attention import DecodeWorkspace, decode_attention, decode_splits, decode_workspace
from rlt.kernels.prompt_attention import prompt_attention


class _Prompts(NamedTuple):
    """Spans and page lists as `prompt_attention` takes them, and its tiles."""

    spans: Tensor
    tables: Tensor
    tiles: dict[str, int]


class TritonAttention:
    """Split-KV decoding over page lists for the decode rows, one launch for all prompt spans.

    Needs a CUDA device of compute capability 8.0 or more, or Triton's interpreter (float32).
    """

    def __init__(self, pool: KvPool, heads: int) -> None:
        """`heads`: query heads of the model."""
        self._pool = pool
        self._heads = heads
        self._multiprocessors = multiprocessors(pool.keys.device)
        self._workspace = self._new_workspace(rows=1, splits=1)
        self._splits = 1
        self._batch: TickBatch
        self._prompts: _Prompts | None

    def _new_workspace(self, rows: int, splits: int) -> DecodeWorkspace:
        head_dim, device = self._pool.keys.shape[4], self._pool.keys.device
        return decode_workspace(rows=rows, heads=self._heads, head_dim=head_dim, splits=splits, device=device)

    def begin(self, batch: TickBatch) -> None:
        self._batch = batch
        rows, kv_heads = len(batch.counts), self._pool.keys.shape[3]
        self._splits = decode_splits(rows, kv_heads, self._multiprocessors)
        if self._workspace.peaks.numel() < rows * self._splits * self._heads:
            self._workspace = self._new_workspace(rows, self._splits)
        self._prompts = self._pack(batch) if batch.prompts else None

    def _pack(self, batch: TickBatch) -> _Prompts:
        # Rows are counted from the first prompt row on.
        packed = [(span.row - len(batch.counts), span.count, span.length - span.count) for span in batch.prompts]
        longest = max(span.count for span in batch.prompts)
        block = next((size for size in (16, 64) if longest <= size), 128)
        tiles = {"block_m": block, "warps": 4 if block < 128 else 8}
        if self._pool.keys.dtype == torch.float32:
            # Tensor cores would round; without them, large tiles do not fit into the registers.
            tiles = {"block_m": 16, "block_n": 32, "stages": 2, "warps": 4}
        return _Prompts(
            torch.tensor(packed, dtype=torch.int32, device=batch.write.device),
            pad_sequence([span.pages for span in batch.prompts], batch_first=True),
            tiles,
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pool, batch = self._pool, self._batch
        pool.flat_keys[layer].index_copy_(0, batch.write, key)
        pool.flat_values[layer].index_copy_(0, batch.write, value)
        keys, values = pool.keys[layer], pool.values[layer]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        rows = len(batch.counts)
        decode_attention(
            query[:rows],
            keys,
            values,
            batch.tables,
            batch.counts,
            out[:rows],
            self._workspace,
            splits=self._splits,
        )
        if self._prompts is not None:
            spans, tables, tiles = self._prompts
            prompt_attention(query[rows:], keys, values, spans, tables, out[rows:], **tiles)
        return out
