"""Penalties and biases of logits, id by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Penalties(NamedTuple):
    """What a request sets; the values here change nothing."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()

    def on(self, logits: Tensor, prompt: Sequence[int], said: Sequence[int]) -> Tensor:
        """A changed copy of `logits` [vocab] after `prompt` and the tokens `said` so far."""
        changed = logits.clone()
        for token, bias in self.bias:
            changed[token] += bias
        for token in {*prompt, *said}:
            value = float(changed[token])
            changed[token] = value / self.repetition if value > 0 else value * self.repetition
        for token in set(said):
            changed[token] -= self.frequency * said.count(token) + self.presence
        return changed


NO_PENALTIES = Penalties()
