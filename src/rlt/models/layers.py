"""What families of Llama-like layers have in common: the stack around them, norms, rotary positions, attention, MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from rlt.models.interface import Attend, InitialState
from rlt.models.ops import Ops
from rlt.models.spec import ModelSpec


def stack_shapes(spec: ModelSpec, norms: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a stack with its embedding and head; each layer has these `norms`."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (spec.vocab_size, hidden),
    }
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        **dict.fromkeys(norms, (hidden,)),
    }
    for index in range(spec.layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def ignorable(name: str) -> bool:
    """Legacy checkpoints may store the RoPE table, which follows from the configuration."""
    return name.endswith("rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's weights. Matrices that multiply the same rows are one; the norms are in the family's order."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norms: tuple[Tensor, ...]


def _read_layer(tensors: dict[str, Tensor], prefix: str, norms: tuple[str, ...]) -> Layer:
    """Take a layer's weights out of `tensors`: joined matrices are copies, and their parts are not needed any more."""

    def weight(name: str) -> Tensor:
        return tensors.pop(f"{prefix}{name}.weight")

    return Layer(
        qkv=torch.cat([weight(f"self_attn.{name}_proj") for name in "qkv"]),
        out=weight("self_attn.o_proj"),
        gate_up=torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
        down=weight("mlp.down_proj"),
        norms=tuple(map(weight, norms)),
    )


class Positions:
    """cos and sin of all positions, [positions, head_dim]: angles and functions in float32, then cast."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        half = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=device) / spec.head_dim
        inverse = 1.0 / spec.rope_theta**half
        angles = torch.arange(spec.max_positions, dtype=torch.float32, device=device)[:, None] * inverse
        angles = torch.cat([angles, angles], dim=-1)
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, 1, head_dim] for rows at `positions` [rows]."""
        return self._cos[positions][:, None], self._sin[positions][:, None]


class Stack:
    """What families of one looped stack share: an embedding before the loops, a head after them, no other layers.

    See `LoopedModel`. A row is its state, and a token starts from its embedding alone.
    """

    def __init__(self, spec: ModelSpec, tensors: dict[str, Tensor], norms: tuple[str, ...], ops: Ops) -> None:
        """Takes the layers out of `tensors` one by one, so that at most one layer is in memory twice."""
        self.spec = spec
        self._ops = ops
        self._embedding = tensors["model.embed_tokens.weight"]
        self._norm = tensors["model.norm.weight"]
        self._head = tensors["lm_head.weight"]
        self._layers = [_read_layer(tensors, f"model.layers.{index}.", norms) for index in range(spec.layers)]
        #: of each layer, the norm that comes after it: the next one's first, or the loop's
        self._following = [*(layer.norms[0] for layer in self._layers[1:]), self._norm]
        self._positions = Positions(spec, self._embedding.dtype, self._embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def row_size(self) -> int:
        return self.spec.hidden_size

    def initial_state(self, kind: InitialState, seeds: Tensor, positions: Tensor) -> Tensor:
        return torch.empty(len(positions), 0, device=positions.device)

    def prelude(self, tokens: Tensor, positions: Tensor, attend: Attend, state: Tensor) -> Tensor:
        return embedding(tokens, self._embedding)

    def coda(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        # The loop's closing norm is already in the rows; there is no second one.
        return rows

    def head(self, hidden: Tensor) -> Tensor:
        return self._ops.linear(hidden, self._head).float()


def attention(
    rows: Tensor, layer: Layer, spec: ModelSpec, turns: tuple[Tensor, Tensor], index: int, attend: Attend, ops: Ops
) -> Tensor:
    """The attention branch of `layer`, which is layer `index`, on normed rows [rows, hidden].

    `turns` are the rows' cos and sin from `Positions.at`.
    """
    heads = ops.linear(rows, layer.qkv).view(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
    rotated = rotate_halves(heads[:, : spec.heads + spec.kv_heads], *turns)
    query, key = rotated[:, : spec.heads], rotated[:, spec.heads :]
    attended = attend(index, query, key, heads[:, spec.heads + spec.kv_heads :])
    return ops.linear(attended.flatten(1), layer.out)


def mlp(rows: Tensor, layer: Layer, ops: Ops) -> Tensor:
    """The SwiGLU branch on normed rows [rows, hidden]."""
    return ops.linear(ops.silu_mul(ops.linear(rows, layer.gate_up)), layer.down)


def rotate_halves(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE that pairs feature j with j + head_dim / 2, on [rows, heads, head_dim]."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin
