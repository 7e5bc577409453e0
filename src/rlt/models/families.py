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

#: The classes of Huginn's published code that the checkpoint is made of.
_HUGINN_CLASSES = {
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "norm_class_name": "RMSNorm_llama",
    "injection_type": "linear",
    "state_init": "like-init",
}


@dataclass(frozen=True, slots=True)
class Family:
    """What holds for every checkpoint of a family."""

    #: its name for people, and in config.json
    title: str
    model_type: str
    read: Callable[[Keys], ModelSpec]
    #: the exit rule when the configuration names none; a rule that needs a trained gate says that there is one
    rule: str = "full_depth"
    #: tokens start from a state beside their embedding
    start_states: bool = False
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


def _read_huginn(keys: Keys) -> ModelSpec:
    # Keys that published files may leave out have the published class's defaults.
    vocab_size, hidden = keys.integer("vocab_size", 2), keys.integer("n_embd", 2)
    heads = keys.integer("n_heads", 1, default=keys.integer("num_attention_heads", 1, default=55))
    prelude, core, coda = (keys.integer(f"n_layers_in_{stage}", 1) for stage in ("prelude", "recurrent_block", "coda"))
    if hidden % heads or hidden // heads % 2:
        keys.problem(f"n_embd ({hidden}) must be n_heads ({heads}) times an even number, since RoPE turns pairs")
    keys.only("num_attention_heads", heads)
    keys.only("num_key_value_heads", heads)
    keys.only("head_dim", hidden // heads)
    keys.only("padded_vocab_size", vocab_size)
    keys.only("n_layers", prelude + core + coda)
    _check_huginn_variant(keys, hidden)
    return ModelSpec(
        family="huginn",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size", 1),
        layers=core,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        loops=keys.integer("mean_recurrence", 1),
        rope_theta=keys.number("rope_base", 0, default=50_000.0, above=True),
        norm_eps=keys.number("norm_eps", 0, above=True),
        max_positions=keys.integer("block_size", 2),
        exit_threshold=1.0,
        eos_token_ids=keys.token_ids("eos_token_id", vocab_size),
        bos_token_id=keys.token_id("bos_token_id", vocab_size),
        pad_token_id=keys.token_id("pad_token_id", vocab_size),
        dtype=_dtype(keys),
        known_tokens=vocab_size,
        prelude_layers=prelude,
        coda_layers=coda,
    )


def _check_huginn_variant(keys: Keys, hidden: int) -> None:
    """Keys that choose another computation, which must name the one that is served, and those that choose nothing."""
    for name, value in _HUGINN_CLASSES.items():
        keys.choice(name, (value,))
    for name in ("qk_bias", "tie_embeddings"):
        if keys.take(name) is not True:
            keys.problem(f"{name} must be true")
    keys.only("tie_word_embeddings", True)
    keys.only("bias", False)
    keys.only("test_time_noise", 0, 0.0)
    values, wanted = keys.take("init_values") or {}, math.sqrt(hidden)
    scale = values.get("embed_scale", wanted) if isinstance(values, dict) else None
    if not isinstance(scale, int | float) or not math.isclose(scale, wanted, rel_tol=1e-6):
        keys.problem(f"init_values.embed_scale must be the square root of n_embd, {wanted:.6f}")
    # How the published weights were initialised and trained, and files' own bookkeeping.
    keys.harmless("init_strategy", "init_orthogonal", "padding_multiple", "test_time_noise_type")
    keys.harmless("activation_checkpoint_impl", "effective_expected_depth", "mean_backprop_depth", "sampling_scheme")
    keys.harmless("architectures", "auto_map", "transformers_version", "_name_or_path", "use_cache", "model_type")


FAMILIES = {
    "ouro": Family("Ouro", "ouro", _read_ouro, rule="ouro"),
    "huginn": Family("Huginn", "huginn_raven", _read_huginn, start_states=True),
    "nanbeige": Family(
        "Nanbeige4.2",
        "nanbeige",
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
