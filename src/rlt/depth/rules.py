"""Exit rules over the slots' state: one small class each."""

from __future__ import annotations

import json
from abc import abstractmethod
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlt.config import ExitConfig
from rlt.depth.criteria import CRITERIA, Criterion
from rlt.depth.ouro import ouro_exit
from rlt.depth.table import RULES
from rlt.errors import ConfigError
from rlt.exec.slots import Slots
from rlt.models.interface import Gate, LoopedModel
from rlt.sched.request import Request

#: seed of the untrained gate of `random_lookahead`
LOOKAHEAD_SEED = 20260


class ExitRule:
    """Decides after each loop which decode rows leave. State per slot is part of `Slots`; all masks are bool."""

    def admit(self, request: Request) -> None:
        """A request got its slot (whose state is all zero)."""

    def restart(self, slots: Tensor) -> None:
        """The next token of `slots` [rows] begins."""

    @abstractmethod
    def candidates(self, slots: Tensor, before: Tensor, after: Tensor, done: Tensor) -> Tensor:
        """Mask [rows] of the rows that leave, or that may: coda and head run for them, and `confirm` decides.

        `before` and `after` [rows, hidden] are the states around the rows' `done`-th loop [rows].
        """

    def confirm(self, slots: Tensor, logits: Tensor, done: Tensor) -> Tensor | None:
        """Mask of the candidates that leave, given their logits [candidates, vocab]; None: all of them."""
        return None


class FullDepthRule(ExitRule):
    """No token stops before its loop limit."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def candidates(self, slots: Tensor, before: Tensor, after: Tensor, done: Tensor) -> Tensor:
        return done >= self._slots.max_loops[slots]


class GateRule(ExitRule):
    """Ouro's rule with any gate; `delayed` rows run one more loop after the threshold was reached."""

    def __init__(self, slots: Slots, gate: Gate, *, delayed: bool) -> None:
        self._slots = slots
        self._gate = gate
        self._delayed = int(delayed)
        self._survival = slots.add("survival", torch.float32)
        self._crossed_before = slots.add("crossed", torch.bool)

    def restart(self, slots: Tensor) -> None:
        self._survival[slots] = 1.0
        self._crossed_before[slots] = False

    def candidates(self, slots: Tensor, before: Tensor, after: Tensor, done: Tensor) -> Tensor:
        state = self._slots
        survival, crossed = ouro_exit(
            self._gate(after), self._survival[slots], done, state.threshold[slots], state.min_loops[slots]
        )
        crossed_before = self._crossed_before[slots]
        self._survival[slots] = survival
        self._crossed_before[slots] = crossed
        return (crossed_before if self._delayed else crossed) | (done >= state.max_loops[slots])


class StateRule(ExitRule):
    """A criterion on states. What the loop before made of a row is the row itself, so there is nothing to keep."""

    def __init__(self, slots: Slots, criterion: Criterion) -> None:
        self._slots = slots
        self._criterion = criterion

    def candidates(self, slots: Tensor, before: Tensor, after: Tensor, done: Tensor) -> Tensor:
        state = self._slots
        values, _ = self._criterion.step(after, before)
        stops = self._criterion.stops(values, state.threshold[slots])
        return (stops & (done >= state.min_loops[slots])) | (done >= state.max_loops[slots])


class LogitsRule(ExitRule):
    """A criterion on logits. It looks at a row after `min_loops` loops and every `interval` loops from there.

    Each look is compared with the one before it, the first one with the criterion's start, as in the published code.
    """

    def __init__(self, slots: Slots, criterion: Criterion, vocab: int, interval: int) -> None:
        self._slots = slots
        self._criterion = criterion
        self._interval = interval
        self._start = criterion.begin(torch.zeros(1, 1, device=slots.device), vocab)
        self._carried = slots.add("criterion", self._start.dtype, tuple(self._start.shape[1:]))

    def restart(self, slots: Tensor) -> None:
        self._carried[slots] = self._start[0]

    def candidates(self, slots: Tensor, before: Tensor, after: Tensor, done: Tensor) -> Tensor:
        state = self._slots
        late = done - state.min_loops[slots]
        looks = (late >= 0) & (late % self._interval == 0)
        if not self._criterion.at_least:
            # Nothing falls below a threshold of 0.
            looks &= state.threshold[slots] > 0
        return looks | (done >= state.max_loops[slots])

    def confirm(self, slots: Tensor, logits: Tensor, done: Tensor) -> Tensor | None:
        state = self._slots
        values, self._carried[slots] = self._criterion.step(logits, self._carried[slots])
        return self._criterion.stops(values, state.threshold[slots]) | (done >= state.max_loops[slots])


class TraceRule(ExitRule):
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

    def candidates(self, slots: Tensor, before: Tensor, after: Tensor, done: Tensor) -> Tensor:
        state, row = self._slots, self._row[slots]
        wanted = self._depths[row, state.generated[slots] % self._lengths[row]]
        return (done >= wanted.maximum(state.min_loops[slots])) | (done >= state.max_loops[slots])


def make_rule(name: str, config: ExitConfig, slots: Slots, model: LoopedModel) -> ExitRule:
    """The rule called `name` (a key of `RULES`), for a model that it goes with.

    Raises `ConfigError` for a trace file that cannot be used.
    """
    if name == "full_depth":
        return FullDepthRule(slots)
    if name == "trace":
        assert config.trace_file is not None
        return TraceRule(slots, read_trace(Path(config.trace_file)))
    if name == "random_lookahead":
        return GateRule(slots, random_gate(model.spec.hidden_size, slots.device), delayed=True)
    if RULES[name].logits:
        return LogitsRule(slots, CRITERIA[name], model.spec.vocab_size, config.check_interval)
    if RULES[name].criterion:
        return StateRule(slots, CRITERIA[name])
    assert model.gate is not None
    return GateRule(slots, model.gate, delayed=name == "ouro_delayed")


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
