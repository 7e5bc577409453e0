"""The prefix cache: prompt pages that outlive their request, found again by what they hold. No torch here.

A *block* is `page_size` consecutive prompt tokens at a page-aligned position, with one page per page list of the
prompt: its planes, and the lists of layers outside of the loops. Blocks are immutable and form trees: the parent of a
block holds the tokens before it. Every page of the pool is free, owned by one request, or in one block.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from heapq import heapify, heappop, heappush
from itertools import chain as concatenate
from typing import NamedTuple

from rlt.kv.pages import PagePool


class Chain(NamedTuple):
    """The keys of a prompt's full blocks; a request computes them once."""

    keys: tuple[bytes, ...]
    #: blocks that may come from the cache: never all of the prompt, since its last token must run to be sampled from
    matchable: int


@dataclass(slots=True, eq=False)
class Block:
    key: bytes
    parent: Block | None
    #: by page list; once the block has lost its key, the pages of `kept` alone, in the order of the lists
    pages: list[int]
    #: when a reader or tail reader left for the last time; before that nobody asks
    last_used: int = 0
    children: int = 0
    #: requests that need every page list
    readers: int = 0
    #: requests that are past their prefill and need the lists `kept` alone
    tails: int = 0
    kept: tuple[int, ...] = ()
    #: readers, plus children with pins: 0 means that nobody needs all pages of this block or of any block below it
    pins: int = 0
    #: whether `match` can find it
    keyed: bool = True

    @property
    def spare(self) -> int:
        """Pages that an eviction of this block would give back."""
        return len(self.pages) - (len(self.kept) if self.tails else 0)


class PrefixCache:
    """Holds the blocks. Readers are counted, not known: requests remember which blocks they hold.

    A caller whose block was refused by `insert`, because another had inserted an equal one, keeps its own pages, and
    could insert deeper blocks below the equal one *without reading it* (the engine does not: it stops offering). So a
    block without readers may have descendants with readers; `Block.pins` carries that fact upwards. The blocks with
    `pins == 0` are closed under "descendant of", so all of them can be evicted, leaves first, and `evictable` is the
    sum of their spare pages.
    """

    def __init__(self, pool: PagePool, page_size: int, fingerprint: str, layout: str) -> None:
        self._pool = pool
        self._page_size = page_size
        self._fingerprint = fingerprint
        self._layout = layout
        self._blocks: dict[bytes, Block] = {}
        #: without a key, but with tail readers
        self._stripped: set[Block] = set()
        # Heap of (last_used, key), at least one entry for each leaf without readers. Entries go stale in place and are
        # skipped when they surface: one is current iff its block is such a leaf and was not used since.
        self._leaves: list[tuple[int, bytes]] = []
        self._clock = 0
        self._evictable = 0
        self._pages_held = 0

    # -- finding -------------------------------------------------------------------------------------------------

    def chain(self, prompt: Sequence[int], loops: int, salt: str | None, seed: int | None = None) -> Chain:
        """The keys under which the blocks of this prompt are found, equal in every process. Tokens fit into 32 bits.

        `seed` is the request's where prompt tokens start from seeded states, else None.
        """
        # JSON, because joined strings would be ambiguous; it also tells None from "null".
        key = sha256(json.dumps([self._fingerprint, self._layout, loops, salt, seed]).encode()).digest()
        count = len(prompt) // self._page_size
        packed = struct.pack(f"<{count * self._page_size}i", *prompt[: count * self._page_size])
        width = 4 * self._page_size
        keys = []
        for start in range(0, len(packed), width):
            key = sha256(key + packed[start : start + width]).digest()
            keys.append(key)
        return Chain(tuple(keys), max(0, len(prompt) - 1) // self._page_size)

    def match(self, chain: Chain) -> list[Block]:
        """The longest cached start of the prompt, first block first. Takes no references."""
        found = []
        for key in chain.keys[: chain.matchable]:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    # -- references ----------------------------------------------------------------------------------------------

    def acquire(self, blocks: Sequence[Block]) -> None:
        """Make the caller a reader of blocks that `match` returned just now."""
        for block in blocks:
            assert block.keyed, "a block was acquired after its eviction"
            block.readers += 1
            self._pin(block)

    def insert(self, chain: Chain, index: int, pages: Sequence[int]) -> Block | None:
        """Offer the prompt's block `index`, complete in all page lists; `pages` has one page of each.

        Returns the new block: its pages are the cache's now, and the caller is its reader. Or None: the pages stay the
        caller's, because an equal block is there already, or because the block before it is not (only possible when
        that one was refused too: the caller would read it otherwise).

        A caller that is refused should offer no more: below a block that it does not read, its own would pin pages
        that others count as evictable.
        """
        key = chain.keys[index]
        parent = self._blocks.get(chain.keys[index - 1]) if index else None
        if key in self._blocks or (index and parent is None):
            return None
        block = self._blocks[key] = Block(key, parent, list(pages), readers=1, pins=1)
        self._pages_held += len(pages)
        if parent is not None:
            parent.children += 1
            self._pin(parent)
        return block

    def keep_lists(self, block: Block, kept: Sequence[int]) -> None:
        """Turn a reader into a tail reader, which needs only the page lists `kept` until it leaves.

        For layouts that read fewer lists after the prefill than during it. `kept` depends on layout and loop limit
        alone. A request that needs all lists stays a reader.
        """
        lists = tuple(sorted(kept))
        assert 0 < len(lists) < len(block.pages), "a tail reader keeps some pages and spares some"
        assert block.kept in {(), lists}, "tail readers of a block differ in the lists that they keep"
        block.kept = lists
        # Counted as a tail first, so that the kept pages are never evictable in between.
        block.tails += 1
        self._leave(block)

    def release(self, block: Block, *, tail: bool) -> None:
        """A reader or a tail reader leaves. The block stays in the cache, unless it lost its key: then it goes."""
        if not tail:
            self._leave(block)
            return
        assert block.tails > 0, "more tail readers left than came"
        block.tails -= 1
        if block.keyed:
            if block.tails == 0 and block.pins == 0:
                self._evictable += len(block.kept)
            self._touch(block)
        elif block.tails == 0:
            self._stripped.remove(block)
            self._give_back(block.pages)
            block.pages = []

    def _leave(self, block: Block) -> None:
        assert block.readers > 0, "more readers left than came"
        block.readers -= 1
        self._unpin(block)
        self._touch(block)

    # The walk up ends at the first ancestor that others pin: at the parent, for a request that reads its whole chain.

    def _pin(self, block: Block | None) -> None:
        while block is not None:
            block.pins += 1
            if block.pins > 1:
                return
            self._evictable -= block.spare
            block = block.parent

    def _unpin(self, block: Block | None) -> None:
        while block is not None:
            block.pins -= 1
            if block.pins > 0:
                return
            self._evictable += block.spare
            block = block.parent

    # -- eviction ------------------------------------------------------------------------------------------------

    @property
    def evictable(self) -> int:
        """Pages that `evict` could give back now. O(1)."""
        return self._evictable

    @property
    def pages_held(self) -> int:
        return self._pages_held

    def evict(self, count: int) -> int:
        """Give at least `count` pages back to the pool, or all that can be; returns how many.

        Takes leaves without readers, least recently used first.
        """
        freed = 0
        while freed < count and self._leaves:
            last_used, key = heappop(self._leaves)
            block = self._blocks.get(key)
            if block is not None and block.last_used == last_used and self._is_idle_leaf(block):
                freed += self._drop(block)
        return freed

    def reset(self) -> int:
        """Evict all that can be; returns the number of pages. Blocks with readers stay, and can still be matched."""
        return self.evict(self._evictable)

    def forget(self, blocks: Iterable[Block]) -> None:
        """Make `blocks` and all below them unfindable; their readers go on, and they are evicted like others."""
        doomed = {block for block in blocks if block.keyed}
        if not doomed:
            return
        for block in list(self._blocks.values()):
            above: Block | None = block
            while above is not None and above not in doomed:
                above = above.parent
            if above is not None:
                # A key that no prompt has. Below a doomed block all are doomed, so that none is found by its own key.
                del self._blocks[block.key]
                self._clock += 1
                block.key = b"forgotten" + self._clock.to_bytes(8)
                self._blocks[block.key] = block
                self._list_leaf(block)

    def _drop(self, block: Block) -> int:
        """Take an idle leaf out of the cache. Planes that tail readers need stay with it until they leave."""
        kept = block.kept if block.tails else ()
        spare = [page for index, page in enumerate(block.pages) if index not in kept]
        block.pages = [block.pages[index] for index in kept]
        del self._blocks[block.key]
        block.keyed = False
        if block.tails:
            self._stripped.add(block)
        parent, block.parent = block.parent, None
        if parent is not None:
            parent.children -= 1
            self._list_leaf(parent)
        self._evictable -= len(spare)
        self._give_back(spare)
        return len(spare)

    def _give_back(self, pages: Sequence[int]) -> None:
        self._pages_held -= len(pages)
        self._pool.release(pages)

    @staticmethod
    def _is_idle_leaf(block: Block) -> bool:
        return block.children == 0 and block.readers == 0

    def _touch(self, block: Block) -> None:
        self._clock += 1
        block.last_used = self._clock
        self._list_leaf(block)

    def _list_leaf(self, block: Block) -> None:
        if not self._is_idle_leaf(block):
            return
        heappush(self._leaves, (block.last_used, block.key))
        # Without evictions nothing would ever remove stale entries. Rebuilding at twice the size is O(1) amortised.
        if len(self._leaves) > 2 * len(self._blocks) + 16:
            self._leaves = [(each.last_used, each.key) for each in self._blocks.values() if self._is_idle_leaf(each)]
            heapify(self._leaves)

    # -- looking in ----------------------------------------------------------------------------------------------

    def held(self) -> Iterator[int]:
        """Every page in a block, for the account of the whole pool."""
        return concatenate.from_iterable(block.pages for block in (*self._blocks.values(), *self._stripped))

    def check_integrity(self, readers: Mapping[Block, int], tails: Mapping[Block, int]) -> None:
        """Assert that the counts are those of the owners given, and every total that is kept incrementally."""
        children = dict.fromkeys(self._blocks.values(), 0)
        pins = {block: block.readers for block in children}
        for key, block in self._blocks.items():
            assert block.keyed
            assert block.key == key
            if block.parent is not None:
                assert self._blocks.get(block.parent.key) is block.parent, "the parent of a block is gone"
                children[block.parent] += 1
                pins[block.parent] += block.pins > 0
        for block in (*children, *self._stripped):
            assert block.readers == readers.get(block, 0), "readers are not those who read"
            assert block.tails == tails.get(block, 0), "tail readers are not those who read"
            assert block.children == children.get(block, 0), "the count of children is wrong"
            assert block.pins == pins.get(block, 0), "pins are not readers plus pinned children"
        for block in self._stripped:
            assert block.parent is None
            assert not block.keyed
            assert block.tails > 0, "kept pages outlived their readers"
            assert len(block.pages) == len(block.kept)
        known = children.keys() | self._stripped
        assert known >= {block for counts in (readers, tails) for block, count in counts.items() if count}
        held = list(self.held())
        assert len(set(held)) == len(held) == self._pages_held, "a page is held twice, or the total is wrong"
        assert self._evictable == sum(block.spare for block in children if block.pins == 0)
        listed = set(self._leaves)
        assert all((block.last_used, block.key) in listed for block in children if self._is_idle_leaf(block))
