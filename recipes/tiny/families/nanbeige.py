"""Nanbeige4.2: a Llama-like stack run twice, a norm after every loop, fewer key heads than query heads, no exit gate.

Only the last loop's loss is trained, as there is nothing to read before it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from dialects import NANBEIGE, Dialect
from torch import Tensor, nn

from data import Batch
from families.common import (
    MLP,
    Attention,
    Draws,
    Exit,
    Linear,
    Prediction,
    RMSNorm,
    TinyModel,
    Turns,
    half_turns,
    token_weight,
)


@dataclass(frozen=True, slots=True)
class NanbeigeShape:
    """Sizes of a tiny Nanbeige; as in the real one, all query heads together are wider than a row."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    loops: int = 2
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_positions: int = 2048


class Layer(nn.Module):
    """One block: each half is normed before, and then added to the stream."""

    def __init__(self, shape: NanbeigeShape) -> None:
        super().__init__()
        # Branches start small beside a stream of size 1, so that 12 layer passes train from the first step.
        branch = 1 / math.sqrt(2 * shape.layers)
        self.self_attn = Attention(shape.hidden_size, shape.heads, shape.kv_heads, shape.head_dim, branch)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size, branch)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, x: Tensor, turns: Turns) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns, None, None)[0]
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class _Backbone(nn.Module):
    """Exists for the weight names of the checkpoint (`model.…`)."""

    def __init__(self, shape: NanbeigeShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Nanbeige(TinyModel):
    """The family's training model."""

    family: ClassVar[str] = "nanbeige"
    model_type: ClassVar[str] = "nanbeige"
    dialect: ClassVar[Dialect] = NANBEIGE

    def __init__(self, shape: NanbeigeShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.model = _Backbone(shape)
        self.lm_head = Linear(shape.hidden_size, shape.vocab_size, shape.hidden_size**-0.5)

    @classmethod
    def build(cls, vocab_size: int, dtype: torch.dtype = torch.float32) -> Self:
        return cls(NanbeigeShape(vocab_size), dtype)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(
            NanbeigeShape(
                vocab_size=config["vocab_size"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                loops=config["num_loops"],
                rope_theta=config["rope_theta"],
                norm_eps=config["rms_norm_eps"],
                max_positions=config["max_position_embeddings"],
            )
        )

    @property
    def loops(self) -> int:
        return self.shape.loops

    @property
    def max_positions(self) -> int:
        return self.shape.max_positions

    def matrices(self) -> list[Tensor]:
        return [p for p in self.model.layers.parameters() if p.ndim == 2]

    @classmethod
    def compiled(cls) -> tuple[type[nn.Module], ...]:
        return (Layer,)

    def forward(self, tokens: Tensor, loops: int | None = None) -> Tensor:
        """Normed hidden states [B, S, H] of tokens [B, S] after `loops` loops."""
        shape = self.shape
        turns = half_turns(tokens.shape[1], shape.head_dim, shape.rope_theta, tokens.device, self.dtype)
        x: Tensor = self.model.embed_tokens(tokens).to(self.dtype)
        for _ in range(loops or shape.loops):
            for layer in self.model.layers:
                x = layer(x, turns)
            x = self.model.norm(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def loss(self, batch: Batch, progress: float, draws: Draws) -> Tensor:
        tokens, answer = batch
        losses = self.token_losses(self(tokens[:, :-1])[None], tokens[:, 1:])[0]
        weight = token_weight(answer[:, 1:])
        return (losses * weight).sum() / weight.sum()

    def predict(self, tokens: Tensor, loops: int, may_exit: Tensor, exit: Exit | None = None) -> Prediction:
        if exit is not None:
            raise ValueError("Nanbeige has no exit rule")
        return Prediction(self.logits(self(tokens, loops)), torch.full_like(tokens, loops))

    def config(self) -> dict[str, object]:
        shape = self.shape
        return {
            "architectures": ["NanbeigeForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": shape.intermediate_size,
            "kv_channels": shape.head_dim,
            "loop_loss_weights": [],
            "max_position_embeddings": shape.max_positions,
            "model_type": self.model_type,
            "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "num_key_value_heads": shape.kv_heads,
            "num_loops": shape.loops,
            "rms_norm_eps": shape.norm_eps,
            "rope_scaling": None,
            "rope_theta": shape.rope_theta,
            "skip_loop_final_norm": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": shape.vocab_size,
        }
