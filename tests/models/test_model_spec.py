from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt.errors import ModelError
from rlt.models.checkpoint import read_spec
from rlt.models.spec import ModelSpec
from support import DATA

Edit = Callable[..., Path]
TINY = DATA / "golden" / "ouro-tiny"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint's config.json and weights, free to change."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def edit(broken: Path) -> Edit:
    """Set and drop keys of a JSON file in `broken`, made if it is not there; gives the directory back."""

    def change(file: str = "config.json", *, drop: tuple[str, ...] = (), **values: Any) -> Path:
        path = broken / file
        data = json.loads(path.read_text()) if path.exists() else {}
        data.update(values)
        for key in drop:
            del data[key]
        path.write_text(json.dumps(data))
        return broken

    return change


def lines(directory: Path) -> list[str]:
    """The lines of the error that reading `directory` raises, without the directory."""
    with pytest.raises(ModelError) as caught:
        read_spec(directory)
    return str(caught.value).replace(f"{directory}/", "").split("\n")


def test_a_published_config_is_read_whole() -> None:
    assert read_spec(TINY) == ModelSpec(
        family="ouro",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        layers=3,
        heads=4,
        kv_heads=4,
        head_dim=16,
        loops=4,
        rope_theta=1e6,
        norm_eps=1e-6,
        max_positions=512,
        exit_threshold=1.0,
        eos_token_ids=(2,),
        bos_token_id=1,
        pad_token_id=0,
        dtype="float32",
        known_tokens=256,
    )


REQUIRED = {
    "vocab_size": "an integer of at least 2",
    "hidden_size": "an integer of at least 1",
    "intermediate_size": "an integer of at least 1",
    "num_hidden_layers": "an integer of at least 1",
    "num_attention_heads": "an integer of at least 1",
    "num_key_value_heads": "an integer of at least 1",
    "head_dim": "an integer of at least 2",
    "total_ut_steps": "an integer of at least 1",
    "max_position_embeddings": "an integer of at least 2",
    "rope_theta": "a number above 0",
    "rms_norm_eps": "a number above 0",
    "early_exit_threshold": "a number of at least 0",
    "torch_dtype": "one of bfloat16, float32, float16",
}


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_never_filled_in(edit: Edit, key: str) -> None:
    assert f"config.json: {key} is missing; it must be {REQUIRED[key]}" in lines(edit(drop=(key,)))


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("hidden_act", "gelu", 'hidden_act "gelu" is not supported; must be "silu"'),
        ("tie_word_embeddings", True, "tie_word_embeddings true is not supported; must be false"),
        ("attention_bias", True, "attention_bias true is not supported; must be false"),
        ("attention_dropout", 0.1, "attention_dropout 0.1 is not supported; must be 0.0"),
        ("attention_dropout", False, "attention_dropout false is not supported; must be 0.0"),
        ("early_exit_step", 2, "early_exit_step 2 is not supported; must be null"),
        ("sliding_window", 4096, "sliding_window 4096 is not supported; must be null"),
        ("use_sliding_window", True, "use_sliding_window true is not supported; must be false"),
        (
            "layer_types",
            ["full_attention", "sliding_attention"],
            'layer_types ["full_attention", "sliding_attention"] is not supported; '
            'must be ["full_attention", "full_attention", "full_attention"]',
        ),
        (
            "rope_scaling",
            {"rope_type": "yarn", "factor": 4.0},
            'rope_scaling {"rope_type": "yarn", "factor": 4.0} is not supported; '
            'must be {"rope_type": "default"} or {"type": "default"}',
        ),
        (
            "rope_parameters",
            {"rope_theta": 1e6, "rope_type": "linear"},
            'rope_parameters {"rope_theta": 1000000.0, "rope_type": "linear"} is not supported; '
            'must be rope_theta and rope_type "default"',
        ),
        ("rope_parameters", {"rope_theta": 0}, "rope_parameters.rope_theta must be a number above 0, got 0"),
        (
            "rope_parameters",
            {"rope_theta": 5e5},
            "rope_theta 1000000.0 and rope_parameters.rope_theta 500000.0 differ",
        ),
        ("dtype", "bfloat16", 'dtype "bfloat16" and torch_dtype "float32" differ'),
        ("torch_dtype", "float8", 'torch_dtype must be one of bfloat16, float32, float16, got "float8"'),
        ("num_key_value_heads", 3, "num_attention_heads (4) must be a multiple of num_key_value_heads (3)"),
        ("head_dim", 15, "head_dim (15) must be even: the rotary embedding turns its halves against each other"),
        ("hidden_size", "64", 'hidden_size must be an integer of at least 1, got "64"'),
        ("hidden_size", True, "hidden_size must be an integer of at least 1, got true"),
        ("total_ut_steps", 0, "total_ut_steps must be an integer of at least 1, got 0"),
        ("rms_norm_eps", 0, "rms_norm_eps must be a number above 0, got 0"),
        ("early_exit_threshold", -0.5, "early_exit_threshold must be a number of at least 0, got -0.5"),
        ("early_exit_threshold", float("nan"), "early_exit_threshold must be a number of at least 0, got NaN"),
        ("eos_token_id", 256, "eos_token_id must be null or ids below vocab_size (256), got 256"),
        ("eos_token_id", "2", 'eos_token_id must be null or ids below vocab_size (256), got "2"'),
        ("bos_token_id", [1, 2], "bos_token_id must be one id or null, got [1, 2]"),
        ("num_hidden_layer", 3, "unknown key num_hidden_layer; did you mean num_hidden_layers?"),
        ("quantization_config", {}, "unknown key quantization_config"),
    ],
)
def test_a_value_that_is_not_honoured_is_refused(edit: Edit, key: str, value: Any, line: str) -> None:
    assert lines(edit(**{key: value})) == [f"config.json: {line}"]


def test_all_problems_come_at_once(edit: Edit) -> None:
    edit("generation_config.json", top_p=0, penalty=2)
    assert lines(edit(drop=("head_dim",), hidden_act="relu", loops=4)) == [
        "config.json: head_dim is missing; it must be an integer of at least 2",
        'config.json: hidden_act "relu" is not supported; must be "silu"',
        "config.json: unknown key loops",
        "generation_config.json: top_p must be a number above 0 and at most 1, got 0",
        "generation_config.json: unknown key penalty",
    ]


def test_other_families_are_refused(edit: Edit) -> None:
    supported = "supported: ouro, huginn_raven, nanbeige"
    assert lines(edit(model_type="llama")) == [f'config.json: model_type "llama" is not supported; {supported}']
    assert lines(edit(drop=("model_type",))) == [f"config.json: model_type null is not supported; {supported}"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            b"{",
            "config.json: is not valid JSON: "
            "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        (b"[]", "config.json: must hold a JSON object"),
        (b"\xff\xfe", "config.json: is not UTF-8 text"),
    ],
)
def test_a_broken_file_is_named(broken: Path, content: bytes, line: str) -> None:
    (broken / "config.json").write_bytes(content)
    assert lines(broken) == [line]


def test_a_file_that_cannot_be_read_is_named(broken: Path) -> None:
    (broken / "config.json").unlink()
    assert lines(broken) == ["config.json: cannot be read: No such file or directory"]


def test_newer_spellings_are_read(edit: Edit) -> None:
    directory = edit(
        drop=("rope_theta", "torch_dtype", "rope_scaling"),
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
        dtype="bfloat16",
    )
    spec = read_spec(directory)
    assert (spec.rope_theta, spec.dtype) == (5e5, "bfloat16")


def test_a_default_rope_scaling_is_no_scaling(edit: Edit) -> None:
    assert read_spec(edit(rope_scaling={"rope_type": "default"})).rope_theta == 1e6


def test_heads_need_not_fill_the_hidden_size(edit: Edit) -> None:
    spec = read_spec(edit(num_attention_heads=12, num_key_value_heads=2))
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.hidden_size) == (12, 2, 16, 64)


class TestGenerationConfig:
    def test_gives_the_sampling_defaults(self, edit: Edit) -> None:
        spec = read_spec(
            edit("generation_config.json", do_sample=True, temperature=0.6, top_p=0.95, top_k=20, min_p=0.05)
        )
        assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p) == (0.6, 0.95, 20, 0.05)

    def test_leaves_the_neutral_defaults_where_it_says_nothing(self, edit: Edit) -> None:
        spec = read_spec(edit("generation_config.json", transformers_version="4.54.1", top_p=None))
        assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p) == (1.0, 1.0, 0, 0.0)

    def test_no_sampling_means_greedy(self, edit: Edit) -> None:
        assert read_spec(edit("generation_config.json", do_sample=False, temperature=0.6)).temperature == 0.0

    @pytest.mark.parametrize(
        ("key", "value", "line"),
        [
            ("temperature", -1, "temperature must be a number of at least 0, got -1"),
            ("top_p", 1.5, "top_p must be a number above 0 and at most 1, got 1.5"),
            ("top_k", 2.5, "top_k must be an integer of at least 0, got 2.5"),
            ("min_p", 2, "min_p must be a number of at least 0 and at most 1, got 2"),
            ("do_sample", "yes", 'do_sample "yes" is not supported; must be true or false'),
            ("repetition_penalty", 0, "repetition_penalty must be a number above 0 and at most 1000, got 0"),
            ("num_beams", 4, "num_beams 4 is not supported; must be 1"),
            ("temprature", 0.6, "unknown key temprature; did you mean temperature?"),
        ],
    )
    def test_is_checked_too(self, edit: Edit, key: str, value: Any, line: str) -> None:
        assert lines(edit("generation_config.json", **{key: value})) == [f"generation_config.json: {line}"]


class TestEndIds:
    def test_generation_config_wins_over_config(self, edit: Edit) -> None:
        assert read_spec(edit("generation_config.json", eos_token_id=[7, 5, 7])).eos_token_ids == (7, 5)

    def test_config_is_used_where_generation_config_has_none(self, edit: Edit) -> None:
        assert read_spec(edit("generation_config.json", temperature=1.0)).eos_token_ids == (2,)

    def test_none_at_all_is_allowed(self, edit: Edit) -> None:
        assert read_spec(edit(drop=("eos_token_id", "bos_token_id", "pad_token_id"))).eos_token_ids == ()

    def test_the_tokenizer_adds_the_turn_end_that_shipped_configs_leave_out(self, edit: Edit) -> None:
        tokens = [{"id": i, "content": text} for i, text in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])]
        edit("tokenizer.json", added_tokens=tokens)
        assert read_spec(edit(eos_token_id=0)).eos_token_ids == (0, 2)

    def test_the_tokenizer_adds_nothing_outside_the_vocabulary(self, edit: Edit) -> None:
        edit("tokenizer.json", added_tokens=[{"id": 256, "content": "<|im_end|>"}])
        assert read_spec(edit()).eos_token_ids == (2,)

    @pytest.mark.parametrize("added", ["text", [1], [{"id": 3}], [{"id": "x", "content": "a"}]])
    def test_a_broken_tokenizer_file_is_named(self, edit: Edit, added: Any) -> None:
        assert lines(edit("tokenizer.json", added_tokens=added)) == [
            "tokenizer.json: added_tokens must be a list of objects with content and id"
        ]


CONFIG = json.loads((TINY / "config.json").read_text())

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    key=st.sampled_from([*REQUIRED, "rope_scaling", "rope_parameters", "layer_types", "eos_token_id", "dtype"]),
    value=json_values,
)
def test_any_value_is_read_or_refused_cleanly(tmp_path_factory: pytest.TempPathFactory, key: str, value: Any) -> None:
    directory = tmp_path_factory.mktemp("config")
    (directory / "config.json").write_text(json.dumps({**CONFIG, key: value}))
    try:
        spec = read_spec(directory)
    except ModelError:
        return
    assert spec.head_dim % 2 == 0
    assert spec.heads % spec.kv_heads == 0
