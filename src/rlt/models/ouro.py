"""Ouro (arXiv 2510.25741): one stack of layers run several times, a norm after every loop, a learned exit gate."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from rlt.models.interface import Attend
from rlt.models.layers import Stack, attention, mlp, stack_shapes
from rlt.models.ops import TORCH, Ops
from rlt.models.spec import ModelSpec

#: Norms of a layer: before and after attention, before and after the MLP.
NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of an Ouro checkpoint and its shape."""
    gate = {"model.early_exit_gate.weight": (1, spec.hidden_size), "model.early_exit_gate.bias": (1,)}
    return stack_shapes(spec, NORMS) | gate


class Ouro(Stack):
    """The maths of the family; see `LoopedModel`."""

    def __init__(self, spec: ModelSpec, tensors: dict[str, Tensor], ops: Ops = TORCH) -> None:
        super().__init__(spec, tensors, NORMS, ops)
        self._gate_weight = tensors["model.early_exit_gate.weight"].float()
        self._gate_bias = tensors["model.early_exit_gate.bias"].float()

    def core(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden, spec, ops, eps, turns = rows, self.spec, self._ops, self.spec.norm_eps, self._positions.at(positions)
        normed = ops.rms_norm(hidden, self._layers[0].norms[0], eps)
        for index, (layer, following) in enumerate(zip(self._layers, self._following, strict=True)):
            _, after_attention, before_mlp, after_mlp = layer.norms
            branch = attention(normed, layer, spec, turns, index, attend, ops)
            hidden, normed = ops.add_norm(hidden, branch, "branch", after_attention, before_mlp, eps)
            branch = mlp(normed, layer, ops)
            hidden, normed = ops.add_norm(hidden, branch, "branch", after_mlp, following, eps)
        return normed

    def gate(self, hidden: Tensor) -> Tensor:
        """Exit gate logits [rows], float32, of rows [rows, hidden] that finished a loop."""
        return linear(hidden.float(), self._gate_weight, self._gate_bias)[:, 0]
