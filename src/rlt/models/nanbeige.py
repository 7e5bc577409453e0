"""Nanbeige4.2 (arXiv 2607.22083): a Llama-like stack run twice, a norm after every loop, no exit gate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from rlt.models.interface import Attend
from rlt.models.layers import Positions, attention, mlp, read_layers, rms_norm, stack_shapes
from rlt.models.spec import ModelSpec

#: Norms of a layer: before attention and before the MLP.
NORMS = ("input_layernorm", "post_attention_layernorm")


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Nanbeige checkpoint and its shape."""
    return stack_shapes(spec, NORMS)


class Nanbeige:
    """The maths of the family; see `LoopedModel`."""

    #: Depth is fixed.
    gate = None

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self._embedding = tensors["model.embed_tokens.weight"]
        self._norm = tensors["model.norm.weight"]
        self._head = tensors["lm_head.weight"]
        self._layers = read_layers(spec, tensors, NORMS)
        self._positions = Positions(spec, self._embedding.dtype, self._embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def prelude(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self._embedding)

    def core(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        spec, eps, turns = self.spec, self.spec.norm_eps, self._positions.at(positions)
        for index, layer in enumerate(self._layers):
            before_attention, before_mlp = layer.norms
            hidden = hidden + attention(rms_norm(hidden, before_attention, eps), layer, spec, turns, index, attend)
            hidden = hidden + mlp(rms_norm(hidden, before_mlp, eps), layer)
        return rms_norm(hidden, self._norm, eps)

    def head(self, hidden: Tensor) -> Tensor:
        # The loop's closing norm is already in `hidden`; there is no second one.
        return linear(hidden, self._head).float()
