"""Huginn's layers, the names of their weights in a checkpoint, and how many loops a training step runs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn

from families.common import MLP, Attention, KeysValues, RMSNorm, Turns

LOOP_SPREAD = 0.3
"""Standard deviation of the logarithm of the rate of the Poisson distribution that loops are drawn from."""


@dataclass(frozen=True, slots=True)
class HuginnShape:
    """Sizes of a tiny Huginn."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 640
    heads: int = 4
    prelude_layers: int = 1
    core_layers: int = 2
    coda_layers: int = 1
    loops: int = 8
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    max_positions: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def most_loops(self) -> int:
        """Most that are drawn in training."""
        return 2 * self.loops


def rotate_pairs(x: Tensor, turns: Turns) -> Tensor:
    """Turn features 2 j and 2 j + 1 of x [B, heads, S, head_dim] by cos and sin [S, head_dim / 2], in fp32."""
    even, odd = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = turns
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


class PairAttention(Attention):
    """Attention with a bias on queries and keys, and rotary positions that turn neighbours against each other."""

    def __init__(self, shape: HuginnShape, branch: float) -> None:
        super().__init__(shape.hidden_size, shape.heads, shape.heads, shape.head_dim, branch)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, shape.heads, shape.head_dim))

    def place(self, q: Tensor, k: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        q_bias, k_bias = self.qk_bias.to(q.dtype).transpose(1, 2)
        return rotate_pairs(q + q_bias, turns), rotate_pairs(k + k_bias, turns)

    def beside(self, x: Tensor, turns: Turns, shown: KeysValues) -> Tensor:
        """Attention of tokens to earlier ones' `shown` keys and values [B, heads, S, head_dim], and to their own."""
        q, k, v = self.project(x, turns)
        scale = self.head_dim**-0.5
        scores = (q @ shown[0].mT) * scale
        own = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        scores = torch.where(own, (q * k).sum(-1, keepdim=True) * scale, scores)
        share = scores.masked_fill(torch.ones_like(own).triu(1), -math.inf).softmax(-1)
        y = share.masked_fill(own, 0) @ shown[1] + share.diagonal(dim1=-2, dim2=-1)[..., None] * v
        attended: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return attended


class Block(nn.Module):
    """One block: a norm before each half, and one of the sum after it."""

    def __init__(self, shape: HuginnShape) -> None:
        super().__init__()
        # Branches start small beside a stream of size 1.
        branch = 1 / math.sqrt(2 * (shape.prelude_layers + shape.core_layers + shape.coda_layers))
        self.attn = PairAttention(shape, branch)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size, branch)
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = (
            RMSNorm(shape.hidden_size, shape.norm_eps) for _ in range(4)
        )

    def forward(
        self, x: Tensor, turns: Turns, last: KeysValues | None, stopped: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        branch, keys_values = self.attn(self.norm_1(x), turns, last, stopped)
        return self._rest(x, branch), keys_values

    def beside(self, x: Tensor, turns: Turns, shown: KeysValues) -> Tensor:
        """The block where earlier tokens show other keys and values than those that they have in `x`."""
        return self._rest(x, self.attn.beside(self.norm_1(x), turns, shown))

    def _rest(self, x: Tensor, branch: Tensor) -> Tensor:
        x = self.norm_2(x + branch)
        y: Tensor = self.norm_4(x + self.mlp(self.norm_3(x)))
        return y


#: Parameters of a block that are one tensor of a checkpoint, by its name.
FUSED = {
    "attn.Wqkv.weight": ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight"),
    "attn.qk_bias": ("attn.qk_bias",),
    "attn.proj.weight": ("attn.o_proj.weight",),
    "mlp.fc.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.proj.weight": ("mlp.down_proj.weight",),
    **{f"norm_{i}.weight": (f"norm_{i}.weight",) for i in range(1, 5)},
}


def block_tensors(block: Block) -> dict[str, Tensor]:
    """A block's tensors as a checkpoint names them."""
    own = dict(block.named_parameters())
    return {name: torch.cat([own[part] for part in parts]) for name, parts in FUSED.items()}


def load_block(block: Block, tensors: Mapping[str, Tensor]) -> None:
    """Take what `block_tensors` gave."""
    own: dict[str, Tensor] = {}
    for name, parts in FUSED.items():
        own |= zip(parts, tensors[name].chunk(len(parts)), strict=True)
    block.load_state_dict(own)


def draw_loops(rng: Random, mean: int, most: int) -> int:
    """1 plus a Poisson variable whose rate is log-normal, as published; `mean` on average, at most `most`."""
    rate = (mean - 1) * math.exp(rng.gauss(-(LOOP_SPREAD**2) / 2, LOOP_SPREAD))
    loops, chance = 1, rng.random()
    while chance > math.exp(-rate):
        loops, chance = loops + 1, chance * rng.random()
    return min(loops, most)
