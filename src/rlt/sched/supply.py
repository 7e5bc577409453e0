"""Which request has which pages: growth, the prefix cache, and giving back. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlt.kv.book import Missing, PageBook
from rlt.kv.layout import Layout
from rlt.kv.pages import PagePool
from rlt.kv.prefix import Block, Chain, PrefixCache
from rlt.sched.plan import PageGrant
from rlt.sched.request import Request, Stage


class PageSupply:
    """Moves pages between the pool, the requests' page lists and the prefix cache.

    `ahead`: how many ticks beyond the known results a decoding request is supplied for. `early_exits`: whether the
    exit rule can stop tokens also where the threshold is 1 or more. `seeded`: prompt tokens start from states that
    depend on the request's seed, so only requests of one seed share blocks.
    """

    def __init__(
        self,
        *,
        pool: PagePool,
        prefix: PrefixCache | None,
        layout: Layout,
        book: PageBook,
        page_size: int,
        ahead: int,
        early_exits: bool,
        seeded: bool = False,
    ) -> None:
        self.pool = pool
        self.prefix = prefix
        self.layout = layout
        self.book = book
        self.page_size = page_size
        self._ahead = ahead
        self._early_exits = early_exits
        self._seeded = seeded

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
        request.prompt_lists = self.layout.prompt_lists(request.loops)
        request.lists = [[] for _ in range(request.prompt_lists)]
        if self.prefix is None:
            return
        blocks = self.prefix.match(self._chain(self.prefix, request))
        self.prefix.acquire(blocks)
        request.blocks = dict(enumerate(blocks))
        for index, pages in enumerate(request.lists):
            pages.extend(block.pages[index] for block in blocks)
        request.offered = len(blocks)
        request.started = request.cached_tokens = len(blocks) * self.page_size

    def prompt_need(self, request: Request) -> int:
        """Pages that the whole prompt of a waiting request would take now; what is cached of it is not touched."""
        cached = 0 if self.prefix is None else len(self.prefix.match(self._chain(self.prefix, request)))
        return self.layout.prompt_lists(request.loops) * (self.pages_for(len(request.prompt)) - cached)

    def _chain(self, prefix: PrefixCache, request: Request) -> Chain:
        """The keys of the request's prompt, computed once."""
        if request.chain is None:
            params = request.params
            seed = params.seed if self._seeded else None
            request.chain = prefix.chain(request.prompt, request.loops, params.cache_salt, seed)
        return request.chain

    def forget_blocks(self, request: Request) -> None:
        """No other request may find the blocks of this one: numbers in them are not finite."""
        if self.prefix is not None:
            self.prefix.forget(request.blocks.values())

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
            if block is None:
                # Another request was first. Going on below its blocks without reading them would pin them unseen.
                request.chain = None
                return
            request.blocks[index] = block
            request.offered = index + 1

    def prompt_missing(self, request: Request, positions: int) -> int:
        """Pages that the first `positions` prompt tokens still lack."""
        return len(request.lists) * max(0, self.pages_for(positions) - len(request.lists[0]))

    def grow_prompt(self, request: Request, positions: int) -> list[PageGrant] | None:
        """Supply the first `positions` prompt tokens; None when pages are missing."""
        have = len(request.lists[0])
        places = range(have, max(have, self.pages_for(positions)))
        pages = self.take(len(places) * len(request.lists))
        if pages is None:
            return None
        grants, given = [], iter(pages)
        for index, pages_of_list in enumerate(request.lists):
            for place in places:
                page = next(given)
                grants.append(PageGrant(request.slot, index, place, page))
                pages_of_list.append(page)
        return grants

    # -- decoding ------------------------------------------------------------------------------------------------

    def begin_decode(self, request: Request) -> list[PageGrant]:
        """Turn the prompt's lists into those that decode tokens use; returns what changed in the page table."""
        loops, grants = request.loops, []
        kept = self.layout.kept_lists(loops)
        if self.layout.exit_sorted:
            request.lists.extend([] for _ in range(loops - 1))
        elif len(kept) < len(request.lists):
            for index, pages in enumerate(request.lists):
                if index not in kept:
                    self.pool.release(page for place, page in enumerate(pages) if place not in request.blocks)
            request.lists = [request.lists[index] for index in kept]
            for block in request.blocks.values():
                assert self.prefix is not None
                self.prefix.keep_lists(block, kept)
            request.tail = True
            grants = self.table(request)
        lists = self.layout.decode_lists(loops)
        request.used = [len(request.prompt)] * lists + [0] * (len(request.lists) - lists)
        self.open_book(request)
        return grants

    def open_book(self, request: Request) -> None:
        """Keep book of the page lists of a request that decodes from now on."""
        params, lists = request.params, self.layout.decode_lists(request.loops)
        # The last output token is never written.
        most = [len(request.prompt) + params.max_tokens - 1] * lists
        for depth in range(1, request.loops if self.layout.exit_sorted else 1):
            # Exited lists only fill where the rule may stop.
            reachable = depth >= params.min_loops and (self._early_exits or params.exit_threshold < 1.0)
            most.append(params.max_tokens if reachable else 0)
        pages = list(map(len, request.lists))
        self.book.open(request.slot, used=request.used[: len(most)], most=most, pages=pages, loops=request.loops)

    def advance_suspended(self, request: Request, depth: int) -> None:
        """A late result: a token of a suspended request exited after `depth` loops, before its state was copied."""
        if not self.layout.exit_sorted:
            request.used = [used + 1 for used in request.used]
            return
        outer, last = self.layout.outer, depth - 1
        for index in range(outer + last):
            request.used[index] += 1
        request.used[outer + (request.loops + last if depth < request.loops else last)] += 1

    def missing(self) -> list[Missing]:
        """Pages that decoding requests lack for the next tick, whatever the ticks under way turn out to do."""
        return self.book.missing(self._ahead)

    def missing_of(self, request: Request) -> list[Missing]:
        return self.book.missing_in(request.slot, self._ahead)

    def fill(self, missing: list[Missing], by_slot: Mapping[int, Request]) -> list[PageGrant] | None:
        """Supply all that is missing, or nothing and return None."""
        pages = self.take(sum(entry.pages for entry in missing))
        if pages is None:
            return None
        grants, given = [], iter(pages)
        for slot, page_list, count in missing:
            pages_of_list = by_slot[slot].lists[page_list]
            for _ in range(count):
                page = next(given)
                grants.append(PageGrant(slot, page_list, len(pages_of_list), page))
                pages_of_list.append(page)
            self.book.supply(slot, page_list, count)
        return grants

    # -- both ----------------------------------------------------------------------------------------------------

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
        """Pages that the request may own at most, from now on, if nothing of it is cached."""
        prompt = len(request.prompt)
        left = 0 if request.stage is Stage.DECODE else prompt
        return self.layout.most_pages(prompt + request.params.max_tokens, left, request.loops, self.page_size)

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
