"""Nanbeige4.2 (arXiv 2607.22083): a Llama-like stack run twice, a norm after every loop, no exit gate."""

from __future__ import annotations

from torch import Tensor

from rlt.models.interface import Attend
from rlt.models.layers import Stack, attention, mlp, rms_norm, stack_shapes
from rlt.models.spec import ModelSpec

#: Norms of a layer: before attention and before the MLP.
NORMS = ("input_layernorm", "post_attention_layernorm")


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Nanbeige checkpoint and its shape."""
    return stack_shapes(spec, NORMS)


class Nanbeige(Stack):
    """The maths of the family; see `LoopedModel`."""

    #: Depth is fixed.
    gate = None

    def __init__(self, spec: ModelSpec, tensors: dict[str, Tensor]) -> None:
        super().__init__(spec, tensors, NORMS)

    def core(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden, spec, eps, turns = rows, self.spec, self.spec.norm_eps, self._positions.at(positions)
        for index, layer in enumerate(self._layers):
            before_attention, before_mlp = layer.norms
            hidden = hidden + attention(rms_norm(hidden, before_attention, eps), layer, spec, turns, index, attend)
            hidden = hidden + mlp(rms_norm(hidden, before_mlp, eps), layer)
        return rms_norm(hidden, self._norm, eps)
