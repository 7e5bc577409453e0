"""What the training models have in common: layers in plain torch, random exits, and what a family must provide."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from dialects import Dialect
from torch import Tensor, nn

from data import Batch

PROMPT_WEIGHT = 0.01
"""Weight of a prompt token's loss beside an answer token's 1: enough for text that reads like the tasks."""
EARLY_EXIT_ROWS = 0.5
"""Share of rows whose answer tokens stop at random loops, as they will when serving."""


class Exit(NamedTuple):
    """An exit rule of a family and its threshold."""

    rule: str
    threshold: float


class Prediction(NamedTuple):
    """Per token: the logits [B, S, V] of the loop at which it stopped, and the number of loops that it ran [B, S]."""

    logits: Tensor
    loops: Tensor


class Draws(NamedTuple):
    """Sources of a step's random numbers: one for tensors on the device, one for what the host must know."""

    device: torch.Generator
    host: Random


Turns = tuple[Tensor, Tensor]
KeysValues = tuple[Tensor, Tensor]


class TinyModel(nn.Module, ABC):
    """A family's training model: fp32 weights, activations in `dtype`. Tokens are [B, S], rows begin at position 0."""

    family: ClassVar[str]
    model_type: ClassVar[str]
    dialect: ClassVar[Dialect]
    #: thresholds to evaluate, by exit rule
    rules: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    #: learning rates of single parameters, as a share of the common one
    lr_shares: ClassVar[Mapping[str, float]] = {}

    @classmethod
    @abstractmethod
    def build(cls, vocab_size: int, dtype: torch.dtype = torch.float32) -> Self:
        """A new model of the built-in's sizes."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A new model of the sizes that a saved config.json gives."""

    @property
    @abstractmethod
    def loops(self) -> int:
        """Loops at full depth."""

    @property
    @abstractmethod
    def max_positions(self) -> int: ...

    @abstractmethod
    def matrices(self) -> list[Tensor]:
        """The weights that Muon trains."""

    @abstractmethod
    def loss(self, batch: Batch, progress: float, draws: Draws) -> Tensor:
        """Training loss of a batch when `progress` (0 to 1) of the steps are done."""

    @abstractmethod
    def predict(self, tokens: Tensor, loops: int, may_exit: Tensor, exit: Exit | None = None) -> Prediction:
        """Run at most `loops` loops; tokens of the mask `may_exit` [B, S] stop as the server lets them under `exit`."""

    @abstractmethod
    def config(self) -> dict[str, object]:
        """The complete config.json, but for token ids."""

    @classmethod
    @abstractmethod
    def compiled(cls) -> tuple[type[nn.Module], ...]:
        """The layers, which run many times a step."""

    def second_stage(self, batches: Iterator[Batch], steps: int, device: str) -> None:
        """What is trained after everything else, on `steps` further batches."""
        del batches, steps, device

    @property
    def exit(self) -> Exit | None:
        """What a saved model says of its own exit rule."""
        return None

    def recommend(self, thresholds: Mapping[str, float]) -> None:
        """Take the best threshold of each rule, where the checkpoint can say it."""
        del thresholds

    def checkpoint(self) -> dict[str, Tensor]:
        """The tensors by the names of the released checkpoints."""
        return self.state_dict()

    def load_checkpoint(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `checkpoint` gave."""
        self.load_state_dict(tensors)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Token logits [..., V] of what the head takes [..., H]."""

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy [N, B, S] of predictions from hidden [N, B, S, H]."""
        losses = []
        for h in hidden:
            logits = self.logits(h).float().flatten(0, 1)
            losses.append(F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets))
        return torch.stack(losses)


def compile_model(family: type[TinyModel]) -> None:
    """Compile the layers and the losses; everything else is too little to be worth it."""
    torch._dynamo.config.recompile_limit = 64
    for layer in family.compiled():
        layer.forward = torch.compile(layer.forward, dynamic=False)
    family.token_losses = torch.compile(family.token_losses, dynamic=False)  # type: ignore[method-assign]


def token_weight(answer: Tensor) -> Tensor:
    """Weights [B, S] of the losses of tokens of which `answer` [B, S] belong to an answer."""
    return torch.where(answer, 1.0, PROMPT_WEIGHT)


def random_depths(answer: Tensor, loops: int, generator: torch.Generator) -> Tensor:
    """Loops [B, S] after which tokens stop: all, but in some rows any number for tokens of the mask `answer` [B, S].

    So deeper loops learn to read the keys of earlier ones.
    """
    rows = torch.rand((len(answer), 1), device=answer.device, generator=generator) < EARLY_EXIT_ROWS
    drawn = torch.randint(1, loops + 1, answer.shape, device=answer.device, generator=generator)
    return torch.where(rows & answer, drawn, loops)


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, weight applied after the cast back, as the released models do."""

    def __init__(self, size: int, eps: float, init: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), init))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class Linear(nn.Linear):
    """A bias-free linear map whose fp32 weight is cast to the dtype of the activations."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def angles(positions: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Rotary angles [positions, head_dim / 2], in fp32."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    return torch.arange(positions, device=device, dtype=torch.float32)[:, None] * inverse


def half_turns(positions: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype) -> Turns:
    """Cos and sin [positions, head_dim] of the split-half layout: computed in fp32, then cast."""
    turns = angles(positions, head_dim, theta, device)
    turns = torch.cat((turns, turns), dim=-1)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def rotate_halves(x: Tensor, turns: Turns) -> Tensor:
    """Apply split-half rotary positions to x [B, heads, S, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * turns[0] + torch.cat((-second, first), dim=-1) * turns[1]


class Attention(nn.Module):
    """Causal attention; a token that has stopped keeps the keys and values of its last loop (`last_exited`)."""

    def __init__(self, size: int, heads: int, kv_heads: int, head_dim: int, branch: float = 1.0) -> None:
        """`branch` scales the initial output."""
        super().__init__()
        std = size**-0.5
        self.head_dim = head_dim
        self.sharing = heads // kv_heads
        self.q_proj = Linear(size, heads * head_dim, std)
        self.k_proj = Linear(size, kv_heads * head_dim, std)
        self.v_proj = Linear(size, kv_heads * head_dim, std)
        self.o_proj = Linear(heads * head_dim, size, branch * (heads * head_dim) ** -0.5)

    def place(self, q: Tensor, k: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, heads, S, head_dim] with their positions in them."""
        return rotate_halves(q, turns), rotate_halves(k, turns)

    def project(self, x: Tensor, turns: Turns) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, its heads, S, head_dim]."""

        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)

        q, k = self.place(split(self.q_proj(x)), split(self.k_proj(x)), turns)
        return q, k, split(self.v_proj(x))

    def forward(
        self, x: Tensor, turns: Turns, last: KeysValues | None, stopped: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        q, k, v = self.project(x, turns)
        if last is not None and stopped is not None:
            keep = stopped[:, None, :, None]
            k, v = torch.where(keep, last[0], k), torch.where(keep, last[1], v)
        keys, values = (y.repeat_interleave(self.sharing, 1) if self.sharing > 1 else y for y in (k, v))
        y = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, size: int, inner: int, branch: float = 1.0) -> None:
        """`branch` scales the initial output."""
        super().__init__()
        self.gate_proj = Linear(size, inner, size**-0.5)
        self.up_proj = Linear(size, inner, size**-0.5)
        self.down_proj = Linear(inner, size, branch * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y
