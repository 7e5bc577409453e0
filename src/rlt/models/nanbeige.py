"""Nanbeige4.2 (arXiv 2607.22083): a Llama-like stack run twice, a norm after every loop, no exit gate."""

from __future__ import annotations

from torch import Tensor

from rlt.models.interface import Attend
from rlt.models.layers import Stack, attention, mlp, stack_shapes
from rlt.models.ops import TORCH, Ops
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

    def __init__(self, spec: ModelSpec, tensors: dict[str, Tensor], ops: Ops = TORCH) -> None:
        super().__init__(spec, tensors, NORMS, ops)

    def core(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden, spec, ops, eps, turns = rows, self.spec, self._ops, self.spec.norm_eps, self._positions.at(positions)
        normed = ops.rms_norm(hidden, self._layers[0].norms[0], eps)
        for index, (layer, following) in enumerate(zip(self._layers, self._following, strict=True)):
            branch = attention(normed, layer, spec, turns, index, attend, ops)
            hidden, normed = ops.add_norm(hidden, branch, "plain", None, layer.norms[1], eps)
            hidden, normed = ops.add_norm(hidden, mlp(normed, layer, ops), "plain", None, following, eps)
        return normed
