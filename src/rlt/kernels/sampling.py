"""The sampler, `rlt.exec.sampler` and the checks around it, in two launches and without a sort.

Weights are exp((logit - largest) / temperature) in float32, masses, which are sums of weights, are float64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlt.kernels.ranks import pick_by_rank, weights_of

_CHUNK = 1024


class SampleState(NamedTuple):
    """Slot state that sampling reads, each [slots] as in `rlt.exec.slots`; `end_ids` [slots, ids] ends with -1s."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seed: Tensor
    position: Tensor
    generated: Tensor
    min_tokens: Tensor
    end_ids: Tensor


class SampleWorkspace(NamedTuple):
    """Of each row's chunks, flat: largest logit, its place, the mass relative to it, and what is not a number.

    And of each row, for the tokens that are not ruled out at once, flat: their weights and ids.
    """

    peaks: Tensor
    places: Tensor
    masses: Tensor
    broken: Tensor
    weights: Tensor
    ids: Tensor


def sample_workspace(*, rows: int, vocab: int, device: torch.device) -> SampleWorkspace:
    """A workspace for at most `rows` rows of `vocab` logits, 8 bytes each. Calls on one stream may share it."""
    chunks = rows * triton.cdiv(vocab, _CHUNK)
    return SampleWorkspace(
        peaks=torch.empty(chunks, dtype=torch.float32, device=device),
        places=torch.empty(chunks, dtype=torch.int32, device=device),
        masses=torch.empty(chunks, dtype=torch.float64, device=device),
        broken=torch.empty(chunks, dtype=torch.int32, device=device),
        weights=torch.empty(rows * vocab, dtype=torch.float32, device=device),
        ids=torch.empty(rows * vocab, dtype=torch.int32, device=device),
    )


def sample(
    logits: Tensor,
    slots: Tensor,
    state: SampleState,
    tokens: Tensor,
    finite: Tensor,
    workspace: SampleWorkspace,
    *,
    known: int,
    ways: int = 8,
) -> None:
    """Set `tokens` [rows] (int64) to the next tokens of `slots` [rows] (int64) given `logits` [rows, vocab].

    Only the first `known` logits count. Where a slot has generated fewer than its `min_tokens`, the logits of its end
    ids are set to minus infinity, in place. `finite` [rows] (bool) says whether the row's largest logit is a finite
    number; if it is not, the token is 0. Rows with a negative slot are left as they are.

    A search compares with `ways` thresholds (a power of two) in each pass over the logits.
    """
    rows = len(slots)
    assert logits.stride(1) == 1
    assert state.end_ids.is_contiguous()
    assert known <= logits.shape[1]
    if rows == 0:
        return
    chunks = triton.cdiv(known, _CHUNK)
    assert workspace.peaks.numel() >= rows * chunks
    assert workspace.ids.numel() >= rows * known
    ends = state.end_ids.shape[1]
    _chunks[(rows, chunks)](
        logits,
        slots,
        state.temperature,
        state.generated,
        state.min_tokens,
        state.end_ids,
        *workspace[:4],
        logits.stride(0),
        known,
        ends,
        _CHUNK,
        num_warps=4,
    )
    _choose[(rows,)](
        logits,
        slots,
        *state[:-2],
        *workspace,
        tokens,
        finite,
        logits.stride(0),
        known,
        chunks,
        triton.next_power_of_2(chunks),
        _CHUNK,
        ways,
        num_warps=16,
    )


@triton.jit
def _chunks(
    logits,
    slots,
    temperature,
    generated,
    min_tokens,
    end_ids,
    peaks,
    places,
    masses,
    broken,
    logits_row,
    N,
    ENDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    logits += row * logits_row
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + index, mask=index < N, other=float("-inf")).to(tl.float32)
    # Neither not a number nor infinity is less than infinity.
    bad = tl.sum(1 - (values < float("inf")).to(tl.int32), 0)
    # Without a finite number before end ids are barred, the row's result is not used.
    bad += tl.where(tl.max(values, 0) == float("-inf"), CHUNK + 1, 0)
    if tl.load(generated + slot) < tl.load(min_tokens + slot):
        for number in range(ENDS):
            end = tl.load(end_ids + slot * ENDS + number)
            values = tl.where(index == end, float("-inf"), values)
        tl.store(logits + index, values.to(logits.dtype.element_ty), mask=index < N)
    peak, place = tl.max(values, return_indices=True, axis=0)
    warmth = tl.load(temperature + slot)
    mass = tl.zeros([1], tl.float64)
    if (warmth > 0) & (bad == 0) & (peak > float("-inf")):
        mass += tl.sum(weights_of(values, peak, warmth).to(tl.float64), 0)
    entry = row * tl.num_programs(1) + chunk
    tl.store(peaks + entry, peak)
    tl.store(places + entry, chunk * CHUNK + place)
    tl.store(masses + entry + tl.arange(0, 1), mass)
    tl.store(broken + entry, bad)


@triton.jit
def _choose(
    logits,
    slots,
    temperature,
    top_p,
    min_p,
    top_k,
    seed,
    position,
    generated,
    peaks,
    places,
    masses,
    broken,
    weights,
    ids,
    tokens,
    finite,
    logits_row,
    N,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    WAYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    chunk = tl.arange(0, CHUNKS_PAD)
    entry = row * CHUNKS + chunk
    # A chunk of infinities alone is `CHUNK + 1`: the row is broken if there are others, or if all are like that.
    bad = tl.load(broken + entry, mask=chunk < CHUNKS, other=0)
    hollow = tl.sum((bad == CHUNK + 1).to(tl.int32), 0)
    if (tl.sum(bad, 0) != hollow * (CHUNK + 1)) | (hollow == CHUNKS):
        tl.store(finite + row, 0)
        tl.store(tokens + row, 0)
        return
    tl.store(finite + row, 1)
    peak = tl.load(peaks + entry, mask=chunk < CHUNKS, other=float("-inf"))
    top, first = tl.max(peak, return_indices=True, axis=0)
    warmth = tl.load(temperature + slot)
    if warmth <= 0:
        tl.store(tokens + row, tl.load(places + row * CHUNKS + first).to(tl.int64))
        return
    u = _uniform(tl.load(seed + slot), tl.load(position + slot) + (tl.load(generated + slot) > 0).to(tl.int64))
    logits += row * logits_row
    kept, share, least = tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot)
    mass = tl.load(masses + entry, mask=chunk < CHUNKS, other=0.0) * weights_of(peak, top, warmth).to(tl.float64)
    total = tl.sum(mass, 0)
    if (kept <= 0) & (share >= 1) & (least <= 0):
        token = _pick_by_index(logits, mass, u, top, warmth, N, chunk, CHUNK)
    else:
        token = pick_by_rank(
            logits,
            peaks + row * CHUNKS,
            weights + row * N,
            ids + row * N,
            kept,
            share,
            least,
            u,
            total,
            top,
            warmth,
            N,
            CHUNKS,
            CHUNK,
            WAYS,
        )
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _uniform(seed, position):
    """`rlt.exec.rng.uniform` of purpose 0."""
    zero = (position * 0).to(tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    bits = (first.to(tl.int64) << 21) ^ (second.to(tl.int64) >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def _pick_by_index(logits, mass, u, top, warmth, N, chunk, CHUNK: tl.constexpr):
    """The token at share `u` of the weights in order of their ids: first its chunk, then its place there."""
    until = tl.cumsum(mass, 0)
    # Where the product rounds up to the total, the last chunk with weight is meant.
    last = tl.max(tl.where(mass > 0, chunk, 0), 0)
    which = tl.minimum(tl.sum((until <= u * tl.sum(mass, 0)).to(tl.int32), 0), last)
    left = u * tl.sum(mass, 0) - tl.sum(tl.where(chunk < which, mass, 0.0), 0)
    place = tl.arange(0, CHUNK)
    index = which * CHUNK + place
    values = tl.load(logits + index, mask=index < N, other=float("-inf")).to(tl.float32)
    weight = weights_of(values, top, warmth).to(tl.float64)
    last = tl.max(tl.where(weight > 0, place, 0), 0)
    return which * CHUNK + tl.minimum(tl.sum((tl.cumsum(weight, 0) <= left).to(tl.int32), 0), last)
