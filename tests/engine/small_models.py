"""Checkpoints so small that a whole request takes milliseconds, with random weights that make tests sharp.

Sharp: the best logit leads by a lot, attention picks few tokens, so that one wrong key or value changes the text, and
the gate's logits, or what a loop still changes, are spread, so that tokens leave after every possible loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN = 32
HEADS = 2
HEAD_DIM = 16
INNER = 48
VOCAB = 64
POSITIONS = 128
#: a token that random text meets now and then, so that some requests end by themselves
END_ID = 7


class Shape(NamedTuple):
    loops: int
    layers: int
    kv_heads: int = HEADS
    seed: int = 0
    family: str = "ouro"
    prelude: int = 0
    coda: int = 0

    @property
    def lists(self) -> int:
        """Page lists of a request whose planes are all in use."""
        return self.loops + -(-(self.prelude + self.coda) // self.layers)


OURO = (Shape(loops=4, layers=1), Shape(loops=3, layers=2, kv_heads=1), Shape(loops=2, layers=1))
#: one outer list without a gap, as in Huginn-0125; and two, of which one is half empty
HUGINN = (
    Shape(loops=4, layers=2, family="huginn", prelude=1, coda=1),
    Shape(loops=3, layers=2, family="huginn", prelude=1, coda=2),
)
NANBEIGE = (Shape(loops=2, layers=1, kv_heads=1, family="nanbeige"),)


def write_model(directory: Path, shape: Shape) -> Path:
    """Write config.json and model.safetensors in the public layout and return `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    config, weights = (_huginn_config, _huginn_weights) if shape.family == "huginn" else (_config, _weights)
    (directory / "config.json").write_text(json.dumps(config(shape), indent=1))
    save_file(weights(shape), directory / "model.safetensors")
    return directory


def _config(shape: Shape) -> dict[str, Any]:
    own = {
        "ouro": {"total_ut_steps": shape.loops, "early_exit_threshold": 1.0},
        "nanbeige": {"num_loops": shape.loops},
    }
    return own[shape.family] | {
        "model_type": shape.family,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": END_ID,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def _huginn_config(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "huginn_raven",
        "vocab_size": VOCAB,
        "n_embd": HIDDEN,
        "n_heads": HEADS,
        "intermediate_size": INNER,
        "n_layers_in_prelude": shape.prelude,
        "n_layers_in_recurrent_block": shape.layers,
        "n_layers_in_coda": shape.coda,
        "mean_recurrence": shape.loops,
        "block_size": POSITIONS,
        "rope_base": 10000.0,
        "norm_eps": 1e-6,
        "architecture_class_name": "RecurrentGPT",
        "block_class_name": "SandwichBlock",
        "mlp_class_name": "GatedMLP",
        "nonlin_name": "SiLU",
        "norm_class_name": "RMSNorm_llama",
        "injection_type": "linear",
        "state_init": "like-init",
        "qk_bias": True,
        "tie_embeddings": True,
        "eos_token_id": END_ID,
        "torch_dtype": "float32",
    }


def _normals(shape: Shape) -> Callable[..., Tensor]:
    """Draws of a standard deviation `std`, the same for the same shape."""
    generator = torch.Generator().manual_seed(
        1000 * shape.loops + 100 * shape.layers + 10 * shape.kv_heads + shape.seed
    )
    return lambda *size, std: torch.randn(*size, generator=generator) * std


def _huginn_weights(shape: Shape) -> dict[str, Tensor]:
    normal, unit = _normals(shape), HIDDEN**-0.5
    embedding = normal(VOCAB, HIDDEN, std=2.5 * unit)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
    angles = torch.arange(POSITIONS, dtype=torch.float32)[:, None] * frequencies
    tensors = {
        "transformer.wte.weight": embedding,
        "lm_head.weight": embedding.clone(),
        "transformer.ln_f.weight": 2.5 * (1 + normal(HIDDEN, std=0.1)),
        # The state counts enough that loops still change something, and little enough that they come to rest.
        "transformer.adapter.weight": torch.cat([normal(HIDDEN, HIDDEN, std=std * unit) for std in (0.5, 1.2)], 1),
        "freqs_cis": torch.stack([angles.cos(), angles.sin()], -1)[None, :, None],
    }
    stages = {"prelude": shape.prelude, "core_block": shape.layers, "coda": shape.coda}
    for layer in (f"{stage}.{index}" for stage, count in stages.items() for index in range(count)):
        qkv = torch.cat([normal(HIDDEN, HIDDEN, std=std * unit) for std in (1.2, 1.2, 1.0)])
        tensors |= {
            f"transformer.{layer}.attn.Wqkv.weight": qkv,
            f"transformer.{layer}.attn.qk_bias": normal(2, 1, HEADS, HEAD_DIM, std=0.3),
            # A branch twice as large as the stream that it is added to: attention decides more than the token. Sharper
            # attention, or a wider way from state to state, would make loops chaotic: rounding would decide.
            f"transformer.{layer}.attn.proj.weight": normal(HIDDEN, HIDDEN, std=2.0 * unit),
            f"transformer.{layer}.mlp.fc.weight": normal(2 * INNER, HIDDEN, std=unit),
            f"transformer.{layer}.mlp.proj.weight": normal(HIDDEN, INNER, std=INNER**-0.5),
        }
        for number in range(1, 5):
            tensors[f"transformer.{layer}.norm_{number}.weight"] = 1 + normal(HIDDEN, std=0.1)
    return tensors


def _weights(shape: Shape) -> dict[str, Tensor]:
    normal = _normals(shape)

    def near_one() -> Tensor:
        return 1 + normal(HIDDEN, std=0.1)

    # A row of a matrix with this spread turns rows of unit size into numbers of unit size.
    unit, inner_unit = HIDDEN**-0.5, INNER**-0.5
    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN, std=1.0),
        "model.norm.weight": near_one(),
        "lm_head.weight": normal(VOCAB, HIDDEN, std=6.0 * unit),
    }
    queries, keys = HEADS * HEAD_DIM, shape.kv_heads * HEAD_DIM
    for layer in range(shape.layers):
        matrices = {
            "self_attn.q_proj": normal(queries, HIDDEN, std=1.5 * unit),
            "self_attn.k_proj": normal(keys, HIDDEN, std=1.5 * unit),
            "self_attn.v_proj": normal(keys, HIDDEN, std=unit),
            "self_attn.o_proj": normal(HIDDEN, queries, std=unit),
            "mlp.gate_proj": normal(INNER, HIDDEN, std=unit),
            "mlp.up_proj": normal(INNER, HIDDEN, std=unit),
            "mlp.down_proj": normal(HIDDEN, INNER, std=inner_unit),
            "input_layernorm": near_one(),
            "input_layernorm_2": near_one(),
            "post_attention_layernorm": near_one(),
            "post_attention_layernorm_2": near_one(),
        }
        if shape.family == "nanbeige":
            matrices = {name: matrix for name, matrix in matrices.items() if not name.endswith("norm_2")}
        tensors |= {f"model.layers.{layer}.{name}.weight": matrix for name, matrix in matrices.items()}
    if shape.family == "ouro":
        tensors["model.early_exit_gate.weight"] = normal(1, HIDDEN, std=2.0 * unit)
        tensors["model.early_exit_gate.bias"] = torch.tensor([-0.7])
    return tensors
