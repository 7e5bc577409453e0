"""Which request has which pages: growth, the prefix cache, and giving back. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from rlt.kv.layout import Layout
from rlt.kv.pages import PagePool
from rlt.kv.prefix import Block, PrefixCache
from rlt.sched.plan import PageGrant
from rlt.sched.request import Request, Stage


class PageSupply:
    """Moves pages between the pool, the requests' page lists and the prefix cache.

    `ahead`: how many ticks beyond the known results a decoding request is supplied for. `early_exits`: whether the
    exit rule can stop tokens also where the threshold is 1 or more.
    """

    def __init__(
        self,
        *,
        pool: PagePool,
        prefix: PrefixCache | None,
        layout: Layout,
        page_size: int,
        ahead: int,
        early_exits: bool,
    ) -> None:
        self.pool = pool
        self.prefix = prefix
        self.layout = layout
        self.page_size = page_size
        self._ahead = ahead
        self._early_exits = early_exits

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    @property
    def available(self) -> int:
        """Pages that are free now, soon, or when the prefix cache gives way."""
        return self.pool.free + self.pool.resting + (self.prefix.evictable if self.prefix else 0)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None when they are not there (yet): evicted pages may rest for a tick."""
        if self.pool.free < count and self.prefix is not None:
            self.prefix.evict(count - self.pool.free - self.pool.resting)
        return self.pool.allocate(count) if self.pool.free >= count else None

    # -- the prompt ----------------------------------------------------------------------------------------------

    def find_cached(self, request: Request) -> None:
        """Start the prompt with what the prefix cache has of it."""
        request.lists = [[] for _ in range(self.layout.prompt_planes(request.loops))]
        if self.prefix is None:
            return
        if request.chain is None:
            request.chain = self.prefix.chain(request.prompt, request.loops, request.params.cache_salt)
        blocks = self.prefix.match(request.chain)
        self.prefix.acquire(blocks)
        request.blocks = dict(enumerate(blocks))
        for plane, pages in enumerate(request.lists):
            pages.extend(block.pages[plane] for block in blocks)
        request.offered = len(blocks)
        request.started = request.cached_tokens = len(blocks) * self.page_size

    def forget_cached(self, request: Request) -> None:
        """Undo `find_cached` for a request that does not get its place yet."""
        self._release_blocks(request)
        request.lists = []
        request.started = request.cached_tokens = request.offered = 0

    def offer_blocks(self, request: Request, positions: int) -> None:
        """Give the cache the full blocks among the first `positions` prompt tokens, which are complete."""
        if self.prefix is None or request.chain is None:
            return
        for index in range(request.offered, positions // self.page_size):
            block = self.prefix.insert(request.chain, index, [pages[index] for pages in request.lists])
            if block is not None:
                request.blocks[index] = block
            request.offered = index + 1

    def prompt_missing(self, request: Request, positions: int) -> int:
        """Pages that the first `positions` prompt tokens still lack."""
        return len(request.lists) * max(0, self.pages_for(positions) - len(request.lists[0]))

    def grow_prompt(self, request: Request, positions: int) -> list[PageGrant] | None:
        """Supply the first `positions` prompt tokens; None when pages are missing."""
        need = self.pages_for(positions)
        return self._grow(request, [(index, need) for index in range(len(request.lists))])

    # -- decoding ------------------------------------------------------------------------------------------------

    def begin_decode(self, request: Request) -> list[PageGrant]:
        """Turn the prompt's planes into those that decode tokens use; returns what changed in the page table."""
        loops = request.loops
        if self.layout.exit_sorted:
            request.lists.extend([] for _ in range(loops - 1))
            request.exits = [0] * (loops + 1)
            return []
        request.exits = [0] * (loops + 1)
        kept = self.layout.kept_planes(loops)
        if len(kept) == len(request.lists):
            return []
        for index, pages in enumerate(request.lists):
            if index not in kept:
                self.pool.release(page for place, page in enumerate(pages) if place not in request.blocks)
        request.lists = [request.lists[plane] for plane in kept]
        for block in request.blocks.values():
            assert self.prefix is not None
            self.prefix.keep_planes(block, kept)
        request.tail = True
        return self.table(request)

    def decode_missing(self, request: Request) -> int:
        return sum(max(0, need - len(request.lists[index])) for index, need in self._decode_needs(request))

    def grow_decode(self, request: Request) -> list[PageGrant] | None:
        """Supply what the next tick may write; None when pages are missing."""
        return self._grow(request, self._decode_needs(request))

    def slack(self, request: Request) -> int:
        """Further ticks for which the pages of a decoding request are sure to suffice."""
        slack = request.params.max_tokens * request.loops
        for index, pages in enumerate(request.lists):
            capacity = len(pages) * self.page_size
            if capacity < request.most(index) and self._reachable(request, index):
                slack = min(slack, capacity - request.needs(index, self._ahead))
        return slack

    def _decode_needs(self, request: Request) -> list[tuple[int, int]]:
        return [
            (index, self.pages_for(request.needs(index, self._ahead)))
            for index in range(len(request.lists))
            if self._reachable(request, index)
        ]

    def _reachable(self, request: Request, page_list: int) -> bool:
        """Whether output tokens can get into the list: exited lists only fill where the rule may stop."""
        if page_list < request.loops:
            return True
        depth = page_list - request.loops + 1
        return depth >= request.params.min_loops and (self._early_exits or request.params.exit_threshold < 1.0)

    # -- both ----------------------------------------------------------------------------------------------------

    def _grow(self, request: Request, needs: Iterable[tuple[int, int]]) -> list[PageGrant] | None:
        places = [(index, place) for index, need in needs for place in range(len(request.lists[index]), need)]
        pages = self.take(len(places))
        if pages is None:
            return None
        grants = []
        for (index, place), page in zip(places, pages, strict=True):
            request.lists[index].append(page)
            grants.append(PageGrant(request.slot, index, place, page))
        return grants

    def table(self, request: Request) -> list[PageGrant]:
        """The request's whole page table."""
        return [
            PageGrant(request.slot, index, place, page)
            for index, pages in enumerate(request.lists)
            for place, page in enumerate(pages)
        ]

    def drop(self, request: Request) -> None:
        """Take everything back."""
        self.pool.release(request.own_pages())
        self._release_blocks(request)
        request.lists = []

    def _release_blocks(self, request: Request) -> None:
        for block in request.blocks.values():
            assert self.prefix is not None
            self.prefix.release(block, tail=request.tail)
        request.blocks = {}
        request.tail = False

    def most_pages(self, request: Request) -> int:
        """Pages that the request may own at most if nothing of it is cached."""
        tokens = len(request.prompt) + request.params.max_tokens
        return self.layout.most_pages(tokens, len(request.prompt), request.loops, self.page_size)

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Assert that every page is in exactly one place and every block is held by those who say so."""
        running = list(running)
        owned = [page for request in running for page in request.own_pages()]
        if self.prefix is not None:
            readers: dict[Block, int] = {}
            tails: dict[Block, int] = {}
            for request in running:
                for block in request.blocks.values():
                    counts = tails if request.tail else readers
                    counts[block] = counts.get(block, 0) + 1
            self.prefix.check_integrity(readers, tails)
            owned.extend(self.prefix.held())
        self.pool.check_integrity(owned)
        assert all(not request.lists for request in running if request.stage is Stage.SUSPENDED)
