"""Huginn (arXiv 2502.05171): a few layers, a core that loops over a state and the first layers' output, a few layers.

A row that is under way is [state | prelude output], so that both persist between its loops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from rlt.errors import ModelError
from rlt.exec.normals import normals
from rlt.exec.rng import PURPOSE_STATE
from rlt.models.interface import Attend, InitialState
from rlt.models.layers import Layer, mlp
from rlt.models.ops import TORCH, Ops
from rlt.models.spec import ModelSpec

#: Standard deviation of an initial state before the cut: init std sqrt(2 / (5 n)) times embedding scale sqrt(n).
STATE_STD = math.sqrt(2 / 5)

#: Tensors of a checkpoint that follow from others or from config.json: checked, and not kept.
DERIVED = ("lm_head.weight", "freqs_cis")

#: Room for a RoPE table rounded to bfloat16. Another base or another layout is off by whole units.
_TABLE_LIMIT = 2.0**-7

_STAGES = ("prelude", "core_block", "coda")


def stages(spec: ModelSpec) -> dict[str, int]:
    """Number of layers by the name of their stage in tensor names."""
    return dict(zip(_STAGES, (spec.prelude_layers, spec.layers, spec.coda_layers), strict=True))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its shape, `DERIVED` ones included."""
    hidden, inner, heads, size = spec.hidden_size, spec.intermediate_size, spec.heads, spec.head_dim
    layer = {
        "attn.Wqkv.weight": (3 * hidden, hidden),
        "attn.qk_bias": (2, 1, heads, size),
        "attn.proj.weight": (hidden, hidden),
        "mlp.fc.weight": (2 * inner, hidden),
        "mlp.proj.weight": (hidden, inner),
        **{f"norm_{number}.weight": (hidden,) for number in range(1, 5)},
    }
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (spec.vocab_size, hidden),
        "transformer.adapter.weight": (hidden, 2 * hidden),
        "transformer.ln_f.weight": (hidden,),
        "lm_head.weight": (spec.vocab_size, hidden),
        "freqs_cis": (1, spec.max_positions, 1, size // 2, 2),
    }
    for stage, count in stages(spec).items():
        for index in range(count):
            shapes |= {f"transformer.{stage}.{index}.{name}": value for name, value in layer.items()}
    return shapes


def initial_state(seed: Tensor, position: Tensor, width: int, kind: InitialState) -> Tensor:
    """States [rows, width], float32, before the first loop of rows at `position` [rows] of requests with `seed` [rows].

    "zero", or "seeded": a normal variable with mean 0 and standard deviation `STATE_STD` cut at three of these, which
    is the published distribution but a function of (seed, position, feature) alone, so that no batch, chunk, reused
    prefix or resumption changes it.
    """
    if kind == "zero":
        return torch.zeros(len(position), width, device=position.device)
    return (normals(seed, position, width, PURPOSE_STATE) * STATE_STD).float()


def turn_table(spec: ModelSpec, device: torch.device | None = None) -> Tensor:
    """cos and sin of all positions, [positions, head_dim / 2, 2], float32: `freqs_cis` without its unit dimensions."""
    share = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=device) / spec.head_dim
    positions = torch.arange(spec.max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * (1.0 / spec.rope_theta**share)
    return torch.stack([angles.cos(), angles.sin()], -1)


def rotate_pairs(heads: Tensor, turns: Tensor) -> Tensor:
    """RoPE that pairs features 2 j and 2 j + 1, on [rows, heads, head_dim] with `turns` [rows, head_dim / 2, 2].

    Computed in float32, whatever the rows are, and cast back.
    """
    even, odd = heads.float().reshape(*heads.shape[:-1], -1, 2).unbind(-1)
    cos, sin = turns[:, None].unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(heads.dtype)


@dataclass(frozen=True, slots=True)
class Block:
    """A layer, and the bias [2 heads, head_dim] of its queries and keys."""

    layer: Layer
    bias: Tensor


class Huginn:
    """The maths of the family; see `LoopedModel`."""

    #: Whether a token is done is read from what its loops still change.
    gate = None

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Tensor], ops: Ops = TORCH) -> None:
        """`tensors` are those of `tensor_shapes`, in one dtype. Raises `ModelError` if a derived one does not fit."""
        self.spec = spec
        self._ops = ops
        #: what embeddings are multiplied with
        self._scale = math.sqrt(spec.hidden_size)
        self._embedding = tensors["transformer.wte.weight"]
        self._adapter = tensors["transformer.adapter.weight"]
        self._norm = tensors["transformer.ln_f.weight"]
        self._stages = {
            stage: [_read_block(tensors, f"transformer.{stage}.{index}.") for index in range(count)]
            for stage, count in stages(spec).items()
        }
        # Not the checkpoint's table: with the weights it may have been rounded to their dtype.
        self._turns = turn_table(spec, self._embedding.device)
        if not torch.equal(tensors["lm_head.weight"], self._embedding):
            raise ModelError("lm_head.weight is not transformer.wte.weight, but config.json says that they are tied")
        if not (tensors["freqs_cis"][0, :, 0].float() - self._turns).abs().max() < _TABLE_LIMIT:
            raise ModelError(f"freqs_cis is not the rotary table of rope_base {spec.rope_theta:g} in config.json")

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def row_size(self) -> int:
        """Width of a row between its loops: [state | prelude output]."""
        return 2 * self.spec.hidden_size

    def initial_state(self, kind: InitialState, seeds: Tensor, positions: Tensor) -> Tensor:
        return initial_state(seeds, positions, self.spec.hidden_size, kind)

    def prelude(self, tokens: Tensor, positions: Tensor, attend: Attend, state: Tensor) -> Tensor:
        hidden = embedding(tokens, self._embedding) * self._scale
        hidden = self._run("prelude", hidden, positions, attend)
        return torch.cat([state.to(self.dtype), hidden], -1)

    def core(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        # No norm between loops.
        state = self._run("core_block", self._ops.linear(rows, self._adapter), positions, attend)
        return torch.cat([state, rows[:, self.spec.hidden_size :]], -1)

    def coda(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden = self._ops.rms_norm(self.state(rows), self._norm, self.spec.norm_eps)
        return self._run("coda", hidden, positions, attend, first=self.spec.prelude_layers, closing=self._norm)

    def head(self, hidden: Tensor) -> Tensor:
        return self._ops.linear(hidden, self._embedding).float()

    def state(self, rows: Tensor) -> Tensor:
        """The states [rows, hidden], raw core outputs, of `rows` [rows, row_size]."""
        return rows[:, : self.spec.hidden_size]

    def _run(
        self,
        stage: str,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        first: int = 0,
        closing: Tensor | None = None,
    ) -> Tensor:
        """A stage's layers, of which the first is layer `first` for `attend`, and the norm `closing` if there is one.

        Norms inside of layers are of sums, not of branches.
        """
        ops, eps, turns, blocks = self._ops, self.spec.norm_eps, self._turns[positions], self._stages[stage]
        normed = ops.rms_norm(hidden, blocks[0].layer.norms[0], eps)
        following = [*(block.layer.norms[0] for block in blocks[1:]), closing]
        for index, (block, next_norm) in enumerate(zip(blocks, following, strict=True), first):
            _, after_attention, before_mlp, after_mlp = block.layer.norms
            branch = self._attention(normed, block, turns, index, attend)
            hidden, normed = ops.add_norm(hidden, branch, "sum", after_attention, before_mlp, eps)
            branch = mlp(normed, block.layer, ops)
            hidden, normed = ops.add_norm(hidden, branch, "sum", after_mlp, next_norm, eps)
        return normed

    def _attention(self, rows: Tensor, block: Block, turns: Tensor, index: int, attend: Attend) -> Tensor:
        count = self.spec.heads
        heads = self._ops.linear(rows, block.layer.qkv).view(-1, 3 * count, self.spec.head_dim)
        rotated = rotate_pairs(heads[:, : 2 * count] + block.bias, turns)
        attended = attend(index, rotated[:, :count], rotated[:, count:], heads[:, 2 * count :])
        return self._ops.linear(attended.flatten(1), block.layer.out)


def _read_block(tensors: Mapping[str, Tensor], prefix: str) -> Block:
    """A block's weights as stored: q, k and v are one matrix, gate and up are one."""
    layer = Layer(
        qkv=tensors[f"{prefix}attn.Wqkv.weight"],
        out=tensors[f"{prefix}attn.proj.weight"],
        gate_up=tensors[f"{prefix}mlp.fc.weight"],
        down=tensors[f"{prefix}mlp.proj.weight"],
        norms=tuple(tensors[f"{prefix}norm_{number}.weight"] for number in range(1, 5)),
    )
    return Block(layer, tensors[f"{prefix}attn.qk_bias"].flatten(0, 2))
