"""The page pool: which pages are free, and which wait for the ticks that may still touch them. No torch here.

Page 0 is never handed out: it is the dummy page that padding rows and masked keys point at. Every other page is in
exactly one place: free, resting, owned by one request, or in a block of the prefix cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

DUMMY_PAGE = 0


class OutOfPages(Exception):
    """More pages were asked for than are free; callers check `free` first, so this is our own bug."""


class PagePool:
    """Hands out page numbers 1..total. Last freed, first used again, so that little memory is ever touched.

    A released page rests until every tick that was submitted before has ended: `submitted` and `ended` move the two
    marks. Without ticks under way a released page is free at once.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages, 0, -1))
        self._resting: deque[tuple[int, list[int]]] = deque()
        self._resting_count = 0
        self._submitted = 0
        self._ended = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def resting(self) -> int:
        """Pages that become free when the ticks under way end."""
        return self._resting_count

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def allocate(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfPages(f"{count} pages asked for, {len(self._free)} free")
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        pages.reverse()
        return pages

    def release(self, pages: Iterable[int]) -> None:
        if self._submitted == self._ended:
            self._free.extend(pages)
            return
        resting = list(pages)
        self._resting.append((self._submitted, resting))
        self._resting_count += len(resting)

    def submitted(self, tick: int) -> None:
        """Tick number `tick` is about to run with the page tables as they are now."""
        self._submitted = tick

    def ended(self, tick: int) -> None:
        """Tick `tick` and all before it have ended."""
        self._ended = tick
        while self._resting and self._resting[0][0] <= tick:
            _, pages = self._resting.popleft()
            self._resting_count -= len(pages)
            self._free.extend(pages)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Assert that free, resting and `owned` pages (of every owner, in any order) are all pages, each once."""
        resting = [page for _, pages in self._resting for page in pages]
        assert len(resting) == self._resting_count
        everything = sorted([*self._free, *resting, *owned])
        assert everything == list(range(1, self.total + 1)), "free, resting and owned pages are not all pages once"
