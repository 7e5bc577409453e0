"""Exit decisions on the device, and the moves of keys and values that they cause."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class ExitState(NamedTuple):
    """Slot state that exit decisions read and write, each [slots]: see `rlt.exec.slots` and `rlt.depth.rules`."""

    #: int64: loops run, counted up here
    depth: Tensor
    #: bool
    active: Tensor
    #: float32 and bool, set here
    survival: Tensor
    crossed: Tensor
    #: float32
    threshold: Tensor
    #: int64
    min_loops: Tensor
    max_loops: Tensor


def exit_step(
    hidden: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    slots: Tensor,
    state: ExitState,
    exits: Tensor,
    *,
    delayed: bool,
) -> None:
    """Count a finished loop of the rows `hidden` [rows, width] and set `exits` [rows] (bool): who leaves the loops.

    The rule is `rlt.depth.rules.GateRule`'s, in float32, with the gate `hidden` · `gate_weight` [width] (float32) +
    `gate_bias` [1]; `delayed` rows run one more loop after they crossed the threshold. Row r is slot `slots[r]`
    (int64), which no other row is. A row whose slot is negative or not active does nothing and does not leave.
    """
    rows, width = hidden.shape
    assert hidden.stride(1) == gate_weight.stride(-1) == 1
    assert all(tensor.is_contiguous() for tensor in state)
    if rows:
        block = triton.next_power_of_2(width)
        _exit_step[(rows,)](
            hidden,
            gate_weight,
            gate_bias,
            slots,
            *state,
            exits,
            hidden.stride(0),
            width,
            block,
            delayed,
            num_warps=min(max(block // 256, 1), 16),
        )


def move_entries(keys: Tensor, values: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy keys and values of flat positions `source` to `target` (both [rows], int64) in all layers.

    `keys` and `values` are [layers, pages, page_size, kv_heads, head_dim], a position's heads being one piece of
    memory. Rows with a negative source or target move nothing. No row's target may be another one's source.
    """
    layers, _, page_size, kv_heads, head_dim = keys.shape
    width = kv_heads * head_dim
    assert keys.stride()[3:] == values.stride()[3:] == (head_dim, 1)
    if len(source):
        _move_entries[(len(source), layers)](
            keys,
            values,
            source,
            target,
            *keys.stride()[:3],
            *values.stride()[:3],
            page_size,
            width,
            triton.next_power_of_2(width),
            num_warps=4,
        )


@triton.jit
def _exit_step(
    hidden,
    gate_weight,
    gate_bias,
    slots,
    depth,
    active,
    survival,
    crossed,
    threshold,
    min_loops,
    max_loops,
    exits,
    hidden_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DELAYED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        tl.store(exits + row, 0)
        return
    if tl.load(active + slot) == 0:
        tl.store(exits + row, 0)
        return
    column = tl.arange(0, BLOCK)
    values = tl.load(hidden + row * hidden_row + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    weight = tl.load(gate_weight + column, mask=column < WIDTH, other=0.0)
    logit = tl.sum(values * weight, 0) + tl.load(gate_bias)
    done = tl.load(depth + slot) + 1
    limit = tl.load(threshold + slot)
    # 1 / (1 + exp(g)) is 1 - sigmoid(g) without losing the small end.
    left = tl.load(survival + slot) / (1.0 + tl.exp(logit))
    now = (1.0 - left >= limit) & (limit < 1.0) & (done >= tl.load(min_loops + slot))
    stop = now
    if DELAYED:
        stop = tl.load(crossed + slot) != 0
    tl.store(survival + slot, left)
    tl.store(crossed + slot, now)
    tl.store(depth + slot, done)
    tl.store(exits + row, stop | (done >= tl.load(max_loops + slot)))


@triton.jit
def _move_entries(
    keys,
    values,
    source,
    target,
    key_layer,
    key_page,
    key_position,
    value_layer,
    value_page,
    value_position,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    old, new = tl.load(source + row), tl.load(target + row)
    if (old < 0) | (new < 0):
        return
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    keys += layer * key_layer + column
    values += layer * value_layer + column
    key = tl.load(keys + (old // PAGE) * key_page + (old % PAGE) * key_position, mask=inside)
    value = tl.load(values + (old // PAGE) * value_page + (old % PAGE) * value_position, mask=inside)
    tl.store(keys + (new // PAGE) * key_page + (new % PAGE) * key_position, key, mask=inside)
    tl.store(values + (new // PAGE) * value_page + (new % PAGE) * value_position, value, mask=inside)
