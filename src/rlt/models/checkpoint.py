"""What a checkpoint's JSON files say, as one `ModelSpec`. No torch here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rlt.errors import ModelError
from rlt.models.directory import CONFIG_FILE, read_json
from rlt.models.families import FAMILIES
from rlt.models.keys import Keys, spelled
from rlt.models.spec import ModelSpec
from rlt_protocols.params import MAX_REPETITION_PENALTY

GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"

#: Added tokens that end a turn or a text whatever the configs say: shipped configs name only one of them.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|end_turn|>", "<|end_text|>")


def read_spec(directory: Path) -> ModelSpec:
    """Read and check config.json, generation_config.json and the tokens of tokenizer.json in `directory`.

    The last two may be absent. Raises `ModelError` with one line per problem, each naming the file and the key.
    """
    keys = Keys(directory / CONFIG_FILE)
    model_type, families = keys.take("model_type"), {family.model_type: family for family in FAMILIES.values()}
    if not isinstance(model_type, str) or model_type not in families:
        raise ModelError(
            f"{keys.path}: model_type {spelled(model_type)} is not supported; supported: {', '.join(families)}"
        )
    spec = families[model_type].read(keys)
    problems = keys.finish()
    if (directory / GENERATION_FILE).is_file():
        generation = Keys(directory / GENERATION_FILE)
        spec = _with_generation(spec, generation)
        problems += generation.finish()
    if problems:
        raise ModelError("\n".join(problems))
    return _with_tokenizer(spec, directory / TOKENIZER_FILE)


def _with_generation(spec: ModelSpec, keys: Keys) -> ModelSpec:
    """`spec` with the sampling defaults and the end ids of generation_config.json."""
    keys.only("do_sample", True, False)
    temperature = keys.number("temperature", 0, default=1.0)
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
        repetition_penalty=keys.number("repetition_penalty", 0, MAX_REPETITION_PENALTY, above=True, default=1.0),
    )


class _Tokens(NamedTuple):
    """The ids of a tokenizer.json."""

    added: dict[str, int]
    #: one more than the largest id
    end: int


def _with_tokenizer(spec: ModelSpec, path: Path) -> ModelSpec:
    """`spec` with the end tokens that tokenizer.json adds, and the end of the ids that it knows."""
    tokens = _read_tokens(path) if path.is_file() else _Tokens({}, 0)
    ends = [tokens.added[name] for name in END_TOKENS if 0 <= tokens.added.get(name, -1) < spec.vocab_size]
    return replace(
        spec,
        eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *ends))),
        known_tokens=min(tokens.end, spec.vocab_size) or spec.vocab_size,
    )


def _read_tokens(path: Path) -> _Tokens:
    data = read_json(path)
    try:
        added = {token["content"]: int(token["id"]) for token in data.get("added_tokens") or []}
    except (TypeError, KeyError, ValueError) as error:
        raise ModelError(f"{path}: added_tokens must be a list of objects with content and id") from error
    model = data.get("model")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        # Unigram models list their pieces; the place is the id.
        end = len(vocabulary)
    elif isinstance(vocabulary, dict) and all(type(token_id) is int for token_id in vocabulary.values()):
        end = max(vocabulary.values(), default=-1) + 1
    else:
        # The tokenizer library says what is wrong with it when it reads the file.
        return _Tokens(added, 0)
    return _Tokens(added, max([end, *(token_id + 1 for token_id in added.values())]))
