"""Ouro (arXiv 2510.25741): one stack of layers run several times, a norm after every loop, a learned exit gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from rlt.models.spec import ModelSpec

#: (layer, query, key, value), each [rows, heads or kv_heads, head_dim] after RoPE -> attended [rows, heads, head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of an Ouro checkpoint and its shape."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "model.early_exit_gate.weight": (1, hidden),
        "model.early_exit_gate.bias": (1,),
        "lm_head.weight": (spec.vocab_size, hidden),
    }
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "input_layernorm_2": (hidden,),
        "post_attention_layernorm": (hidden,),
        "post_attention_layernorm_2": (hidden,),
    }
    for index in range(spec.layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def ignorable(name: str) -> bool:
    """Legacy checkpoints may store the RoPE table, which follows from the configuration."""
    return name.endswith("rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    before_attention: Tensor
    after_attention: Tensor
    before_mlp: Tensor
    after_mlp: Tensor


class Ouro:
    """The maths of the family over flat rows; where keys and values live is the caller's business.

    Rows are independent tokens of any requests at any loops. Weights and activations share one dtype; the exit gate
    and the logits are float32.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self._embedding = tensors["model.embed_tokens.weight"]
        self._norm = tensors["model.norm.weight"]
        self._head = tensors["lm_head.weight"]
        self._gate_weight = tensors["model.early_exit_gate.weight"].float()
        self._gate_bias = tensors["model.early_exit_gate.bias"].float()
        self._layers = [_layer(tensors, f"model.layers.{index}.") for index in range(spec.layers)]
        self._cos, self._sin = rope_tables(spec, self._embedding.dtype, self._embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def prelude(self, tokens: Tensor) -> Tensor:
        """Hidden rows [rows, hidden] of token ids [rows] before their first loop."""
        return embedding(tokens, self._embedding)

    def core(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One loop over `hidden` [rows, hidden] at `positions` [rows] (which do not change with the loop)."""
        spec, eps = self.spec, self.spec.norm_eps
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for index, layer in enumerate(self._layers):
            heads = linear(rms_norm(hidden, layer.before_attention, eps), layer.qkv)
            heads = heads.view(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
            rotated = rotate_halves(heads[:, : spec.heads + spec.kv_heads], cos, sin)
            query, key = rotated[:, : spec.heads], rotated[:, spec.heads :]
            attended = attend(index, query, key, heads[:, spec.heads + spec.kv_heads :])
            hidden = hidden + rms_norm(linear(attended.flatten(1), layer.out), layer.after_attention, eps)
            gate, up = linear(rms_norm(hidden, layer.before_mlp, eps), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + rms_norm(linear(silu(gate) * up, layer.down), layer.after_mlp, eps)
        return rms_norm(hidden, self._norm, eps)

    def gate(self, hidden: Tensor) -> Tensor:
        """Exit gate logits [rows], float32, of rows [rows, hidden] that finished a loop."""
        return linear(hidden.float(), self._gate_weight, self._gate_bias)[:, 0]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab], float32. The loop's closing norm is already in `hidden`; there is no second one."""
        return linear(hidden, self._head).float()


def _layer(tensors: Mapping[str, Tensor], prefix: str) -> _Layer:
    def weight(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"]

    return _Layer(
        qkv=torch.cat([weight(f"self_attn.{name}_proj") for name in "qkv"]),
        out=weight("self_attn.o_proj"),
        gate_up=torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
        down=weight("mlp.down_proj"),
        before_attention=weight("input_layernorm"),
        after_attention=weight("input_layernorm_2"),
        before_mlp=weight("post_attention_layernorm"),
        after_mlp=weight("post_attention_layernorm_2"),
    )


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension: rms in float32, the product in the rows' dtype."""
    if rows.dtype == torch.float32:
        return torch.nn.functional.rms_norm(rows, weight.shape, weight, eps)
    wide = rows.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(rows.dtype) * weight


def rope_tables(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim] for `rotate_halves`: angles and functions in float32, then cast."""
    half = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=device) / spec.head_dim
    inverse = 1.0 / spec.rope_theta**half
    angles = torch.arange(spec.max_positions, dtype=torch.float32, device=device)[:, None] * inverse
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_halves(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE that pairs feature j with j + head_dim / 2, on [rows, heads, head_dim]."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin
