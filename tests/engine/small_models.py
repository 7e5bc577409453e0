"""Ouro checkpoints so small that a whole request takes milliseconds, with random weights that make tests sharp.

Sharp: the best logit leads by a lot, attention picks few tokens, so that one wrong key or value changes the text, and
the gate's logits are spread, so that a threshold of 0.5 lets tokens leave after every possible loop.
"""

from __future__ import annotations

import json
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


SHAPES = (Shape(loops=4, layers=1), Shape(loops=3, layers=2, kv_heads=1), Shape(loops=2, layers=1))


def write_model(directory: Path, shape: Shape) -> Path:
    """Write config.json and model.safetensors in the public layout and return `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(shape), indent=1))
    save_file(_weights(shape), directory / "model.safetensors")
    return directory


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
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
        "total_ut_steps": shape.loops,
        "early_exit_threshold": 1.0,
        "bos_token_id": 1,
        "eos_token_id": END_ID,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def _weights(shape: Shape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(
        1000 * shape.loops + 100 * shape.layers + 10 * shape.kv_heads + shape.seed
    )

    def normal(*size: int, std: float) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    def near_one() -> Tensor:
        return 1 + normal(HIDDEN, std=0.1)

    # A row of a matrix with this spread turns rows of unit size into numbers of unit size.
    unit, inner_unit = HIDDEN**-0.5, INNER**-0.5
    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN, std=1.0),
        "model.norm.weight": near_one(),
        "model.early_exit_gate.weight": normal(1, HIDDEN, std=2.0 * unit),
        "model.early_exit_gate.bias": torch.tensor([-0.7]),
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
        tensors |= {f"model.layers.{layer}.{name}.weight": matrix for name, matrix in matrices.items()}
    return tensors
