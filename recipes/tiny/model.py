"""Dense training model of the Ouro family: the whole stack of layers is run `loops` times, with one exit gate.

Family-specific maths and names live here; data, losses and evaluation only use `forward`, `logits` and `gate`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


KeysValues = tuple[Tensor, Tensor]
Exits = Callable[[int, Tensor], Tensor]
"""(loops done, their gate logits [done, B, S]) to a bool mask [B, S] of tokens that have stopped by now."""


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, weight applied after the cast back, as the released model does."""

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


def rotary_angles(positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cos and sin [positions, head_dim] of the split-half layout, in fp32."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply split-half rotary positions to x [B, heads, S, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention; a token that has stopped keeps the keys and values of its last loop (`last_exited`)."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        size, std = shape.hidden_size, shape.hidden_size**-0.5
        self.heads = shape.heads
        self.q_proj = Linear(size, size, std)
        self.k_proj = Linear(size, size, std)
        self.v_proj = Linear(size, size, std)
        self.o_proj = Linear(size, size, std)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, last: KeysValues | None, stopped: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)

        q = rotate(split(self.q_proj(x)), cos, sin)
        k = rotate(split(self.k_proj(x)), cos, sin)
        v = split(self.v_proj(x))
        if last is not None and stopped is not None:
            keep = stopped[:, None, :, None]
            k, v = torch.where(keep, last[0], k), torch.where(keep, last[1], v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        size, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = Linear(size, inner, size**-0.5)
        self.up_proj = Linear(size, inner, size**-0.5)
        self.down_proj = Linear(inner, size, inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    """One block: each half is normed before and after, and then added to the stream."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()

        def norm(init: float) -> RMSNorm:
            return RMSNorm(shape.hidden_size, shape.norm_eps, init)

        # Branches start small beside a stream of size 1, so that 16 layer passes train from the first step.
        branch = 1 / math.sqrt(2 * shape.layers)
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = norm(1.0)
        self.input_layernorm_2 = norm(branch)
        self.post_attention_layernorm = norm(1.0)
        self.post_attention_layernorm_2 = norm(branch)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, last: KeysValues | None, stopped: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        branch, keys_values = self.self_attn(self.input_layernorm(x), cos, sin, last, stopped)
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


class Ouro(nn.Module):
    """Ouro with fp32 weights; activations run in `dtype`."""

    def __init__(self, shape: OuroShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.model = _Backbone(shape)
        self.lm_head = Linear(shape.hidden_size, shape.vocab_size, shape.hidden_size**-0.5)

    def forward(self, tokens: Tensor, loops: int | None = None, exits: Exits | None = None) -> Trace:
        """Run `loops` loops over tokens [B, S]; `exits` names the tokens whose keys stay those of an earlier loop."""
        cos, sin = rotary_angles(tokens.shape[1], self.shape.head_dim, self.shape.rope_theta, tokens.device)
        cos, sin = cos.to(self.dtype), sin.to(self.dtype)
        x = self.model.embed_tokens(tokens).to(self.dtype)
        last: list[KeysValues | None] = [None] * self.shape.layers
        stopped: Tensor | None = None
        hidden: list[Tensor] = []
        gates: list[Tensor] = []
        for _ in range(loops or self.shape.loops):
            for i, layer in enumerate(self.model.layers):
                x, last[i] = layer(x, cos, sin, last[i] if exits else None, stopped)
            x = self.model.norm(x)
            hidden.append(x)
            gates.append(self.gate(x))
            if exits:
                stopped = exits(len(hidden), torch.stack(gates))
        return Trace(torch.stack(hidden), torch.stack(gates))

    def logits(self, hidden: Tensor) -> Tensor:
        """Token logits [..., V] of normed hidden states [..., H]."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def gate(self, hidden: Tensor) -> Tensor:
        """Exit gate logits [...] of normed hidden states [..., H], in fp32."""
        logits: Tensor = self.model.early_exit_gate(hidden.float()).squeeze(-1)
        return logits


def compile_layers() -> None:
    """Compile the layer, the one piece that runs layers x loops times a step."""
    torch._dynamo.config.recompile_limit = 64
    Layer.forward = torch.compile(Layer.forward, dynamic=False)  # type: ignore[method-assign]


def exit_probabilities(gate: Tensor) -> Tensor:
    """Probability of stopping after each loop [loops, ...]; the last loop takes all that is left."""
    hazard = torch.sigmoid(gate[:-1])
    survival = torch.cumprod(1 - hazard, dim=0)
    before = torch.cat((torch.ones_like(survival[:1]), survival))
    return before * torch.cat((hazard, torch.ones_like(hazard[:1])))


def ouro_config(shape: OuroShape, threshold: float) -> dict[str, object]:
    """The complete config.json."""
    return {
        "architectures": ["OuroForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "early_exit_threshold": threshold,
        "eos_token_id": 2,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": shape.max_positions,
        "max_window_layers": shape.layers,
        "model_type": "ouro",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads,
        "pad_token_id": 0,
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
