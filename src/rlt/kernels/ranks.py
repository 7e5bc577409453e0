"""Choice among the tokens that top-k, top-p and min-p keep, without a sort.

All three keep a first part of the tokens in descending order. A first part is known by its mass, and its last token,
like the token that a uniform number picks, is found by a search over thresholds: how many tokens lie above, and how
much mass. For the kernels of `rlt.kernels.sampling`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weights_of(values, top, temperature):
    """Weights of logits, 1 for the largest one. Divided by a tiny temperature, they overflow only downwards."""
    return tl.exp(tl.div_rn(values - top, temperature))


@triton.jit
def pick_by_rank(
    logits,
    peaks,
    weights,
    ids,
    kept,
    share,
    least,
    u,
    mass,
    top,
    warmth,
    N,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The token at share `u` of the kept weights in descending order, equal ones in order of their ids."""
    wanted = share.to(tl.float64) * mass
    # Two passes over all logits give a bound that all kept weights are above.
    low, high, above, before = _whole_range()
    if kept > 0:
        for _ in tl.static_range(2):
            low, high, above, before = _narrow(
                logits, True, 0, kept.to(tl.float64), low, high, above, before, top, warmth, N, CHUNK, WAYS
            )
    elif share < 1:
        for _ in tl.static_range(2):
            low, high, above, before = _narrow(
                logits, True, 1, wanted, low, high, above, before, top, warmth, N, CHUNK, WAYS
            )
    if (least > 0) & (kept <= 0):
        # The mass that top-p takes its share of is that of all top-k tokens, min-p or not.
        low = tl.maximum(low, least.to(tl.int32, bitcast=True) - 1)
    cut = tl.sum(tl.maximum(low, 0), 0).to(tl.int32).to(tl.float32, bitcast=True)
    # What is above it, in order of the ids; mostly few. Everything else is a search among these.
    size = tl.sum(above, 0) * 0
    lowest = cut * 0 + 1.0
    for chunk in range(CHUNKS):
        if weights_of(tl.load(peaks + chunk), top, warmth) > cut:
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            values = tl.load(logits + index, mask=index < N, other=float("-inf")).to(tl.float32)
            weight = weights_of(values, top, warmth)
            over = (weight > cut).to(tl.int32)
            place = size + tl.cumsum(over, 0) - over
            tl.store(weights + place, weight, mask=over > 0)
            tl.store(ids + place, index, mask=over > 0)
            size += tl.sum(over, 0)
            lowest = tl.minimum(lowest, tl.min(tl.where(over > 0, weight, 1.0), 0))
    tl.debug_barrier()
    if kept > 0:
        level, over, heavier = _search(weights, 0, kept.to(tl.float64), low, top, warmth, size, CHUNK, WAYS)
        mass = heavier + (kept - over).to(tl.float64) * level
        wanted = share.to(tl.float64) * mass
    goal = mass
    if share < 1:
        level, over, heavier = _search(weights, 1, wanted, low, top, warmth, size, CHUNK, WAYS)
        # The token that crosses stays in. A level of 0, where the sum falls short by rounding, adds nothing.
        ties = tl.maximum(tl.ceil((wanted - heavier) / tl.maximum(level, 1e-60)), 1.0)
        goal = tl.minimum(goal, heavier + ties * level)
    if least > 0:
        below = (least.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
        levels = tl.zeros([WAYS], tl.float32) + below
        _, heavy = _above(weights, False, levels, top, warmth, size, CHUNK, WAYS)
        goal = tl.minimum(goal, tl.max(heavy, 0))
    # The most likely token, whose weight is 1, is always kept.
    target = u * tl.maximum(goal, 1.0)
    level, over, heavier = _search(weights, 2, target, low, top, warmth, size, CHUNK, WAYS)
    # Where sums round so that nothing is left, the last token with weight is meant.
    level = tl.maximum(level, lowest.to(tl.float64))
    rank = tl.minimum(tl.floor((target - heavier) / level), N * 1.0).to(tl.int32)
    seen = rank * 0
    token = rank * 0
    for start in range(0, size, CHUNK):
        place = start + tl.arange(0, CHUNK)
        equal = (tl.load(weights + place, mask=place < size, other=-1.0) == level.to(tl.float32)).to(tl.int32)
        number = seen + tl.cumsum(equal, 0) - equal
        index = tl.load(ids + place, mask=place < size, other=0)
        token = tl.maximum(token, tl.max(tl.where((equal > 0) & (number <= rank), index, 0), 0))
        seen += tl.sum(equal, 0)
    return token


@triton.jit
def _whole_range():
    """Where a search begins: -1, which no level is, the bits of 1, and what lies above 1, the largest weight: nothing.

    Levels are searched as the bits of float32 in 0 .. 1, which are in order.
    """
    low, high = tl.full([1], -1, tl.int32), tl.full([1], 0x3F800000, tl.int32)
    return low, high, tl.zeros([1], tl.int32), tl.zeros([1], tl.float64)


@triton.jit
def _search(weights, KIND: tl.constexpr, bound, low, top, warmth, size, CHUNK: tl.constexpr, WAYS: tl.constexpr):
    """The smallest level beyond `low` whose larger weights stay within `bound`, their number, and their mass.

    KIND 0: fewer weights than `bound`; 1: less mass; 2: no more mass. The level is 0 or one of the weights.
    """
    _, high, above, before = _whole_range()
    while tl.sum(high - low, 0) > 1:
        low, high, above, before = _narrow(
            weights, False, KIND, bound, low, high, above, before, top, warmth, size, CHUNK, WAYS
        )
    level = tl.sum(high, 0).to(tl.float32, bitcast=True)
    return level.to(tl.float64), tl.sum(above, 0), tl.sum(before, 0)


@triton.jit
def _narrow(
    source,
    RAW: tl.constexpr,
    KIND: tl.constexpr,
    bound,
    low,
    high,
    above,
    before,
    top,
    warmth,
    size,
    CHUNK: tl.constexpr,
    WAYS: tl.constexpr,
):
    """One pass: `low` is not within the bound and `high` is; `above` and `before` belong to `high`."""
    way = tl.arange(0, WAYS)
    bits = low + ((high - low).to(tl.int64) * (way + 1) // WAYS).to(tl.int32)
    # In a range smaller than the number of ways, the first ways are `low` itself, which may be -1.
    levels = tl.maximum(bits, 0).to(tl.float32, bitcast=True)
    counts, masses = _above(source, RAW, levels, top, warmth, size, CHUNK, WAYS)
    if KIND == 0:
        within = counts.to(tl.float64) < bound
    elif KIND == 1:
        within = masses < bound
    else:
        within = masses <= bound
    # What is known stays known, whatever sums round to.
    within = (within & (bits > low)) | (bits == high)
    outside = tl.sum(1 - within.to(tl.int32), 0)
    new_low = tl.maximum(low, tl.max(tl.where(way < outside, bits, -1), 0))
    new_high = tl.sum(tl.where(way == outside, bits, 0), 0) + high * 0
    above = tl.sum(tl.where(way == outside, counts, 0), 0) + above * 0
    before = tl.sum(tl.where(way == outside, masses, 0.0), 0) + before * 0
    return new_low, new_high, above, before


@triton.jit
def _above(source, RAW: tl.constexpr, levels, top, warmth, size, CHUNK: tl.constexpr, WAYS: tl.constexpr):
    """Number and mass of the weights larger than each of `levels` [WAYS]; `RAW`: of what are logits yet."""
    counts = tl.zeros([CHUNK, WAYS], tl.int32)
    masses = tl.zeros([CHUNK, WAYS], tl.float64)
    for start in range(0, size, CHUNK):
        place = start + tl.arange(0, CHUNK)
        if RAW:
            values = tl.load(source + place, mask=place < size, other=float("-inf")).to(tl.float32)
            weight = weights_of(values, top, warmth)
        else:
            weight = tl.load(source + place, mask=place < size, other=0.0)
        over = weight[:, None] > levels[None, :]
        counts += over.to(tl.int32)
        masses += tl.where(over, weight.to(tl.float64)[:, None], 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)
