"""The page pool: which pages are free, and who owns the others. No torch here.

Page 0 is never handed out: it is the dummy page that padding rows and masked keys point at.
"""

from __future__ import annotations

from collections.abc import Iterable

DUMMY_PAGE = 0


class OutOfPages(Exception):
    """More pages were asked for than are free; the caller checks `free` first, so this is our own bug."""


class PagePool:
    """Hands out page numbers 1..pages. Last freed, first used again, so that little memory is ever touched."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

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
        self._free.extend(pages)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Assert that `owned` (the pages of every owner, in any order) and the free pages are all pages, each once."""
        everything = sorted([*self._free, *owned])
        assert everything == list(range(1, self.total + 1)), "free and owned pages are not all pages exactly once"
