"""Where decode rows write their keys and values, and which page lists they read, under each layout.

A *read* of a row is a set of page lists with a count each: the first `count` positions of a list's pages. Attention is
a sum over keys in any order, so nothing else is needed. Page lists are counted from the first plane on here: the outer
lists before them (`rlt.exec.batches`) follow no layout.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlt.attention.interface import KvPool
from rlt.exec.slots import PageTable, Slots
from rlt.kv.layout import Layout


class Reads(NamedTuple):
    """`tables` [rows, lists, places] page numbers, `counts` [rows, lists] positions, `write` [rows] flat positions."""

    tables: Tensor
    counts: Tensor
    write: Tensor


class Planes(Protocol):
    def begin(self, slots: Tensor) -> None:
        """The prompts of `slots` [rows] are through: output tokens follow."""

    def reads(self, slots: Tensor, loops: Tensor) -> Reads:
        """What one row of each of `slots` at `loops` (both [rows]) reads and writes."""

    def passed(self, slots: Tensor, loops: Tensor, exits: Tensor) -> None:
        """Rows of `slots` ended their pass at `loops`; `exits` is the mask of those whose token leaves the loops."""


def make_planes(layout: Layout, slots: Slots, pages: PageTable, pool: KvPool, loops: int) -> Planes:
    if layout.exit_sorted:
        return ExitSortedPlanes(layout, slots, pages, pool, loops)
    return CopiedPlanes(layout, slots, pages, pool)


class CopiedPlanes:
    """One list per plane, in order of position. A token that exits early is copied into the planes it did not reach.

    With k planes, loop d uses plane d mod k (a plane then holds the latest loop that was congruent to it). Without a
    cycle a query at loop d so reads version min(d, exit depth) of every token by reading plane d alone.
    """

    def __init__(self, layout: Layout, slots: Slots, pages: PageTable, pool: KvPool) -> None:
        self._slots, self._table, self._pool = slots, pages.table[:, layout.outer :], pool
        self._cycle = self._table.shape[1] if layout.cycle is None else layout.cycle

    def begin(self, slots: Tensor) -> None:
        pass

    def reads(self, slots: Tensor, loops: Tensor) -> Reads:
        position = self._slots.position[slots]
        tables = self._table[slots, loops % self._cycle]
        longest = int(position.max()) + 1 if len(slots) else 0
        tables = tables[:, None, : -(-longest // self._pool.page_size)]
        return Reads(tables, position[:, None] + 1, flat_positions(tables[:, 0], position, self._pool.page_size))

    def passed(self, slots: Tensor, loops: Tensor, exits: Tensor) -> None:
        slots, loops = slots[exits], loops[exits]
        planes = self._slots.max_loops[slots].clamp(max=self._cycle)
        plane = torch.arange(self._table.shape[1], device=slots.device)
        which, target = ((plane > loops[:, None]) & (plane < planes[:, None])).nonzero(as_tuple=True)
        if len(which) == 0:
            return
        slot, position, size = slots[which], self._slots.position[slots][which], self._pool.page_size
        source = flat_positions(self._table[slot, loops[which]], position, size)
        self._pool.copy(source, flat_positions(self._table[slot, target], position, size))


class ExitSortedPlanes:
    """Each plane keeps the tokens that exited there apart from those that went deeper: memory follows the depth.

    A row at loop d writes at the end of plane d's list. If its token stays there, the entry moves to the plane's
    exited list (list `max_loops + d`); the last plane needs none. A query at loop d reads the exited lists of planes
    0 to d and the list of plane d: version min(d, exit depth) of every token, without copies.
    """

    def __init__(self, layout: Layout, slots: Slots, pages: PageTable, pool: KvPool, loops: int) -> None:
        self._slots, self._table, self._pool = slots, pages.table[:, layout.outer :], pool
        #: entries of each plane's list, and of its exited list
        self._deeper = slots.add("deeper", torch.int64, (loops,))
        self._exited = slots.add("exited", torch.int64, (max(loops - 1, 1),))
        self._planes = torch.arange(self._exited.shape[1], device=slots.device)

    def begin(self, slots: Tensor) -> None:
        self._deeper[slots] = self._slots.position[slots][:, None]

    def reads(self, slots: Tensor, loops: Tensor) -> Reads:
        size, last = self._pool.page_size, self._slots.max_loops[slots]
        own = self._deeper[slots, loops]
        exited = self._exited[slots]
        exited = exited.where(self._planes <= loops[:, None], 0)
        counts = torch.cat([exited, own[:, None] + 1], dim=1)
        longest = int(counts.max()) if len(slots) else 0
        places = -(-longest // size)
        # Lists that a request with a lower loop limit does not have are read with count 0.
        lists = (last[:, None] + self._planes).clamp(max=self._table.shape[1] - 1)
        lists = torch.cat([lists, loops[:, None]], dim=1)
        tables = self._table[slots[:, None], lists, :places]
        return Reads(tables, counts, flat_positions(tables[:, -1], own, size))

    def passed(self, slots: Tensor, loops: Tensor, exits: Tensor) -> None:
        stays = exits & (loops < self._slots.max_loops[slots] - 1)
        slot, loop = slots[stays], loops[stays]
        if len(slot):
            size, last = self._pool.page_size, self._slots.max_loops[slot]
            place = self._exited[slot, loop]
            source = flat_positions(self._table[slot, loop], self._deeper[slot, loop], size)
            self._pool.copy(source, flat_positions(self._table[slot, last + loop], place, size))
            self._exited[slot, loop] = place + 1
        self._deeper[slots, loops] += (~stays).long()


def flat_positions(tables: Tensor, position: Tensor, page_size: int) -> Tensor:
    """Flat pool positions [rows] of `position` [rows] under page lists [rows, places]."""
    page = tables.gather(1, (position // page_size)[:, None])[:, 0]
    return page * page_size + position % page_size
