"""Exit rules over the slots' state: one small class each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlt.config import ExitConfig
from rlt.depth.ouro import ouro_exit
from rlt.errors import ConfigError
from rlt.exec.slots import Slots
from rlt.models.interface import Gate
from rlt.sched.request import Request

#: seed of the untrained gate of `random_lookahead`
LOOKAHEAD_SEED = 20260


class ExitRule(Protocol):
    """Decides after each loop which decode rows stop. State per slot is part of `Slots`."""

    def admit(self, request: Request) -> None:
        """A request got its slot (whose state is all zero)."""

    def restart(self, slots: Tensor) -> None:
        """The next token of `slots` [rows] begins."""

    def decide(self, slots: Tensor, hidden: Tensor, done: Tensor) -> Tensor:
        """Mask [rows] of the rows that stop, given `hidden` [rows, hidden size] after their `done`-th loop [rows]."""


class FullDepthRule:
    """No token stops before its loop limit: the rule of models without a gate."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def admit(self, request: Request) -> None:
        pass

    def restart(self, slots: Tensor) -> None:
        pass

    def decide(self, slots: Tensor, hidden: Tensor, done: Tensor) -> Tensor:
        return done >= self._slots.max_loops[slots]


class GateRule:
    """Ouro's rule with any gate; `delayed` rows run one more loop after the threshold was reached."""

    def __init__(self, slots: Slots, gate: Gate, *, delayed: bool) -> None:
        self._slots = slots
        self._gate = gate
        self._delayed = int(delayed)
        self._survival = slots.add("survival", torch.float32)
        self._crossed_before = slots.add("crossed", torch.bool)

    def admit(self, request: Request) -> None:
        self._survival[request.slot] = 1.0

    def restart(self, slots: Tensor) -> None:
        self._survival[slots] = 1.0
        self._crossed_before[slots] = False

    def decide(self, slots: Tensor, hidden: Tensor, done: Tensor) -> Tensor:
        state = self._slots
        survival, crossed = ouro_exit(
            self._gate(hidden), self._survival[slots], done, state.threshold[slots], state.min_loops[slots]
        )
        before = self._crossed_before[slots]
        self._survival[slots] = survival
        self._crossed_before[slots] = crossed
        return (before if self._delayed else crossed) | (done >= state.max_loops[slots])


class TraceRule:
    """Depths from a file, for repeatable benchmarks: requests take its rows in turn, tokens its columns in turn."""

    def __init__(self, slots: Slots, depths: list[list[int]]) -> None:
        self._slots = slots
        self._lengths = torch.tensor([len(row) for row in depths], device=slots.device)
        self._depths = torch.zeros(len(depths), int(self._lengths.max()), dtype=torch.int64, device=slots.device)
        for index, row in enumerate(depths):
            self._depths[index, : len(row)] = torch.tensor(row, device=slots.device)
        self._row = slots.add("trace_row", torch.int64)

    def admit(self, request: Request) -> None:
        self._row[request.slot] = request.number % len(self._lengths)

    def restart(self, slots: Tensor) -> None:
        pass

    def decide(self, slots: Tensor, hidden: Tensor, done: Tensor) -> Tensor:
        state, row = self._slots, self._row[slots]
        wanted = self._depths[row, state.generated[slots] % self._lengths[row]]
        return (done >= wanted.maximum(state.min_loops[slots])) | (done >= state.max_loops[slots])


def make_rule(config: ExitConfig, slots: Slots, gate: Gate | None, hidden_size: int) -> ExitRule:
    """The rule that the configuration names, for a model with or without a gate.

    Raises `ConfigError` for a trace file that cannot be used.
    """
    if config.rule == "trace":
        assert config.trace_file is not None
        return TraceRule(slots, read_trace(Path(config.trace_file)))
    if config.rule == "random_lookahead":
        return GateRule(slots, random_gate(hidden_size, slots.device), delayed=True)
    if gate is None:
        return FullDepthRule(slots)
    return GateRule(slots, gate, delayed=config.rule == "ouro_delayed")


def random_gate(hidden_size: int, device: torch.device) -> Gate:
    """An untrained linear gate with standard normal weights / sqrt(hidden size), the same on every run."""
    generator = torch.Generator().manual_seed(LOOKAHEAD_SEED)
    weight = (torch.randn(1, hidden_size, generator=generator) / hidden_size**0.5).to(device)
    return lambda hidden: linear(hidden.float(), weight)[:, 0]


def read_trace(path: Path) -> list[list[int]]:
    """Rows of a trace file `{"depths": [[3, 1, ...], ...]}`: the loops of a request's output tokens, 1 or more each."""
    try:
        depths = json.loads(path.read_text(encoding="utf-8"))["depths"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([f'exit.trace_file {path}: expected JSON {{"depths": [[...], ...]}}: {error}']) from error
    rows = depths if isinstance(depths, list) else []
    valid = all(
        isinstance(row, list) and row and all(type(depth) is int and depth > 0 for depth in row) for row in rows
    )
    if not rows or not valid:
        raise ConfigError([f"exit.trace_file {path}: depths must be non-empty lists of loops, 1 or more"])
    return rows
