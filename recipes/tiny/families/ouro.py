"""Ouro: the whole stack of layers is run `loops` times, a norm after every loop, one learned exit gate.

Stage I trains the whole model on the expected loss under the exit distribution with an entropy bonus; stage II freezes
it and trains the exit gate alone to tell whether going on would still lower the loss.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from dialects import CHATML, Dialect
from torch import Tensor, nn

from data import Batch
from families.common import (
    MLP,
    Attention,
    Draws,
    Exit,
    KeysValues,
    Linear,
    Prediction,
    RMSNorm,
    TinyModel,
    Turns,
    half_turns,
    random_depths,
    token_weight,
)

LAST_LOOP_WEIGHT = 0.3
"""Weight of the last loop's own loss on top of the expected loss, so that full depth is never starved."""
EVERY_LOOP_WEIGHT = 0.05
"""Weight of the mean loss of all loops, so that early loops answer what they can and easy tokens may stop there."""

Exits = Callable[[int, Tensor], Tensor]
"""(loops done, their gate logits [done, B, S]) to a bool mask [B, S] of tokens that have stopped by now."""


@dataclass(frozen=True, slots=True)
class OuroShape:
    """Sizes of a tiny Ouro."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 640
    layers: int = 4
    heads: int = 4
    loops: int = 4
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    max_positions: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads


class Trace(NamedTuple):
    """What every loop left behind: hidden states [loops, B, S, H] and fp32 gate logits [loops, B, S]."""

    hidden: Tensor
    gate: Tensor


class Layer(nn.Module):
    """One block: each half is normed before and after, and then added to the stream."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()

        def norm(init: float) -> RMSNorm:
            return RMSNorm(shape.hidden_size, shape.norm_eps, init)

        # Branches start small beside a stream of size 1, so that 16 layer passes train from the first step.
        branch = 1 / math.sqrt(2 * shape.layers)
        self.self_attn = Attention(shape.hidden_size, shape.heads, shape.heads, shape.head_dim)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = norm(1.0)
        self.input_layernorm_2 = norm(branch)
        self.post_attention_layernorm = norm(1.0)
        self.post_attention_layernorm_2 = norm(branch)

    def forward(
        self, x: Tensor, turns: Turns, last: KeysValues | None, stopped: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        branch, keys_values = self.self_attn(self.input_layernorm(x), turns, last, stopped)
        x = x + self.input_layernorm_2(branch)
        x = x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))
        return x, keys_values


class _Backbone(nn.Module):
    """Exists for the weight names of the checkpoint (`model.…`)."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.early_exit_gate = nn.Linear(shape.hidden_size, 1)
        nn.init.zeros_(self.early_exit_gate.weight)
        nn.init.zeros_(self.early_exit_gate.bias)


class Ouro(TinyModel):
    """The family's training model."""

    family: ClassVar[str] = "ouro"
    model_type: ClassVar[str] = "ouro"
    dialect: ClassVar[Dialect] = CHATML
    rules: ClassVar[Mapping[str, tuple[float, ...]]] = {"ouro": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)}

    def __init__(self, shape: OuroShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.exit_threshold = 1.0
        self.model = _Backbone(shape)
        self.lm_head = Linear(shape.hidden_size, shape.vocab_size, shape.hidden_size**-0.5)

    @classmethod
    def build(cls, vocab_size: int, dtype: torch.dtype = torch.float32) -> Self:
        return cls(OuroShape(vocab_size), dtype)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        model = cls(
            OuroShape(
                vocab_size=config["vocab_size"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                loops=config["total_ut_steps"],
                rope_theta=config["rope_theta"],
                norm_eps=config["rms_norm_eps"],
                max_positions=config["max_position_embeddings"],
            )
        )
        model.exit_threshold = config["early_exit_threshold"]
        return model

    @property
    def loops(self) -> int:
        return self.shape.loops

    @property
    def max_positions(self) -> int:
        return self.shape.max_positions

    @property
    def exit(self) -> Exit:
        return Exit("ouro", self.exit_threshold)

    def recommend(self, thresholds: Mapping[str, float]) -> None:
        self.exit_threshold = thresholds.get("ouro", 1.0)

    def matrices(self) -> list[Tensor]:
        return [p for p in self.model.layers.parameters() if p.ndim == 2]

    @classmethod
    def compiled(cls) -> tuple[type[nn.Module], ...]:
        return (Layer,)

    def forward(self, tokens: Tensor, loops: int | None = None, exits: Exits | None = None) -> Trace:
        """Run `loops` loops over tokens [B, S]; `exits` names the tokens whose keys stay those of an earlier loop."""
        shape = self.shape
        turns = half_turns(tokens.shape[1], shape.head_dim, shape.rope_theta, tokens.device, self.dtype)
        x = self.model.embed_tokens(tokens).to(self.dtype)
        last: list[KeysValues | None] = [None] * shape.layers
        stopped: Tensor | None = None
        hidden: list[Tensor] = []
        gates: list[Tensor] = []
        for _ in range(loops or shape.loops):
            for i, layer in enumerate(self.model.layers):
                x, last[i] = layer(x, turns, last[i] if exits else None, stopped)
            x = self.model.norm(x)
            hidden.append(x)
            gates.append(self.gate(x))
            if exits:
                stopped = exits(len(hidden), torch.stack(gates))
        return Trace(torch.stack(hidden), torch.stack(gates))

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def gate(self, hidden: Tensor) -> Tensor:
        """Exit gate logits [...] of normed hidden states [..., H], in fp32."""
        logits: Tensor = self.model.early_exit_gate(hidden.float()).squeeze(-1)
        return logits

    def loss(self, batch: Batch, progress: float, draws: Draws) -> Tensor:
        tokens, answer = batch
        depths = random_depths(answer[:, :-1], self.loops, draws.device)
        trace = self(tokens[:, :-1], exits=lambda done, gate: depths <= done)
        beta = 0.1 if progress < 0.5 else 0.05
        losses = self.token_losses(trace.hidden, tokens[:, 1:])
        return stage_one_loss(losses, trace.gate, token_weight(answer[:, 1:]), beta)

    def second_stage(self, batches: Iterator[Batch], steps: int, device: str, lr: float = 1e-2) -> None:
        """Stage II: the gate alone, on answer tokens, everything else frozen."""
        optimizer = torch.optim.AdamW(self.model.early_exit_gate.parameters(), lr=lr, weight_decay=0.0)
        for step in range(steps):
            tokens, answer = (t.to(device, non_blocking=True) for t in next(batches))
            with torch.no_grad():
                hidden = self(tokens[:, :-1]).hidden
                losses = self.token_losses(hidden, tokens[:, 1:])
            torch.autograd.backward(gate_loss(losses, self.gate(hidden), answer[:, 1:].float()))
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()

    def predict(self, tokens: Tensor, loops: int, may_exit: Tensor, exit: Exit | None = None) -> Prediction:
        exits = HazardExit(may_exit, exit.threshold if exit else 1.0, loops)
        hidden = self(tokens, loops=loops, exits=exits).hidden
        index = (exits.loops - 1)[None, :, :, None].expand(1, -1, -1, hidden.shape[-1])
        return Prediction(self.logits(hidden.gather(0, index)[0]), exits.loops)

    def config(self) -> dict[str, object]:
        shape = self.shape
        return {
            "architectures": ["OuroForCausalLM"],
            "attention_dropout": 0.0,
            "early_exit_threshold": self.exit_threshold,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": shape.intermediate_size,
            "layer_types": ["full_attention"] * shape.layers,
            "max_position_embeddings": shape.max_positions,
            "max_window_layers": shape.layers,
            "model_type": self.model_type,
            "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "num_key_value_heads": shape.heads,
            "rms_norm_eps": shape.norm_eps,
            "rope_scaling": None,
            "rope_theta": shape.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "total_ut_steps": shape.loops,
            "transformers_version": "4.54.1",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": shape.vocab_size,
        }


class HazardExit:
    """Stop a decode token at the first loop whose accumulated exit probability reaches `threshold`."""

    def __init__(self, may_exit: Tensor, threshold: float, depth: int) -> None:
        self.may_exit = may_exit
        self.threshold = threshold
        self.loops = torch.full(may_exit.shape, depth, device=may_exit.device)

    def __call__(self, done: int, gate: Tensor) -> Tensor:
        cdf = 1 - torch.prod(1 - torch.sigmoid(gate), dim=0)
        running = self.loops >= done
        now = self.may_exit & running & (cdf >= self.threshold) & (self.threshold < 1)
        self.loops = torch.where(now, done, self.loops)
        return self.loops <= done


def exit_probabilities(gate: Tensor) -> Tensor:
    """Probability of stopping after each loop [loops, ...]; the last loop takes all that is left."""
    hazard = torch.sigmoid(gate[:-1])
    survival = torch.cumprod(1 - hazard, dim=0)
    before = torch.cat((torch.ones_like(survival[:1]), survival))
    return before * torch.cat((hazard, torch.ones_like(hazard[:1])))


def stage_one_loss(losses: Tensor, gate: Tensor, weight: Tensor, beta: float) -> Tensor:
    """Expected loss under the exit distribution, minus `beta` times its entropy, plus the two small direct terms."""
    p = exit_probabilities(gate)
    entropy = -(p * (p + 1e-9).log()).sum(0)
    expected = (p * losses).sum(0) - beta * entropy
    per_token = expected + LAST_LOOP_WEIGHT * losses[-1] + EVERY_LOOP_WEIGHT * losses.mean(0)
    return (per_token * weight).sum() / weight.sum()


def gate_loss(losses: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Match 1 - hazard of each loop but the last to the label sigmoid(50 * (improvement - 0.005)).

    The improvement of a loop is what the best of the later loops would still gain.
    """
    best_later = losses.flip(0).cummin(0).values.flip(0)[1:]
    go_on = torch.sigmoid(50 * (losses[:-1] - best_later - 0.005))
    per_token = F.binary_cross_entropy_with_logits(gate[:-1], 1 - go_on, reduction="none").mean(0)
    return (per_token * weight).sum() / weight.sum()
