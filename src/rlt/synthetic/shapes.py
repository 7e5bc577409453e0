"""The published shapes as their files spell them, and a small one per family for tests. No torch here.

Sources are listed in `docs/models/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlt.errors import ConfigError

TEST_SHAPE = "test"

#: What `early_exit_threshold` is when exits are asked for; the published value, 1, switches them off.
EXIT_THRESHOLD = 0.5

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_HUGINN_CHAT = (
    "{{ '<|begin_text|>' }}{% for message in messages %}{{ '<|begin_header|>' + ('Huginn' if message['role'] == "
    "'assistant' else message['role']) + '<|end_header|>\\n\\n' + message['content'] | trim + '<|end_turn|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|begin_header|>Huginn<|end_header|>\\n\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A family's token ids: the rows of its vocabulary, those that are tokens, and the special ones."""

    rows: int
    #: ids from here on are rows that no token has
    known: int
    special: Mapping[str, int]
    bos: str
    eos: str
    pad: str
    template: str


@dataclass(frozen=True, slots=True)
class Shape:
    """A checkpoint to be made: its JSON files' contents and the dtype of its weights on disk."""

    family: str
    name: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokens: Tokens
    dtype: str
    loops: int

    @property
    def shallow(self) -> int:
        """The depth whose best token is compared with full depth's: a quarter of the loops, at least one."""
        return max(1, self.loops // 4)


def _stack(family: str, tokens: Tokens, heads: tuple[int, int, int], **keys: Any) -> dict[str, Any]:
    """What Ouro's and Nanbeige's config.json have in common; `heads` are query heads, kv heads, and their size."""
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": tokens.rows,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": tokens.special[tokens.bos],
        "eos_token_id": tokens.special[tokens.eos],
        "pad_token_id": tokens.special[tokens.pad],
        **keys,
    }


def _ouro(name: str, hidden: int, inner: int, layers: int, heads: int, size: int, rows: int, positions: int) -> Shape:
    special = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    tokens = Tokens(rows, rows, special, "<|im_start|>", "<|im_end|>", "<|endoftext|>", _CHATML)
    config = _stack(
        "ouro",
        tokens,
        (heads, heads, size),
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        max_position_embeddings=positions,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        total_ut_steps=4,
        early_exit_threshold=1.0,
        use_sliding_window=False,
        sliding_window=None,
    )
    generation = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}
    return Shape("ouro", name, config, generation, tokens, "bfloat16", 4)


def _nanbeige(
    name: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int, int],
    rows: int,
    positions: int,
    theta: float,
) -> Shape:
    # After the pieces: the special tokens, then rows that only fill the vocabulary up.
    first = rows - 44
    names = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
    special = {"<unk>": 0} | {token: first + index for index, token in enumerate(names)}
    tokens = Tokens(rows, first + len(names), special, "<|im_start|>", "<|im_end|>", "<unk>", _CHATML)
    config = _stack(
        "nanbeige",
        tokens,
        heads,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        max_position_embeddings=positions,
        rope_theta=theta,
        rms_norm_eps=1e-5,
        num_loops=2,
        loop_loss_weights=[],
        skip_loop_final_norm=False,
        kv_channels=heads[2],
        attention_bias=False,
    )
    generation = {
        "bos_token_id": first,
        "eos_token_id": first + 1,
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
    }
    return Shape("nanbeige", name, config, generation, tokens, "bfloat16", 2)


def _huginn(
    name: str, hidden: int, inner: int, heads: int, layers: tuple[int, int, int], loops: int, rows: int, positions: int
) -> Shape:
    first = rows - 32
    names = ("begin_text", "end_text", "begin_header", "end_header", "end_turn", "pad")
    special = {f"<|{token}|>": first + index for index, token in enumerate(names)}
    tokens = Tokens(rows, first + len(names), special, "<|begin_text|>", "<|end_text|>", "<|pad|>", _HUGINN_CHAT)
    config = {
        "architectures": ["RavenForCausalLM"],
        "architecture_class_name": "RecurrentGPT",
        "model_type": "huginn_raven",
        "n_embd": hidden,
        "n_heads": heads,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_layers": sum(layers),
        "n_layers_in_prelude": layers[0],
        "n_layers_in_recurrent_block": layers[1],
        "n_layers_in_coda": layers[2],
        "intermediate_size": inner,
        "block_size": positions,
        "vocab_size": rows,
        "padded_vocab_size": rows,
        "tie_embeddings": True,
        "tie_word_embeddings": True,
        "bias": False,
        "qk_bias": True,
        "norm_eps": 1e-6,
        "rope_base": 50000.0,
        "mean_recurrence": loops,
        "state_init": "like-init",
        "injection_type": "linear",
        "norm_class_name": "RMSNorm_llama",
        "block_class_name": "SandwichBlock",
        "mlp_class_name": "GatedMLP",
        "nonlin_name": "SiLU",
        "test_time_noise": 0,
        "bos_token_id": first,
        "eos_token_id": first + 1,
        "pad_token_id": first + 5,
    }
    generation = {
        "bos_token_id": first,
        "eos_token_id": [first + 1, first + 4],
        "pad_token_id": first + 5,
        "do_sample": True,
        "temperature": 0.7,
    }
    return Shape("huginn", name, config, generation, tokens, "float32", loops)


#: by family and name
SHAPES = {
    (shape.family, shape.name): shape
    for shape in (
        _ouro("1.4b", 2048, 5632, 24, 16, 128, 49152, 65536),
        _ouro("2.6b", 2048, 5632, 48, 16, 128, 49152, 65536),
        _ouro(TEST_SHAPE, 128, 256, 2, 4, 32, 512, 512),
        _nanbeige("3b", 3072, 10752, 22, (48, 8, 128), 166144, 262144, 7e7),
        _nanbeige("3b-base", 3072, 10752, 22, (48, 8, 128), 166144, 131072, 1e7),
        _nanbeige(TEST_SHAPE, 128, 256, 2, (4, 2, 32), 512, 512, 1e4),
        _huginn("0125", 5280, 17920, 55, (2, 4, 2), 32, 65536, 4096),
        _huginn(TEST_SHAPE, 256, 384, 4, (1, 2, 1), 8, 512, 512),
    )
}


def find_shape(family: str, name: str) -> Shape:
    """The shape of that family and name. Raises `ConfigError` that lists the choices."""
    families = list(dict.fromkeys(known for known, _ in SHAPES))
    if family not in families:
        raise ConfigError([f"--family: {family!r} is not one of {', '.join(families)}"])
    if (family, name) not in SHAPES:
        names = ", ".join(shape for known, shape in SHAPES if known == family)
        raise ConfigError([f"--shape: {name!r} is not a shape of {family}; there are {names}"])
    return SHAPES[family, name]
