"""What the runner needs of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from rlt.models.spec import ModelSpec

#: (layer, query, key, value), each [rows, heads or kv_heads, head_dim] after RoPE -> attended [rows, heads, head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
#: states [rows, hidden] after a loop -> exit logits [rows], float32
Gate = Callable[[Tensor], Tensor]
#: what a token's state is before its first loop, in families that have one then
InitialState = Literal["zero", "seeded"]


class LoopedModel(Protocol):
    """The maths of a model over flat rows; where keys and values live is the caller's business.

    A row is a token between its loops: `row_size` features, of which the first `spec.hidden_size` are its state. Rows
    are independent tokens of any requests at any loops. Weights and activations share one dtype; exit gates and logits
    are float32. Positions do not change with the loop.

    Layers that loop and layers that run once per token (the *outer* ones, `spec.outer_layers`) are counted apart:
    `core` calls its `attend` with layers 0 .. `spec.layers` - 1, `prelude` and `coda` call theirs with layers
    0 .. `spec.outer_layers` - 1 in order, the prelude's first.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def gate(self) -> Gate | None:
        """The learned exit gate, in families that have one."""

    @property
    def row_size(self) -> int: ...

    def initial_state(self, kind: InitialState, seeds: Tensor, positions: Tensor) -> Tensor:
        """States [rows, hidden] of tokens at `positions` [rows] of requests with `seeds` [rows] (int64).

        [rows, 0] in families whose tokens start from their embedding alone.
        """
        ...

    def prelude(self, tokens: Tensor, positions: Tensor, attend: Attend, state: Tensor) -> Tensor:
        """Rows [rows, row_size] of token ids [rows] before their first loop, given their initial state."""
        ...

    def core(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One loop over `rows` [rows, row_size] at `positions` [rows]."""
        ...

    def coda(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What `head` takes, [rows, hidden], of rows [rows, row_size] that leave the loops or may.

        May run again for a token after a further loop: its outer keys and values are then those of the last run.
        """
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab], float32, of what `coda` returned."""
        ...
