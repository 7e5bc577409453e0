"""The families that are served: how each spells its shape in config.json, and what it allows. No torch here.

A missing key is an error, because the defaults of the published config classes describe other shapes, and so is a key
or a value that the engine does not honour.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rlt.models.keys import Keys, spelled
from rlt.models.spec import ModelSpec

_DTYPES = ("bfloat16", "float32", "float16")

#: Switches of Nanbeige's published code that the 4.2 checkpoints leave off: other loops, other attention, other
#: residual streams, embeddings of n-grams. Each would be another computation.
_NANBEIGE_SWITCHES = (
    "attention_bias",
    "mlp_bias",
    "qk_layernorm",
    "loop_share_kv",
    "enable_double_loop_split",
    "loop_middle_layers",
    "enable_depth_attention",
    "enable_hyper_connection",
    "enable_mhc",
    "enable_h_res_identity",
    "mhc_diff_for_loop",
    "mhc_identity_nohresparam",
    "emb_neighbor_num",
    "emb_split_num",
    "insert_ngram_layer_idx",
    "ngram_insert_all_layers",
    "ngram_vocab_size_ratio",
    "ngram_embedding_hidden_size",
)


@dataclass(frozen=True, slots=True)
class Family:
    """What holds for every checkpoint of a family."""

    #: its name for people
    title: str
    read: Callable[[Keys], ModelSpec]
    #: why every token runs all loops, each with keys and values of its own; None: tokens may leave early
    full_depth: str | None = None


def _read_ouro(keys: Keys) -> ModelSpec:
    layers = keys.integer("num_hidden_layers", 1)
    keys.only("attention_bias", False)
    keys.only("early_exit_step")
    keys.only("use_sliding_window", False)
    # chunk_size is read by no public code; max_window_layers means nothing without a sliding window.
    keys.harmless("chunk_size", "max_window_layers")
    return _read_stack(
        keys,
        family="ouro",
        layers=layers,
        loops=keys.integer("total_ut_steps", 1),
        exit_threshold=keys.number("early_exit_threshold", 0),
    )


def _read_nanbeige(keys: Keys) -> ModelSpec:
    layers = keys.integer("num_hidden_layers", 1)
    head_dim, channels = keys.take("head_dim"), keys.take("kv_channels")
    if channels is not None and channels != head_dim:
        keys.problem(f"kv_channels {spelled(channels)} and head_dim {spelled(head_dim)} differ")
    # The published code runs one loop more than this list has entries, whatever num_loops says.
    keys.only("loop_loss_weights", [])
    keys.only("skip_loop_final_norm", False)
    keys.only("pretraining_tp", 1)
    keys.off(*_NANBEIGE_SWITCHES)
    return _read_stack(
        keys,
        family="nanbeige",
        layers=layers,
        loops=keys.integer("num_loops", 1),
        # No gate: nothing ever leaves early.
        exit_threshold=1.0,
    )


FAMILIES = {
    "ouro": Family("Ouro", _read_ouro),
    "nanbeige": Family(
        "Nanbeige4.2",
        _read_nanbeige,
        full_depth="its weights are right only after all loops, each with keys and values of its own, and there is no "
        "exit gate",
    ),
}


def _read_stack(keys: Keys, *, family: str, layers: int, loops: int, exit_threshold: float) -> ModelSpec:
    """What the families that loop one whole stack of Llama-like layers spell alike."""
    vocab_size = keys.integer("vocab_size", 2)
    heads = keys.integer("num_attention_heads", 1)
    kv_heads = keys.integer("num_key_value_heads", 1)
    head_dim = keys.integer("head_dim", 2)
    if heads % kv_heads:
        keys.problem(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    if head_dim % 2:
        keys.problem(f"head_dim ({head_dim}) must be even: the rotary embedding turns its halves against each other")
    keys.only("hidden_act", "silu")
    keys.only("tie_word_embeddings", False)
    keys.only("attention_dropout", 0.0)
    keys.only("sliding_window")
    keys.only("layer_types", ["full_attention"] * layers)
    keys.harmless(
        "architectures", "transformers_version", "auto_map", "_name_or_path", "initializer_range", "use_cache"
    )
    return ModelSpec(
        family=family,
        vocab_size=vocab_size,
        hidden_size=keys.integer("hidden_size", 1),
        intermediate_size=keys.integer("intermediate_size", 1),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        loops=loops,
        rope_theta=_rope_theta(keys),
        norm_eps=keys.number("rms_norm_eps", 0, above=True),
        max_positions=keys.integer("max_position_embeddings", 2),
        exit_threshold=exit_threshold,
        eos_token_ids=keys.token_ids("eos_token_id", vocab_size),
        bos_token_id=keys.token_id("bos_token_id", vocab_size),
        pad_token_id=keys.token_id("pad_token_id", vocab_size),
        dtype=_dtype(keys),
        known_tokens=vocab_size,
    )


def _rope_theta(keys: Keys) -> float:
    """The base of the plain rotary embedding, from `rope_theta` or from newer files' `rope_parameters`."""
    keys.only("rope_scaling", {"rope_type": "default"}, {"type": "default"})
    nested, flat = keys.take("rope_parameters"), keys.take("rope_theta")
    if nested is None:
        return keys.number("rope_theta", 0, above=True)
    if (
        not isinstance(nested, dict)
        or nested.get("rope_type", "default") != "default"
        or nested.keys() - {"rope_theta", "rope_type"}
    ):
        keys.problem(f'rope_parameters {spelled(nested)} is not supported; must be rope_theta and rope_type "default"')
        return 1.0
    theta = nested.get("rope_theta")
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not (math.isfinite(theta) and theta > 0):
        keys.problem(f"rope_parameters.rope_theta must be a number above 0, got {spelled(theta)}")
        return 1.0
    if flat is not None and flat != theta:
        keys.problem(f"rope_theta {spelled(flat)} and rope_parameters.rope_theta {spelled(theta)} differ")
    return float(theta)


def _dtype(keys: Keys) -> str:
    """`torch_dtype`, or `dtype` as newer files call it."""
    new = keys.take("dtype")
    old = keys.take("torch_dtype")
    if new is not None and old is not None and new != old:
        keys.problem(f"dtype {spelled(new)} and torch_dtype {spelled(old)} differ")
    return keys.choice("dtype" if new is not None else "torch_dtype", _DTYPES)
