"""What is read of a Nanbeige4.2 checkpoint, what is refused, and the totals of the published shape."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlt.config import Config, load_config
from rlt.engine import Engine
from rlt.errors import ConfigError, ModelError
from rlt.exec.memory import page_bytes
from rlt.models.checkpoint import read_spec
from rlt.models.families import FAMILIES
from rlt.models.nanbeige import tensor_shapes
from rlt.models.spec import ModelSpec
from rlt_protocols.params import ParamError
from rltd.check import plan_memory
from support import DATA, resolved

TINY = DATA / "golden" / "nanbeige-tiny"
WHY = "its weights are right only after all loops, each with keys and values of its own, and there is no exit gate"

Edit = Callable[..., Path]

#: The published 3B: what its config.json says besides the tiny one's keys.
PUBLISHED = {
    "vocab_size": 166144,
    "hidden_size": 3072,
    "intermediate_size": 10752,
    "num_hidden_layers": 22,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "kv_channels": 128,
    "max_position_embeddings": 262144,
    "pretraining_tp": 1,
    "bos_token_id": 166100,
    "eos_token_id": 166101,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def edit(tmp_path: Path) -> Edit:
    """A copy of the tiny checkpoint with keys of a JSON file set and dropped."""
    shutil.copy(TINY / "model.safetensors", tmp_path)
    shutil.copy(TINY / "config.json", tmp_path)

    def change(file: str = "config.json", *, drop: tuple[str, ...] = (), **values: Any) -> Path:
        path = tmp_path / file
        data = (json.loads(path.read_text()) if path.exists() else {}) | values
        path.write_text(json.dumps({key: value for key, value in data.items() if key not in drop}))
        return tmp_path

    return change


def lines(directory: Path) -> list[str]:
    with pytest.raises(ModelError) as caught:
        read_spec(directory)
    return str(caught.value).replace(f"{directory}/", "").split("\n")


def test_a_config_is_read_whole() -> None:
    assert read_spec(TINY) == ModelSpec(
        family="nanbeige",
        vocab_size=256,
        hidden_size=48,
        intermediate_size=128,
        layers=3,
        heads=12,
        kv_heads=2,
        head_dim=16,
        loops=2,
        rope_theta=7e7,
        norm_eps=1e-5,
        max_positions=1024,
        exit_threshold=1.0,
        eos_token_ids=(253,),
        bos_token_id=252,
        pad_token_id=0,
        dtype="float32",
        known_tokens=256,
    )


def test_the_published_shape_has_the_published_totals(edit: Edit) -> None:
    spec = read_spec(edit(**PUBLISHED))
    shapes = tensor_shapes(spec)
    assert len(shapes) == 201 == 9 * 22 + 3
    assert sum(math.prod(shape) for shape in shapes.values()) == 4_169_800_704
    assert shapes["model.layers.21.self_attn.q_proj.weight"] == (6144, 3072)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (3072, 6144)
    assert spec.loops * page_bytes(spec, 1, torch.bfloat16) == 180_224


def test_ends_sampling_and_unused_ids_of_the_published_files(edit: Edit) -> None:
    edit(**PUBLISHED)
    edit("generation_config.json", do_sample=True, temperature=0.6, top_p=0.95, top_k=20, eos_token_id=166101)
    names = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    added = [{"id": 166100 + place, "content": name} for place, name in enumerate(names)]
    spec = read_spec(
        edit("tokenizer.json", added_tokens=added, model={"vocab": {f"piece {i}": i for i in range(166100)}})
    )
    assert set(spec.eos_token_ids) == {166101, 166102}
    assert (spec.temperature, spec.top_p, spec.top_k) == (0.6, 0.95, 20)
    assert (spec.known_tokens, spec.vocab_size - spec.known_tokens) == (166107, 37)


REQUIRED = {
    "vocab_size": "an integer of at least 2",
    "hidden_size": "an integer of at least 1",
    "intermediate_size": "an integer of at least 1",
    "num_hidden_layers": "an integer of at least 1",
    "num_attention_heads": "an integer of at least 1",
    "num_key_value_heads": "an integer of at least 1",
    "num_loops": "an integer of at least 1",
    "max_position_embeddings": "an integer of at least 2",
    "rope_theta": "a number above 0",
    "rms_norm_eps": "a number above 0",
    "torch_dtype": "one of bfloat16, float32, float16",
}


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_never_filled_in(edit: Edit, key: str) -> None:
    assert f"config.json: {key} is missing; it must be {REQUIRED[key]}" in lines(edit(drop=(key,)))


def test_the_head_size_is_never_derived(edit: Edit) -> None:
    assert read_spec(edit(drop=("kv_channels",))).head_dim == 16
    assert lines(edit(kv_channels=8)) == ["config.json: kv_channels 8 and head_dim 16 differ"]
    assert lines(edit(drop=("head_dim", "kv_channels"))) == [
        "config.json: head_dim is missing; it must be an integer of at least 2"
    ]


SWITCHES = {
    "enable_double_loop_split": True,
    "loop_middle_layers": 1,
    "loop_share_kv": True,
    "enable_hyper_connection": True,
    "enable_mhc": True,
    "enable_h_res_identity": True,
    "mhc_diff_for_loop": True,
    "mhc_identity_nohresparam": True,
    "enable_depth_attention": True,
    "emb_neighbor_num": 2,
    "emb_split_num": 2,
    "insert_ngram_layer_idx": [0],
    "ngram_insert_all_layers": True,
    "ngram_vocab_size_ratio": 0.25,
    "ngram_embedding_hidden_size": 16,
    "qk_layernorm": True,
    "attention_bias": True,
    "mlp_bias": True,
}


@pytest.mark.parametrize("key", SWITCHES)
def test_a_switch_of_another_variant_is_refused_by_name(edit: Edit, key: str) -> None:
    assert lines(edit(**{key: SWITCHES[key]})) == [
        f"config.json: {key} {json.dumps(SWITCHES[key])} is not supported; must be null, false, 0 or []"
    ]


@pytest.mark.parametrize("off", [None, False, 0, []])
def test_switches_may_be_off(edit: Edit, off: Any) -> None:
    assert read_spec(edit(**dict.fromkeys(SWITCHES, off), pretraining_tp=1)).loops == 2


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("skip_loop_final_norm", True, "skip_loop_final_norm true is not supported; must be false"),
        ("loop_loss_weights", [0.5], "loop_loss_weights [0.5] is not supported; must be []"),
        ("pretraining_tp", 2, "pretraining_tp 2 is not supported; must be 1"),
        ("tie_word_embeddings", True, "tie_word_embeddings true is not supported; must be false"),
        ("hidden_act", "gelu", 'hidden_act "gelu" is not supported; must be "silu"'),
        ("num_loops", 0, "num_loops must be an integer of at least 1, got 0"),
        (
            "rope_scaling",
            {"rope_type": "yarn", "factor": 4.0},
            'rope_scaling {"rope_type": "yarn", "factor": 4.0} is not supported; '
            'must be {"rope_type": "default"} or {"type": "default"}',
        ),
        ("total_ut_steps", 2, "unknown key total_ut_steps"),
        ("early_exit_threshold", 0.5, "unknown key early_exit_threshold"),
    ],
)
def test_a_value_that_is_not_honoured_is_refused(edit: Edit, key: str, value: Any, line: str) -> None:
    assert lines(edit(**{key: value})) == [f"config.json: {line}"]


# -- fixed depth ------------------------------------------------------------------------------------------------------


def test_there_is_a_reason_for_fixed_depth() -> None:
    assert FAMILIES["nanbeige"].full_depth == WHY
    assert FAMILIES["ouro"].full_depth is None


@pytest.mark.parametrize(
    "open_model", [Engine, lambda config: plan_memory(config, TINY, read_spec(TINY))], ids=["start", "check"]
)
def test_settings_that_the_family_cannot_follow_come_at_once(open_model: Callable[[Config], Any]) -> None:
    config = load_config(
        overrides={
            "model": {"path": str(TINY), "max_model_len": 2000},
            "engine": {"device": "cpu"},
            "exit": {"rule": "ouro_delayed", "threshold": 0.5, "max_loops": 1},
            "kv": {"layout": "cyclic:2"},
        }
    )
    with pytest.raises(ConfigError) as caught:
        open_model(config)
    assert caught.value.problems == [
        "model.max_model_len 2000 is more than the model's 1024 positions",
        f"kv.layout cyclic:2 does not go with a nanbeige model: {WHY}",
        f"exit.rule ouro_delayed does not go with a nanbeige model: {WHY}",
        f"exit.threshold 0.5 does not go with a nanbeige model: {WHY}",
        f"exit.max_loops 1 does not go with a nanbeige model: {WHY}",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_loops": 1}, f"max_loops: must be 2 with this model, got 1: {WHY}"),
        ({"min_loops": 1}, f"min_loops: must be 2 with this model, got 1: {WHY}"),
        ({"max_loops": 1, "min_loops": 1}, f"max_loops: must be 2 with this model, got 1: {WHY}"),
        ({"exit_threshold": 0.99}, f"exit_threshold: must be at least 1 with this model, got 0.99: {WHY}"),
        ({"max_loops": 3}, "max_loops: must be between 1 and 2, got 3"),
    ],
)
def test_requests_for_less_than_all_loops_are_refused(
    make_engine: Callable[..., Engine], fields: dict[str, Any], message: str
) -> None:
    engine = make_engine(model={"path": str(TINY)})
    with pytest.raises(ParamError) as caught:
        resolved(engine, [5, 9], **fields)
    assert str(caught.value) == message


def test_requests_for_all_loops_are_what_they_get_anyway(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(model={"path": str(TINY)}, exit={"max_loops": 2, "threshold": 1.0})
    asked = resolved(engine, [5, 9], max_loops=2, min_loops=2, exit_threshold=1.5)
    free = resolved(engine, [5, 9])
    assert (free.min_loops, free.max_loops, free.exit_threshold) == (2, 2, 1.0)
    assert (asked.min_loops, asked.max_loops) == (2, 2)
