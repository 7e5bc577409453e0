"""What a checkpoint's JSON files say, as one typed value per family. No torch here.

Nothing is guessed: a missing key is an error, because the defaults of the published config classes describe another
shape, and so is a key or a value that the engine does not honour.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlt.errors import ModelError
from rlt.models.directory import CONFIG_FILE, read_json

GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"

#: Added tokens that end a turn or a text whatever the configs say: shipped configs name only one of them.
END_TOKENS = ("<|im_end|>", "<|endoftext|>")

_DTYPES = ("bfloat16", "float32", "float16")
_NOT_YET = ("huginn_raven", "nanbeige")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a looped model and the defaults that its files give."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    loops: int
    rope_theta: float
    norm_eps: float
    max_positions: int
    exit_threshold: float
    #: ids that end a text, without repeats: generation_config.json's (else config.json's), then the tokenizer's
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    #: dtype on disk as config.json names it
    dtype: str
    #: sampling defaults of generation_config.json
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def read_spec(directory: Path) -> ModelSpec:
    """Read and check config.json, generation_config.json and the added tokens of tokenizer.json in `directory`.

    The last two may be absent. Raises `ModelError` with one line per problem, each naming the file and the key.
    """
    keys = _Keys(directory / CONFIG_FILE)
    family = keys.take("model_type")
    if family in _NOT_YET:
        raise ModelError(
            f"{keys.path}: model_type {_json(family)} is not supported yet; supported: {', '.join(FAMILIES)}"
        )
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(f"{keys.path}: model_type {_json(family)} is not supported; supported: {', '.join(FAMILIES)}")
    spec = FAMILIES[family](keys)
    problems = keys.finish()
    if (directory / GENERATION_FILE).is_file():
        generation = _Keys(directory / GENERATION_FILE)
        spec = _with_generation(spec, generation)
        problems += generation.finish()
    if problems:
        raise ModelError("\n".join(problems))
    ends = (*spec.eos_token_ids, *_tokenizer_ends(directory, spec.vocab_size))
    return replace(spec, eos_token_ids=tuple(dict.fromkeys(ends)))


class _Keys:
    """Takes the keys of a JSON file one by one and collects what is wrong; what is left at the end is unknown.

    After a problem the methods return a value of the right type, so that the rest of the file is checked too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = read_json(path)
        self._known: set[str] = set()
        self._problems: list[str] = []

    def problem(self, text: str) -> None:
        self._problems.append(f"{self.path}: {text}")

    def take(self, key: str) -> Any:
        """The value of a key, or None."""
        self._known.add(key)
        return self._data.get(key)

    def integer(self, key: str, low: int, default: int | None = None) -> int:
        """An integer of at least `low`; a null or absent key is an error unless there is a `default`."""
        value = self.take(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value >= low:
            return value
        self._wrong(key, value, f"an integer of at least {low}")
        return low

    def number(
        self, key: str, low: float, high: float = math.inf, default: float | None = None, above: bool = False
    ) -> float:
        """A finite number from `low` (excluded if `above`) to `high`."""
        value = self.take(key)
        if value is None and default is not None:
            return default
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if good and (low < value if above else low <= value) and value <= high:
            return float(value)
        end = "" if high == math.inf else f" and at most {high:g}"
        self._wrong(key, value, f"a number {'above' if above else 'of at least'} {low:g}{end}")
        return 1.0

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.take(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
            return tuple(ids)
        self._wrong(key, value, f"null or ids below vocab_size ({vocab_size})")
        return ()

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """An id or nothing."""
        ids = self.token_ids(key, vocab_size)
        if len(ids) > 1:
            self._wrong(key, list(ids), "one id or null")
        return ids[0] if ids else None

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of some words."""
        value = self.take(key)
        if value in choices:
            return str(value)
        self._wrong(key, value, f"one of {', '.join(choices)}")
        return choices[0]

    def only(self, key: str, *accepted: Any) -> None:
        """A key that may be absent or null, and otherwise must say what the engine does anyway."""
        value = self.take(key)
        if value is not None and not any(
            value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted
        ):
            self.problem(
                f"{key} {_json(value)} is not supported; must be {' or '.join(map(_json, accepted)) or 'null'}"
            )

    def harmless(self, *names: str) -> None:
        """Keys whose value changes nothing here."""
        self._known.update(names)

    def finish(self) -> list[str]:
        """All problems, with a line for every key that nobody took."""
        for key in self._data:
            if key not in self._known:
                close = difflib.get_close_matches(key, self._known, n=1, cutoff=0.6)
                hint = f"; did you mean {close[0]}?" if close else ""
                self.problem(f"unknown key {key}{hint}")
        return self._problems

    def _wrong(self, key: str, value: Any, wanted: str) -> None:
        if key in self._data:
            self.problem(f"{key} must be {wanted}, got {_json(value)}")
        else:
            self.problem(f"{key} is missing; it must be {wanted}")


def _ouro(keys: _Keys) -> ModelSpec:
    vocab_size = keys.integer("vocab_size", 2)
    layers = keys.integer("num_hidden_layers", 1)
    heads = keys.integer("num_attention_heads", 1)
    kv_heads = keys.integer("num_key_value_heads", 1)
    head_dim = keys.integer("head_dim", 2)
    if heads % kv_heads:
        keys.problem(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    if head_dim % 2:
        keys.problem(f"head_dim ({head_dim}) must be even: the rotary embedding turns its halves against each other")
    keys.only("hidden_act", "silu")
    keys.only("tie_word_embeddings", False)
    keys.only("attention_bias", False)
    keys.only("attention_dropout", 0.0)
    keys.only("early_exit_step")
    keys.only("use_sliding_window", False)
    keys.only("sliding_window")
    keys.only("layer_types", ["full_attention"] * layers)
    keys.harmless(
        "architectures", "transformers_version", "auto_map", "_name_or_path", "initializer_range", "use_cache"
    )
    # chunk_size is read by no public code; max_window_layers means nothing without a sliding window.
    keys.harmless("chunk_size", "max_window_layers")
    return ModelSpec(
        family="ouro",
        vocab_size=vocab_size,
        hidden_size=keys.integer("hidden_size", 1),
        intermediate_size=keys.integer("intermediate_size", 1),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        loops=keys.integer("total_ut_steps", 1),
        rope_theta=_rope_theta(keys),
        norm_eps=keys.number("rms_norm_eps", 0, above=True),
        max_positions=keys.integer("max_position_embeddings", 2),
        exit_threshold=keys.number("early_exit_threshold", 0),
        eos_token_ids=keys.token_ids("eos_token_id", vocab_size),
        bos_token_id=keys.token_id("bos_token_id", vocab_size),
        pad_token_id=keys.token_id("pad_token_id", vocab_size),
        dtype=_dtype(keys),
    )


FAMILIES: dict[str, Callable[[_Keys], ModelSpec]] = {"ouro": _ouro}


def _rope_theta(keys: _Keys) -> float:
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
        keys.problem(f'rope_parameters {_json(nested)} is not supported; must be rope_theta and rope_type "default"')
        return 1.0
    theta = nested.get("rope_theta")
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not (math.isfinite(theta) and theta > 0):
        keys.problem(f"rope_parameters.rope_theta must be a number above 0, got {_json(theta)}")
        return 1.0
    if flat is not None and flat != theta:
        keys.problem(f"rope_theta {_json(flat)} and rope_parameters.rope_theta {_json(theta)} differ")
    return float(theta)


def _dtype(keys: _Keys) -> str:
    """`torch_dtype`, or `dtype` as newer files call it."""
    new = keys.take("dtype")
    old = keys.take("torch_dtype")
    if new is not None and old is not None and new != old:
        keys.problem(f"dtype {_json(new)} and torch_dtype {_json(old)} differ")
    return keys.choice("dtype" if new is not None else "torch_dtype", _DTYPES)


def _with_generation(spec: ModelSpec, keys: _Keys) -> ModelSpec:
    """`spec` with the sampling defaults and the end ids of generation_config.json."""
    keys.only("do_sample", True, False)
    temperature = keys.number("temperature", 0, default=1.0)
    keys.only("repetition_penalty", 1.0)
    keys.only("num_beams", 1)
    # Lengths are up to the request; the other ids are config.json's.
    keys.harmless("max_length", "max_new_tokens", "bos_token_id", "pad_token_id", "use_cache")
    keys.harmless("transformers_version", "_from_model_config")
    return replace(
        spec,
        eos_token_ids=keys.token_ids("eos_token_id", spec.vocab_size) or spec.eos_token_ids,
        # An explicit "do_sample": false asks for greedy decoding; an absent one is no statement.
        temperature=0.0 if keys.take("do_sample") is False else temperature,
        top_p=keys.number("top_p", 0, 1, default=1.0, above=True),
        top_k=keys.integer("top_k", 0, default=0),
        min_p=keys.number("min_p", 0, 1, default=0.0),
    )


def _json(value: Any) -> str:
    """A value as the file spells it."""
    return json.dumps(value, ensure_ascii=False)


def _tokenizer_ends(directory: Path, vocab_size: int) -> list[int]:
    """Ids of `END_TOKENS` among the added tokens of tokenizer.json."""
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        return []
    added = read_json(path).get("added_tokens") or []
    try:
        ids = {token["content"]: int(token["id"]) for token in added}
    except (TypeError, KeyError, ValueError) as error:
        raise ModelError(f"{path}: added_tokens must be a list of objects with content and id") from error
    return [ids[name] for name in END_TOKENS if 0 <= ids.get(name, -1) < vocab_size]
