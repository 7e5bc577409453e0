"""What the rows of a tick read and write: in the layers that loop, and in the outer ones, which do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlt.attention.interface import AttentionBackend, PromptSpan, TickBatch
from rlt.exec.planes import Planes, flat_positions
from rlt.exec.slots import PageTable, Slots
from rlt.kv.layout import Layout
from rlt.sched.plan import PromptSegment


class Batches:
    """Builds `TickBatch`es of decode rows, one per slot, and the rows of prompt segments after them."""

    def __init__(self, layout: Layout, slots: Slots, pages: PageTable, planes: Planes, page_size: int) -> None:
        self._layout = layout
        self._slots = slots
        self._table = pages.table
        self._planes = planes
        self._page_size = page_size

    def positions(self, slots: Tensor, segments: Sequence[PromptSegment]) -> Tensor:
        """Positions [rows] of all rows."""
        device = self._table.device
        spans = (torch.arange(s.first, s.first + len(s.rows), device=device) for s in segments)
        return torch.cat([self._slots.position[slots], *spans])

    def core(self, slots: Tensor, loops: Tensor, segments: Sequence[PromptSegment]) -> TickBatch:
        """Decode rows at `loops` [slots], and each segment at its own loop."""
        reads, outer = self._planes.reads(slots, loops), self._layout.outer
        lists = [outer + s.loop % self._layout.prompt_planes(s.request.loops) for s in segments]
        return self._batch(reads.tables, reads.counts, reads.write, segments, lists)

    def outer(self, page_list: int, slots: Tensor, segments: Sequence[PromptSegment]) -> TickBatch:
        """All rows in the outer list `page_list`, where a row reads every position up to its own."""
        position = self._slots.position[slots]
        longest = int(position.max()) + 1 if len(slots) else 0
        tables = self._table[slots, page_list, : -(-longest // self._page_size)]
        write = flat_positions(tables, position, self._page_size)
        return self._batch(tables[:, None], position[:, None] + 1, write, segments, [page_list] * len(segments))

    def _batch(
        self, tables: Tensor, counts: Tensor, write: Tensor, segments: Sequence[PromptSegment], lists: Sequence[int]
    ) -> TickBatch:
        """A batch of decode rows that read and write so, and of segments in page lists `lists`."""
        size, row, writes, spans = self._page_size, len(write), [write], []
        for segment, page_list in zip(segments, lists, strict=True):
            count = len(segment.rows)
            length = segment.first + count
            pages = self._table[segment.slot, page_list, : -(-length // size)]
            span = torch.arange(segment.first, length, device=pages.device)
            writes.append(pages[span // size] * size + span % size)
            spans.append(PromptSpan(row, count, length, pages))
            row += count
        return TickBatch(torch.cat(writes), tables, counts, tuple(spans))


class OuterAttention:
    """`Attend` of rows in the outer layers, whose order it relies on; see `ModelSpec.outer_lists`."""

    def __init__(
        self,
        backend: AttentionBackend,
        batches: Batches,
        layers: int,
        slots: Tensor,
        segments: Sequence[PromptSegment],
    ) -> None:
        """`layers`: how many layers a page has room for."""
        self._backend = backend
        self._batches = batches
        self._layers = layers
        self._rows = slots, segments
        self._page_list = -1

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        page_list, pool_layer = divmod(layer, self._layers)
        if page_list != self._page_list:
            self._page_list = page_list
            self._backend.begin(self._batches.outer(page_list, *self._rows))
        return self._backend.attend(pool_layer, query, key, value)
