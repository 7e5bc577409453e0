"""Huginn (arXiv 2502.05171): a few layers, a core that loops over a state and the first layers' output, a few layers.

A row that is under way is [state | prelude output], so that both persist between its loops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from rlt.errors import ModelError
from rlt.exec.normals import PURPOSE_STATE, normals
from rlt.models.interface import Attend
from rlt.models.keys import Keys
from rlt.models.layers import Layer, mlp, rms_norm

#: Standard deviation of an initial state before the cut: init std sqrt(2 / (5 n)) times embedding scale sqrt(n).
STATE_STD = math.sqrt(2 / 5)

#: Tensors of a checkpoint that follow from others or from config.json: checked, and not kept.
DERIVED = ("lm_head.weight", "freqs_cis")

#: Room for a RoPE table rounded to bfloat16. Another base or another layout is off by whole units.
_TABLE_LIMIT = 2.0**-7

_STAGES = ("prelude", "core_block", "coda")

InitialState = Literal["zero", "seeded"]


@dataclass(frozen=True, slots=True)
class HuginnShape:
    """The shape of a checkpoint. Its q and k have a bias, its head is tied to the embedding: nothing else is served."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    head_dim: int
    prelude_layers: int
    #: the layers that loop
    core_layers: int
    coda_layers: int
    loops: int
    rope_base: float
    norm_eps: float
    max_positions: int

    @property
    def embed_scale(self) -> float:
        """What embeddings are multiplied with."""
        return math.sqrt(self.hidden_size)

    @property
    def outer_layers(self) -> int:
        """Layers outside of the loops, each with one set of keys and values per token."""
        return self.prelude_layers + self.coda_layers

    @property
    def layers_by_stage(self) -> dict[str, int]:
        """Number of layers by the name of their stage in tensor names."""
        return dict(zip(_STAGES, (self.prelude_layers, self.core_layers, self.coda_layers), strict=True))


def read_shape(keys: Keys) -> HuginnShape:
    """The shape that config.json gives; what is wrong with it goes to `keys`.

    Keys that published files may leave out have the published class's defaults; every other missing key is an error.
    Token ids and dtype are left for the caller to take.
    """
    vocab_size, hidden = keys.integer("vocab_size", 2), keys.integer("n_embd", 2)
    heads = keys.integer("n_heads", 1, default=keys.integer("num_attention_heads", 1, default=55))
    if hidden % heads or hidden // heads % 2:
        keys.problem(f"n_embd ({hidden}) must be n_heads ({heads}) times an even number, since RoPE turns pairs")
    keys.only("num_attention_heads", heads)
    keys.only("num_key_value_heads", heads)
    keys.only("head_dim", hidden // heads)
    keys.only("padded_vocab_size", vocab_size)
    shape = HuginnShape(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size", 1),
        heads=heads,
        head_dim=hidden // heads,
        prelude_layers=keys.integer("n_layers_in_prelude", 1),
        core_layers=keys.integer("n_layers_in_recurrent_block", 1),
        coda_layers=keys.integer("n_layers_in_coda", 1),
        loops=keys.integer("mean_recurrence", 1),
        rope_base=keys.number("rope_base", 0, default=50_000.0, above=True),
        norm_eps=keys.number("norm_eps", 0, above=True),
        max_positions=keys.integer("block_size", 2),
    )
    keys.only("n_layers", shape.outer_layers + shape.core_layers)
    _check_variants(keys, shape)
    return shape


def _check_variants(keys: Keys, shape: HuginnShape) -> None:
    """Keys that choose another computation, which must name the one that is served, and those that choose nothing."""
    for name, value in {
        "architecture_class_name": "RecurrentGPT",
        "block_class_name": "SandwichBlock",
        "mlp_class_name": "GatedMLP",
        "nonlin_name": "SiLU",
        "norm_class_name": "RMSNorm_llama",
        "injection_type": "linear",
        "state_init": "like-init",
    }.items():
        keys.choice(name, (value,))
    for name in ("qk_bias", "tie_embeddings"):
        if keys.take(name) is not True:
            keys.problem(f"{name} must be true")
    keys.only("tie_word_embeddings", True)
    keys.only("bias", False)
    keys.only("test_time_noise", 0, 0.0)
    values = keys.take("init_values") or {}
    scale = values.get("embed_scale", shape.embed_scale) if isinstance(values, dict) else None
    if not isinstance(scale, int | float) or not math.isclose(scale, shape.embed_scale, rel_tol=1e-6):
        keys.problem(f"init_values.embed_scale must be the square root of n_embd, {shape.embed_scale:.6f}")
    # How the published weights were initialised and trained, and files' own bookkeeping.
    keys.harmless("init_strategy", "init_orthogonal", "padding_multiple", "test_time_noise_type")
    keys.harmless("activation_checkpoint_impl", "effective_expected_depth", "mean_backprop_depth", "sampling_scheme")
    keys.harmless("architectures", "auto_map", "transformers_version", "_name_or_path", "use_cache", "model_type")


def tensor_shapes(shape: HuginnShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its shape, `DERIVED` ones included."""
    hidden, inner, heads, size = shape.hidden_size, shape.intermediate_size, shape.heads, shape.head_dim
    layer = {
        "attn.Wqkv.weight": (3 * hidden, hidden),
        "attn.qk_bias": (2, 1, heads, size),
        "attn.proj.weight": (hidden, hidden),
        "mlp.fc.weight": (2 * inner, hidden),
        "mlp.proj.weight": (hidden, inner),
        **{f"norm_{number}.weight": (hidden,) for number in range(1, 5)},
    }
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (shape.vocab_size, hidden),
        "transformer.adapter.weight": (hidden, 2 * hidden),
        "transformer.ln_f.weight": (hidden,),
        "lm_head.weight": (shape.vocab_size, hidden),
        "freqs_cis": (1, shape.max_positions, 1, size // 2, 2),
    }
    for stage, count in shape.layers_by_stage.items():
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


def turn_table(shape: HuginnShape, device: torch.device | None = None) -> Tensor:
    """cos and sin of all positions, [positions, head_dim / 2, 2], float32: `freqs_cis` without its unit dimensions."""
    share = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    positions = torch.arange(shape.max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * (1.0 / shape.rope_base**share)
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
    """The maths of the family over flat rows; where keys and values live is the caller's business (`Attend`).

    Layers that run once per token and layers that loop are counted apart: `prelude` and `coda` call `attend` with
    layers 0 .. `outer_layers` - 1, the prelude's first; `core` with layers 0 .. `core_layers` - 1.
    """

    def __init__(self, shape: HuginnShape, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` are those of `tensor_shapes`, in one dtype. Raises `ModelError` if a derived one does not fit."""
        self.shape = shape
        self._embedding = tensors["transformer.wte.weight"]
        self._adapter = tensors["transformer.adapter.weight"]
        self._norm = tensors["transformer.ln_f.weight"]
        self._stages = {
            stage: [_read_block(tensors, f"transformer.{stage}.{index}.") for index in range(count)]
            for stage, count in shape.layers_by_stage.items()
        }
        # Not the checkpoint's table: with the weights it may have been rounded to their dtype.
        self._turns = turn_table(shape, self._embedding.device)
        if not torch.equal(tensors["lm_head.weight"], self._embedding):
            raise ModelError("lm_head.weight is not transformer.wte.weight, but config.json says that they are tied")
        if not (tensors["freqs_cis"][0, :, 0].float() - self._turns).abs().max() < _TABLE_LIMIT:
            raise ModelError(f"freqs_cis is not the rotary table of rope_base {shape.rope_base:g} in config.json")

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def row_size(self) -> int:
        """Width of a row between its loops: [state | prelude output]."""
        return 2 * self.shape.hidden_size

    def prelude(self, tokens: Tensor, positions: Tensor, attend: Attend, state: Tensor) -> Tensor:
        """Rows [rows, row_size] of `tokens` [rows] at `positions` [rows]; loops start at `state` [rows, hidden]."""
        hidden = embedding(tokens, self._embedding) * self.shape.embed_scale
        hidden = self._run("prelude", hidden, positions, attend)
        return torch.cat([state.to(self.dtype), hidden], -1)

    def core(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One loop over `rows` [rows, row_size] at `positions` [rows]. No norm between loops."""
        state = self._run("core_block", linear(rows, self._adapter), positions, attend)
        return torch.cat([state, rows[:, self.shape.hidden_size :]], -1)

    def coda(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What `head` takes, [rows, hidden], of `rows` [rows, row_size] that leave the loops, or could.

        May be run again on the same token after a further loop: its keys and values are those of the last run.
        """
        hidden = self._final_norm(self.state(rows))
        return self._final_norm(self._run("coda", hidden, positions, attend, first=self.shape.prelude_layers))

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab], float32, of the coda's output [rows, hidden]."""
        return linear(hidden, self._embedding).float()

    def state(self, rows: Tensor) -> Tensor:
        """The states [rows, hidden], raw core outputs, of `rows` [rows, row_size]."""
        return rows[:, : self.shape.hidden_size]

    def _final_norm(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self._norm, self.shape.norm_eps)

    def _run(self, stage: str, hidden: Tensor, positions: Tensor, attend: Attend, first: int = 0) -> Tensor:
        """A stage's layers, of which the first is layer `first` for `attend`; norms are of sums, not of branches."""
        eps, turns = self.shape.norm_eps, self._turns[positions]
        for index, block in enumerate(self._stages[stage], first):
            before_attention, after_attention, before_mlp, after_mlp = block.layer.norms
            branch = self._attention(rms_norm(hidden, before_attention, eps), block, turns, index, attend)
            hidden = rms_norm(hidden + branch, after_attention, eps)
            branch = mlp(rms_norm(hidden, before_mlp, eps), block.layer)
            hidden = rms_norm(hidden + branch, after_mlp, eps)
        return hidden

    def _attention(self, rows: Tensor, block: Block, turns: Tensor, index: int, attend: Attend) -> Tensor:
        count = self.shape.heads
        heads = linear(rows, block.layer.qkv).view(-1, 3 * count, self.shape.head_dim)
        rotated = rotate_pairs(heads[:, : 2 * count] + block.bias, turns)
        attended = attend(index, rotated[:, :count], rotated[:, count:], heads[:, 2 * count :])
        return linear(attended.flatten(1), block.layer.out)


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
