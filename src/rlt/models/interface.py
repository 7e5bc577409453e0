"""What the runner needs of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rlt.models.spec import ModelSpec

#: (layer, query, key, value), each [rows, heads or kv_heads, head_dim] after RoPE -> attended [rows, heads, head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
#: rows [rows, hidden] that finished a loop -> exit logits [rows], float32
Gate = Callable[[Tensor], Tensor]


class LoopedModel(Protocol):
    """The maths of a model over flat rows; where keys and values live is the caller's business.

    Rows are independent tokens of any requests at any loops. Weights and activations share one dtype; exit gates and
    logits are float32.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def gate(self) -> Gate | None:
        """The learned exit gate, in families that have one."""

    def prelude(self, tokens: Tensor) -> Tensor:
        """Hidden rows [rows, hidden] of token ids [rows] before their first loop."""
        ...

    def core(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One loop over `hidden` [rows, hidden] at `positions` [rows] (which do not change with the loop)."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab], float32, of rows that left their loops."""
        ...
