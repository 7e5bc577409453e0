"""The prefix cache against a naive one: whatever requests do, no page is lost and no wrong block is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlt.kv.pages import PagePool
from rlt.kv.prefix import Block, Chain, PrefixCache

TOTAL = 40
MAX_LOOPS = 4
#: which planes outlive the prefill
KEPT = {
    "last_exited": range,
    "last_step": lambda loops: [loops - 1],
    "cyclic:2": lambda loops: range(max(0, loops - 2), loops),
}

Prefix = tuple[int, str | None, tuple[int, ...]]


@dataclass
class Entry:
    """A cached block as the naive model sees it: it is found by the whole text before it, and knows its owners."""

    block: Block
    pages: list[int]
    kept: list[int]
    used: int = 0
    readers: int = 0
    tails: int = 0

    @property
    def spare(self) -> list[int]:
        return [page for plane, page in enumerate(self.pages) if not self.tails or plane not in self.kept]


class Model:
    def __init__(self) -> None:
        self.entries: dict[Prefix, Entry] = {}
        self.stripped: list[Entry] = []
        self.clock = 0

    def touch(self, entry: Entry) -> None:
        self.clock += 1
        entry.used = self.clock

    def entry(self, block: Block) -> Entry:
        return next(entry for entry in (*self.entries.values(), *self.stripped) if entry.block is block)

    def below(self, prefix: Prefix) -> list[Entry]:
        loops, salt, text = prefix
        return [
            entry
            for (other_loops, other_salt, other), entry in self.entries.items()
            if (other_loops, other_salt) == (loops, salt) and other[: len(text)] == text
        ]

    def evictable(self) -> int:
        idle = [entry for prefix, entry in self.entries.items() if not any(e.readers for e in self.below(prefix))]
        return sum(len(entry.spare) for entry in idle)

    def evict(self, count: int) -> int:
        freed = 0
        while freed < count:
            leaves = [p for p, entry in self.entries.items() if not entry.readers and len(self.below(p)) == 1]
            if not leaves:
                break
            entry = self.entries.pop(min(leaves, key=lambda prefix: self.entries[prefix].used))
            freed += len(entry.spare)
            entry.pages = [page for page in entry.pages if page not in entry.spare]
            if entry.tails:
                self.stripped.append(entry)
        return freed

    def held(self) -> list[int]:
        return [page for entry in (*self.entries.values(), *self.stripped) for page in entry.pages]


@dataclass(eq=False)
class Player:
    """A request: what it holds of each block of its prompt, the cache's block or pages of its own."""

    prompt: list[int]
    loops: int
    salt: str | None
    chain: Chain
    holds: list[Block | list[int]] = field(default_factory=list)
    tail: bool = False

    def blocks(self) -> list[Block]:
        return [hold for hold in self.holds if isinstance(hold, Block)]

    def own_pages(self) -> Iterator[int]:
        return (page for hold in self.holds if not isinstance(hold, Block) for page in hold)


class Play(RuleBasedStateMachine):
    @initialize(page_size=st.integers(1, 3), layout=st.sampled_from(sorted(KEPT)))
    def begin(self, page_size, layout):
        self.page_size = page_size
        self.layout = layout
        self.pool = PagePool(TOTAL)
        self.cache = PrefixCache(self.pool, page_size, "model", layout)
        self.model = Model()
        self.players: list[Player] = []

    def prefix(self, player: Player, index: int) -> Prefix:
        return player.loops, player.salt, tuple(player.prompt[: (index + 1) * self.page_size])

    def pick(self, data, *, prefilling: bool = False) -> Player:
        return data.draw(st.sampled_from([player for player in self.players if not (prefilling and player.tail)]))

    # Mostly the same text, loops and salt: what matters happens where requests meet in the cache.
    @rule(
        prompt=st.lists(st.sampled_from([0] * 7 + [1]), min_size=1, max_size=13),
        computed=st.integers(0, 5),
        loops=st.sampled_from([3] * 6 + [1, MAX_LOOPS]),
        salt=st.sampled_from([None] * 7 + ["None"]),
    )
    def start(self, prompt, computed, loops, salt):
        player = Player(prompt, loops, salt, self.cache.chain(prompt, loops, salt))
        found = self.cache.match(player.chain)
        expected = []
        while (len(expected) + 1) * self.page_size < len(prompt):
            entry = self.model.entries.get(self.prefix(player, len(expected)))
            if entry is None:
                break
            expected.append(entry)
        assert found == [entry.block for entry in expected]
        assert all(block.pages == entry.pages for block, entry in zip(found, expected, strict=True))
        self.cache.acquire(found)
        for entry in expected:
            entry.readers += 1
        player.holds.extend(found)
        self.players.append(player)
        self.compute(player, computed)

    def offer(self, player: Player, index: int, pages: list[int]) -> Block | list[int]:
        block = self.cache.insert(player.chain, index, pages)
        prefix = self.prefix(player, index)
        parented = index == 0 or self.prefix(player, index - 1) in self.model.entries
        assert (block is not None) == (parented and prefix not in self.model.entries)
        if block is None:
            return pages
        self.model.entries[prefix] = Entry(block, pages, list(KEPT[self.layout](player.loops)), readers=1)
        return block

    @precondition(lambda self: any(not player.tail for player in self.players))
    @rule(data=st.data(), count=st.integers(1, 5))
    def prefill(self, data, count):
        self.compute(self.pick(data, prefilling=True), count)

    def compute(self, player: Player, count: int) -> None:
        """The next blocks of a prompt are complete: in pages of its own, for which others may have to go."""
        for index in range(len(player.holds), min(len(player.holds) + count, len(player.chain.keys))):
            need = player.loops - self.pool.free
            if need > self.cache.evictable:
                return
            self.evict(need)
            player.holds.append(self.offer(player, index, self.pool.allocate(player.loops)))

    @precondition(lambda self: any(not player.tail for player in self.players))
    @rule(data=st.data())
    def offer_again(self, data):
        """What was refused may be welcome later, when the equal block is gone."""
        player = self.pick(data, prefilling=True)
        for index, hold in enumerate(player.holds):
            if not isinstance(hold, Block):
                player.holds[index] = self.offer(player, index, hold)

    @precondition(lambda self: any(not player.tail for player in self.players))
    @rule(data=st.data())
    def end_prefill(self, data):
        player = self.pick(data, prefilling=True)
        kept = list(KEPT[self.layout](player.loops))
        if len(kept) == player.loops:
            return
        player.tail = True
        for index, hold in enumerate(player.holds):
            if isinstance(hold, Block):
                self.cache.keep_lists(hold, kept)
                entry = self.model.entry(hold)
                entry.readers -= 1
                entry.tails += 1
                self.model.touch(entry)
            else:
                self.pool.release([page for plane, page in enumerate(hold) if plane not in kept])
                player.holds[index] = [hold[plane] for plane in kept]

    @precondition(lambda self: self.players)
    @rule(data=st.data())
    def leave(self, data):
        player = self.pick(data)
        for block in data.draw(st.permutations(player.blocks())):
            self.cache.release(block, tail=player.tail)
            entry = self.model.entry(block)
            entry.readers -= not player.tail
            entry.tails -= player.tail
            if entry in self.model.stripped and not entry.tails:
                self.model.stripped.remove(entry)
            self.model.touch(entry)
        self.pool.release(list(player.own_pages()))
        self.players.remove(player)

    @precondition(lambda self: self.cache.pages_held)
    @rule(count=st.sampled_from([-1, 0, 1, 1, 1, 2, 3, 6, TOTAL]))
    def evict(self, count):
        free, promised = self.pool.free, self.cache.evictable
        freed = self.cache.evict(count)
        assert freed == self.model.evict(count) == self.pool.free - free
        assert min(count, promised) <= freed <= promised
        assert freed < max(count, 0) + MAX_LOOPS, "evicted more than one block too many"

    @precondition(lambda self: self.cache.evictable > TOTAL // 2)
    @rule()
    def reset(self):
        promised = self.cache.evictable
        assert self.cache.reset() == self.model.evict(TOTAL) == promised
        assert self.cache.evictable == 0

    @invariant()
    def every_page_is_in_one_place(self):
        owned = [page for player in self.players for page in player.own_pages()]
        assert self.pool.free + len(owned) + self.cache.pages_held == TOTAL
        self.pool.check_integrity([*owned, *self.cache.held()])

    @invariant()
    def equals_the_model(self):
        assert sorted(self.cache.held()) == sorted(self.model.held())
        assert self.cache.evictable == self.model.evictable()
        readers = Counter(block for player in self.players if not player.tail for block in player.blocks())
        tails = Counter(block for player in self.players if player.tail for block in player.blocks())
        self.cache.check_integrity(readers, tails)

    def teardown(self):
        """When all have left, everything can be had back."""
        for player in self.players if hasattr(self, "players") else []:
            for block in player.blocks():
                self.cache.release(block, tail=player.tail)
            self.pool.release(list(player.own_pages()))
        if hasattr(self, "cache"):
            assert self.cache.evictable == self.cache.pages_held
            self.cache.reset()
            assert self.pool.free == TOTAL


Play.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPlay = Play.TestCase


def filled(prompt: list[int], *, loops: int = 2, page_size: int = 2, pages: int = 64, salt: str | None = None):
    """A cache that holds every full block of `prompt`, and the blocks, each read once."""
    cache = PrefixCache(PagePool(pages), page_size, "model", "last_exited")
    return cache, fill(cache, prompt, loops=loops, salt=salt)


def fill(cache: PrefixCache, prompt: list[int], *, loops: int = 2, salt: str | None = None) -> list[Block]:
    chain = cache.chain(prompt, loops, salt)
    blocks = [cache.insert(chain, index, cache._pool.allocate(loops)) for index in range(len(chain.keys))]
    assert None not in blocks
    return [block for block in blocks if block is not None]


def leave(cache: PrefixCache, blocks: list[Block]) -> None:
    for block in blocks:
        cache.release(block, tail=False)


@pytest.mark.parametrize(("length", "hits"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3), (9, 3)])
def test_the_last_prompt_token_is_always_recomputed(length, hits):
    cache, blocks = filled([1, 2, 3, 4, 5, 6])
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9][:length]
    assert cache.match(cache.chain(prompt, 2, None)) == blocks[:hits]


@pytest.mark.parametrize(
    ("prompt", "loops", "salt", "hits"),
    [
        ([1, 2, 3, 4, 5], 2, "a", 2),
        ([1, 2, 3, 9, 5], 2, "a", 1),
        ([1, 9, 3, 4, 5], 2, "a", 0),
        ([3, 4, 5], 2, "a", 0),
        ([0, 1, 2, 3, 4], 2, "a", 0),
        ([1, 2, 3, 4, 5], 3, "a", 0),
        ([1, 2, 3, 4, 5], 2, "b", 0),
        ([1, 2, 3, 4, 5], 2, "", 0),
        ([1, 2, 3, 4, 5], 2, None, 0),
    ],
)
def test_only_equal_blocks_match(prompt, loops, salt, hits):
    cache, blocks = filled([1, 2, 3, 4], salt="a")
    assert cache.match(cache.chain(prompt, loops, salt)) == blocks[:hits]


def test_keys_differ_wherever_anything_differs():
    """Also where the parts would be equal if they were joined as strings."""
    roots = [
        (fingerprint, layout, loops, salt)
        for fingerprint in ("m", "m1", 'm","l', "")
        for layout in ("l", "1l", 'l",1', "")
        for loops in (1, 11)
        for salt in (None, "", "null", "None", "1", '"', "\ud800")
    ]
    keys = set()
    for fingerprint, layout, loops, salt in roots:
        cache = PrefixCache(PagePool(1), 2, fingerprint, layout)
        for prompt in ([1, 2, 3, 4], [1, 3, 3, 4], [0x10000 + 1, 2, 3, 4], [2**31 - 1, 0, 3, 4]):
            keys.update(cache.chain(prompt, loops, salt).keys)
    assert len(keys) == len(roots) * 4 * 2


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8), st.integers(1, 3))
def test_a_key_stands_for_all_tokens_up_to_its_end(left, right, page_size):
    cache = PrefixCache(PagePool(1), page_size, "model", "last_exited")
    pairs = zip(cache.chain(left, 1, None).keys, cache.chain(right, 1, None).keys, strict=False)
    for index, (one, other) in enumerate(pairs):
        end = (index + 1) * page_size
        assert (one == other) == (left[:end] == right[:end])


def test_keys_are_the_same_in_every_process():
    chain = PrefixCache(PagePool(1), 2, "model", "last_exited").chain([1, 2, 3], 4, "salt")
    assert [key.hex()[:16] for key in chain.keys] == ["2fa9f47aaf1f0455"]


def test_seeds_part_blocks_where_they_count():
    cache = PrefixCache(PagePool(1), 2, "model", "last_exited")
    keys = {cache.chain([1, 2, 3], 4, None, seed).keys for seed in (None, 0, 1)}
    assert len(keys) == 3


def test_a_refused_block_leaves_its_pages_and_the_next_one_goes_below_the_equal_one():
    cache, [first] = filled([1, 2])
    chain = cache.chain([1, 2, 3, 4], 2, None)
    assert cache.insert(chain, 0, cache._pool.allocate(2)) is None
    second = cache.insert(chain, 1, cache._pool.allocate(2))
    assert second is not None
    assert second.parent is first
    # The one reader of `first` leaves; the reader of `second` still holds `first` in place without reading it.
    cache.release(first, tail=False)
    assert (cache.evictable, cache.evict(64)) == (0, 0)
    cache.check_integrity({second: 1}, {})
    cache.release(second, tail=False)
    assert (cache.evictable, cache.evict(64)) == (4, 4)


def test_pins_reach_every_ancestor_that_nobody_reads():
    cache, trunk = filled([1, 2, 3, 4, 5, 6])
    leave(cache, trunk)
    chain = cache.chain([1, 2, 3, 4, 5, 6, 7, 8], 2, None)
    assert cache.evictable == 6
    block = cache.insert(chain, 3, cache._pool.allocate(2))
    assert block is not None
    # The entry of the last trunk block among the leaves is stale now, although nothing touched that block.
    assert (cache.evictable, cache.evict(1)) == (0, 0)
    cache.check_integrity({block: 1}, {})
    cache.release(block, tail=False)
    assert cache.evictable == 8
    cache.check_integrity({}, {})
    assert cache.reset() == 8


def test_a_block_is_refused_when_the_one_before_it_is_gone():
    cache, blocks = filled([1, 2])
    chain = cache.chain([1, 2, 3, 4], 2, None)
    leave(cache, blocks)
    cache.reset()
    assert cache.insert(chain, 1, [63, 64]) is None


def test_eviction_takes_the_leaf_that_was_used_least_recently():
    cache, trunk = filled([1, 2])
    chains = {last: cache.chain([1, 2, last, last, 0], 2, None) for last in (3, 4, 5)}
    for chain in chains.values():
        block = cache.insert(chain, 1, cache._pool.allocate(2))
        assert block is not None
        cache.release(block, tail=False)
    leave(cache, trunk)
    blocks = cache.match(chains[3])
    cache.acquire(blocks)
    leave(cache, blocks)
    order = []
    while cache.evict(1):
        order.append([last for last, chain in chains.items() if len(cache.match(chain)) == 2])
    assert order == [[3, 5], [3], [], []]  # 4, then 5, then 3, which was read again, and the trunk at last


def test_tail_readers_keep_their_planes_and_nothing_else():
    cache, [block] = filled([1, 2], loops=4)
    chain = cache.chain([1, 2, 3], 4, None)
    pages = list(block.pages)
    cache.acquire([block])
    cache.keep_lists(block, [3, 1])
    assert cache.evictable == 0  # the other reader needs all planes
    cache.keep_lists(block, [1, 3])
    assert cache.match(chain) == [block]  # still whole
    assert (cache.evictable, cache.evict(1)) == (2, 2)
    assert block.pages == [pages[1], pages[3]]
    assert cache.match(chain) == []
    [again] = fill(cache, [1, 2], loops=4)  # its successor lives beside it
    assert cache.pages_held == 6
    cache.check_integrity({again: 1}, {block: 2})
    cache.release(block, tail=True)
    assert cache.pages_held == 6
    cache.release(block, tail=True)
    assert sorted(cache.held()) == sorted(again.pages)
    assert cache.match(chain) == [again]


def test_a_block_whose_tail_readers_left_is_whole_again():
    cache, [block] = filled([1, 2], loops=4)
    cache.acquire([block])
    cache.keep_lists(block, [3])
    cache.keep_lists(block, [3])
    assert cache.evictable == 3
    cache.release(block, tail=True)
    assert cache.evictable == 3
    cache.release(block, tail=True)
    assert (cache.evictable, cache.reset()) == (4, 4)


def test_references_without_eviction_do_not_pile_up():
    cache, blocks = filled([1, 2, 3, 4])
    still = fill(cache, [5, 6])
    leave(cache, [*still, *blocks])
    for _ in range(1000):
        cache.acquire(blocks)
        leave(cache, blocks)
    assert len(cache._leaves) < 32
    assert cache.evict(1) == 2
    assert not any(block.keyed for block in still), "a leaf that nobody touched was forgotten or came late"
    assert cache.reset() == 4


def test_wrong_use_is_caught():
    cache, [block] = filled([1, 2])
    with pytest.raises(AssertionError, match="keeps some pages"):
        cache.keep_lists(block, [0, 1])
    with pytest.raises(AssertionError, match="tail readers left"):
        cache.release(block, tail=True)
    cache.acquire([block])
    cache.keep_lists(block, [1])
    with pytest.raises(AssertionError, match="differ"):
        cache.keep_lists(block, [0])
    cache.release(block, tail=False)
    with pytest.raises(AssertionError, match="readers left"):
        cache.release(block, tail=False)
    cache.reset()
    with pytest.raises(AssertionError, match="after its eviction"):
        cache.acquire([block])


def test_check_integrity_sees_a_lost_reader_a_foreign_tail_and_a_page_held_twice():
    cache, [first, second] = filled([1, 2, 3, 4])
    everyone = {first: 1, second: 1}
    cache.check_integrity(everyone, {})
    with pytest.raises(AssertionError, match="readers are not"):
        cache.check_integrity({first: 1}, {})
    with pytest.raises(AssertionError, match="tail readers are not"):
        cache.check_integrity(everyone, {second: 1})
    with pytest.raises(AssertionError):
        cache.check_integrity({**everyone, Block(b"", None, []): 1}, {})
    second.pages[0] = first.pages[0]
    with pytest.raises(AssertionError, match="held twice"):
        cache.check_integrity(everyone, {})


def test_a_reset_leaves_what_is_read_and_what_is_above_it():
    cache, trunk = filled([1, 2, 3, 4])
    leaf = fill_below(cache, [1, 2, 3, 4, 5, 6])
    other = fill(cache, [9, 9])
    leave(cache, [trunk[1], leaf, *other])
    assert (cache.reset(), cache.pages_held) == (6, 2)
    assert cache.match(cache.chain([1, 2, 3, 4, 5], 2, None)) == [trunk[0]]
    cache.check_integrity({trunk[0]: 1}, {})
    leave(cache, [trunk[0]])
    assert (cache.reset(), cache.reset(), cache.pages_held) == (2, 0, 0)


def fill_below(cache: PrefixCache, prompt: list[int]) -> Block:
    """Insert the last block of `prompt` below those that are there."""
    chain = cache.chain(prompt, 2, None)
    block = cache.insert(chain, len(chain.keys) - 1, cache._pool.allocate(2))
    assert block is not None
    return block


def run_to_the_end(engine, outputs: dict[str, list]) -> None:
    while engine.has_work:
        for tokens in engine.step():
            outputs.setdefault(tokens.request_id, []).append(tokens)


def test_an_engine_resets_its_cache_between_two_ticks_of_a_request(make_engine):
    from rlt_protocols.params import SamplingParams, resolve

    engine = make_engine(kv={"page_size": 4})
    prompt = [5, 9, 3, 7, 8, 4, 6, 2, 11]
    params = resolve(
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), engine.info, len(prompt), random_seed=0
    )
    outputs: dict[str, list] = {}
    engine.add("first", prompt, params)
    run_to_the_end(engine, outputs)
    cached = engine.stats().kv_pages["cached"]
    assert cached > 0
    engine.add("reader", prompt, params)
    outputs["reader"] = [*engine.step(), *engine.step()]
    assert engine.stats().running == 1
    held = cached - engine.reset_prefix_cache()
    # Of a running request's blocks only pages that it does not read any more may go.
    assert 0 < held == engine.stats().kv_pages["cached"]
    run_to_the_end(engine, outputs)
    first, reader = ([t for o in outputs[name] for t in o.token_ids] for name in ("first", "reader"))
    assert first == reader
    assert outputs["reader"][0].cached_tokens == 8
    assert engine.reset_prefix_cache() > 0
    engine.check_integrity()
    assert engine.stats().kv_pages == {"free": 800, "used": 0, "cached": 0}
    engine.add("after", prompt, params)
    run_to_the_end(engine, outputs)
    assert outputs["after"][0].cached_tokens == 0


def test_an_engine_without_a_prefix_cache_has_nothing_to_reset(make_engine):
    assert make_engine(kv={"prefix_cache": False}).reset_prefix_cache() == 0
