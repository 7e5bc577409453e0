"""Exit decisions against the exit rule itself, and moves of keys and values against indexing."""

from __future__ import annotations

import pytest
import torch

from kernels.places import Place
from rlt.depth.ouro import ouro_exit
from rlt.kernels.exits import ExitState, exit_step, move_entries

SLOTS, LOOPS = 7, 4


def new_state(place: Place) -> ExitState:
    def values(*numbers: float) -> torch.Tensor:
        return torch.tensor(numbers, device=place.device)

    return ExitState(
        depth=torch.zeros(SLOTS, dtype=torch.int64, device=place.device),
        active=torch.ones(SLOTS, dtype=torch.bool, device=place.device),
        survival=torch.ones(SLOTS, device=place.device),
        crossed=torch.zeros(SLOTS, dtype=torch.bool, device=place.device),
        threshold=values(0.5, 0.9, 1.0, 0.0, 0.3, 2.0, 0.7),
        min_loops=values(1, 1, 1, 2, 3, 1, 1).long(),
        max_loops=values(4, 4, 4, 4, 4, 2, 1).long(),
    )


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("width", [16, 70])
def test_exit_step_is_the_rule(place: Place, delayed: bool, width: int) -> None:
    gate = torch.randn(width, generator=torch.Generator().manual_seed(0)).to(place.device) / width**0.5
    bias = torch.tensor([0.25], device=place.device)
    state, wanted = new_state(place), new_state(place)
    rows = torch.tensor([4, 0, 6, 2, 1, 3, 5], device=place.device)
    left: list[list[bool]] = []
    for loop in range(LOOPS):
        hidden = place.spread(SLOTS, width)
        hidden.copy_(place.normal(SLOTS, width, seed=loop))
        exits = torch.zeros(SLOTS, dtype=torch.bool, device=place.device)
        exit_step(hidden, gate, bias, rows, state, exits, delayed=delayed)
        wanted.depth[rows] += 1
        done = wanted.depth[rows]
        survival, crossed = ouro_exit(
            hidden.float() @ gate + bias, wanted.survival[rows], done, wanted.threshold[rows], wanted.min_loops[rows]
        )
        stops = (wanted.crossed[rows] if delayed else crossed) | (done >= wanted.max_loops[rows])
        wanted.survival[rows], wanted.crossed[rows] = survival, crossed
        assert torch.equal(exits, stops)
        for got, value in zip(state, wanted, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6)
        left.append(exits.tolist())
    assert len({*map(tuple, left)}) > 2, "the case decides nothing"


def test_idle_and_padded_rows_do_nothing(place: Place) -> None:
    gate, bias = torch.ones(16, device=place.device), torch.zeros(1, device=place.device)
    state = new_state(place)
    state.active[2] = False
    before = [tensor.clone() for tensor in state]
    hidden = place.spread(3, 16)
    hidden[1] = 1.0
    rows = torch.tensor([2, 6, -1], device=place.device)
    exits = torch.ones(3, dtype=torch.bool, device=place.device)
    exit_step(hidden, gate, bias, rows, state, exits, delayed=False)
    assert exits.tolist() == [False, True, False]
    changed = {
        name: (now != old).nonzero().flatten().tolist()
        for name, now, old in zip(ExitState._fields, state, before, strict=True)
    }
    assert changed == {name: [6] if name in ("depth", "survival", "crossed") else [] for name in ExitState._fields}


# On the CPU an overflow to infinity, which is meant, is a warning.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_saturated_gates(place: Place) -> None:
    """A gate far above or below 0 gives a survival of 0 or 1, not something that is no number."""
    state = new_state(place)
    hidden = torch.zeros(2, 16, device=place.device, dtype=place.dtype)
    hidden[0, 0], hidden[1, 0] = 1000.0, -1000.0
    exits = torch.ones(2, dtype=torch.bool, device=place.device)
    gate, bias = torch.ones(16, device=place.device), torch.zeros(1, device=place.device)
    rows = torch.tensor([2, 0], device=place.device)
    exit_step(hidden, gate, bias, rows, state, exits, delayed=False)
    assert exits.tolist() == [False, False], "a threshold of 1 never exits early"
    assert state.survival[rows].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("page_size", "kv_heads", "head_dim"), [(4, 2, 16), (5, 3, 24)])
def test_move_entries(place: Place, page_size: int, kv_heads: int, head_dim: int) -> None:
    pool = place.normal(2, 3, 6, page_size + 1, kv_heads, head_dim, seed=0)
    keys, values = pool[:, :, :, :page_size]
    source = torch.tensor([0, -1, 17, 3], device=place.device)
    target = torch.tensor([12, 5, -1, 9], device=place.device)
    wanted = pool.clone()
    for old, new in ((0, 12), (3, 9)):
        wanted[:, :, new // page_size, new % page_size] = pool[:, :, old // page_size, old % page_size]
    move_entries(keys, values, source, target)
    assert torch.equal(pool, wanted)
