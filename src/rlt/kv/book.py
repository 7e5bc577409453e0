"""How full the page lists of decoding requests are, for all slots at once. numpy, no torch.

One row per slot and one column per page list. Results of a tick advance many rows in a few array operations, and the
rows that need pages are found the same way, so the cost of a tick hardly depends on how many requests run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlt.kv.layout import Layout

Ints = NDArray[np.int64]


class Missing(NamedTuple):
    """Page list `page_list` of `slot` lacks `pages` pages."""

    slot: int
    page_list: int
    pages: int


class PageBook:
    """Positions used, supplied and possible at most, per (slot, page list); all zero for slots that do not decode."""

    def __init__(self, layout: Layout, slots: int, loops: int, page_size: int) -> None:
        shape = (slots, layout.lists(loops))
        self._layout = layout
        self._page_size = page_size
        self._used: Ints = np.zeros(shape, np.int64)
        self._supplied: Ints = np.zeros(shape, np.int64)
        self._most: Ints = np.zeros(shape, np.int64)
        self._loops: Ints = np.zeros(slots, np.int64)
        #: columns that a token of enough loops adds to, as planes: those below 0 are the outer lists
        self._planes: Ints = np.arange(-layout.outer, loops, dtype=np.int64)

    def open(self, slot: int, *, used: Sequence[int], most: Sequence[int], pages: Sequence[int], loops: int) -> None:
        """A request decodes in `slot`: positions used and at most, and pages, of each of its lists."""
        count = len(used)
        self._used[slot, :count] = used
        self._most[slot, :count] = most
        self._supplied[slot, :count] = np.multiply(pages, self._page_size)
        self._loops[slot] = loops

    def close(self, slot: int) -> list[int]:
        """The slot's request leaves; returns the positions used of every list."""
        used: list[int] = self._used[slot].tolist()
        for array in (self._used, self._supplied, self._most):
            array[slot] = 0
        return used

    def supply(self, slot: int, page_list: int, pages: int) -> None:
        self._supplied[slot, page_list] += pages * self._page_size

    def advance(self, slots: Sequence[int], depths: Sequence[int]) -> None:
        """One token of each of `slots` (all different) exited after `depths` loops."""
        rows, last = np.array(slots, np.int64), np.array(depths, np.int64) - 1
        if not self._layout.exit_sorted:
            self._used[rows] += 1
            return
        outer, loops = self._layout.outer, self._loops[rows]
        self._used[rows[:, None], self._planes + outer] += self._planes < last[:, None]
        # The last plane has no exited list: its own list takes what ends there.
        self._used[rows, outer + np.where(last < loops - 1, loops + last, last)] += 1

    def missing(self, ahead: int) -> list[Missing]:
        """What decoding slots lack to write `ahead` more positions in any of their lists."""
        lack = np.minimum(self._used + ahead, self._most) - self._supplied
        slots, lists = np.nonzero(lack > 0)
        pages = -(-lack[slots, lists] // self._page_size)
        return list(map(Missing, slots.tolist(), lists.tolist(), pages.tolist()))

    def missing_in(self, slot: int, ahead: int) -> list[Missing]:
        """The same for one slot."""
        lack = np.minimum(self._used[slot] + ahead, self._most[slot]) - self._supplied[slot]
        (lists,) = np.nonzero(lack > 0)
        pages = -(-lack[lists] // self._page_size)
        return [
            Missing(slot, page_list, count) for page_list, count in zip(lists.tolist(), pages.tolist(), strict=True)
        ]
