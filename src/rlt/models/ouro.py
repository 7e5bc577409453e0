"""Ouro (arXiv 2510.25741): one stack of layers run several times, a norm after every loop, a learned exit gate."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from rlt.models.interface import Attend
from rlt.models.layers import Stack, attention, mlp, rms_norm, stack_shapes
from rlt.models.spec import ModelSpec

#: Norms of a layer: before and after attention, before and after the MLP.
NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of an Ouro checkpoint and its shape."""
    gate = {"model.early_exit_gate.weight": (1, spec.hidden_size), "model.early_exit_gate.bias": (1,)}
    return stack_shapes(spec, NORMS) | gate


class Ouro(Stack):
    """The maths of the family; see `LoopedModel`."""

    def __init__(self, spec: ModelSpec, tensors: dict[str, Tensor]) -> None:
        super().__init__(spec, tensors, NORMS)
        self._gate_weight = tensors["model.early_exit_gate.weight"].float()
        self._gate_bias = tensors["model.early_exit_gate.bias"].float()

    def core(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden, spec, eps, turns = rows, self.spec, self.spec.norm_eps, self._positions.at(positions)
        for index, layer in enumerate(self._layers):
            before_attention, after_attention, before_mlp, after_mlp = layer.norms
            branch = attention(rms_norm(hidden, before_attention, eps), layer, spec, turns, index, attend)
            hidden = hidden + rms_norm(branch, after_attention, eps)
            branch = mlp(rms_norm(hidden, before_mlp, eps), layer)
            hidden = hidden + rms_norm(branch, after_mlp, eps)
        return rms_norm(hidden, self._norm, eps)

    def gate(self, hidden: Tensor) -> Tensor:
        """Exit gate logits [rows], float32, of rows [rows, hidden] that finished a loop."""
        return linear(hidden.float(), self._gate_weight, self._gate_bias)[:, 0]
