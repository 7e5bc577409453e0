"""Huginn's config.json and tensors are read strictly, and its initial states are what they should be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlt.errors import ModelError
from rlt.exec.normals import normals
from rlt.exec.rng import philox
from rlt.models.checkpoint import read_spec
from rlt.models.families import FAMILIES
from rlt.models.huginn import (
    DERIVED,
    STATE_STD,
    Huginn,
    initial_state,
    tensor_shapes,
    turn_table,
)
from rlt.models.keys import Keys
from rlt.models.registry import check_model
from rlt.models.spec import ModelSpec
from support import DATA

TINY = DATA / "golden" / "huginn-tiny"
CONFIG: dict[str, Any] = json.loads((TINY / "config.json").read_text())

#: What Huginn-0125 has of what differs from the tiny checkpoint.
REAL = {"n_embd": 5280, "intermediate_size": 17920, "vocab_size": 65536, "block_size": 4096, "mean_recurrence": 32}
REAL |= {"n_layers_in_recurrent_block": 4, "n_layers_in_coda": 2, "init_values": {"embed_scale": 72.66360849833398}}
#: Keys that its file may lack.
ABSENT = ("n_heads", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_base", "n_layers")
ABSENT += ("padded_vocab_size", "test_time_noise")


def read(directory: Path, drop: tuple[str, ...] = (), **values: Any) -> tuple[ModelSpec, list[str]]:
    """The spec of the tiny config.json with some keys dropped or set, and the problems without the file's name."""
    config = {key: value for key, value in CONFIG.items() if key not in drop} | values
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    keys = Keys(path)
    keys.harmless("model_type")
    shape = FAMILIES["huginn"].read(keys)
    return shape, [line.removeprefix(f"{path}: ") for line in keys.finish()]


def test_the_published_shape(tmp_path: Path) -> None:
    shape, problems = read(tmp_path, ABSENT, **REAL)
    assert problems == []
    assert (shape.heads, shape.head_dim, shape.rope_theta, shape.outer_layers) == (55, 96, 50_000.0, 4)
    # Two and two layers around four: one page list beside the planes, and none of it is wasted.
    assert (shape.layers, shape.outer_lists, shape.loops) == (4, 1, 32)
    shapes = tensor_shapes(shape)
    sizes = {name: math.prod(dims) for name, dims in shapes.items()}
    assert len(shapes) == 77
    assert sum(sizes.values()) == 3_911_400_096
    assert sum(size for name, size in sizes.items() if name not in DERIVED) == 3_564_976_800
    assert sum(size for name, size in sizes.items() if ".core_block.0." in name) == 395_398_080


@pytest.mark.parametrize("name", ["huginn-tiny", "huginn-tiny-core4"])
def test_tensors_are_those_of_the_checkpoints(tmp_path: Path, name: str) -> None:
    directory = DATA / "golden" / name
    weights = load_file(directory / "model.safetensors")
    spec = read_spec(directory)
    kept = sum(weight.numel() for key, weight in weights.items() if key not in DERIVED)
    assert check_model(directory, spec, torch.bfloat16) == 2 * kept
    assert tensor_shapes(spec) == {key: tuple(weight.shape) for key, weight in weights.items()}


REQUIRED = ("n_embd", "intermediate_size", "vocab_size", "block_size", "mean_recurrence", "norm_eps", "qk_bias")
REQUIRED += ("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda", "block_class_name")


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_never_filled_in(tmp_path: Path, key: str) -> None:
    assert any(line.startswith(f"{key} ") for line in read(tmp_path, (key,))[1])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qk_bias", False),
        ("tie_embeddings", False),
        ("tie_word_embeddings", False),
        ("bias", True),
        ("injection_type", "add"),
        ("state_init", "zero"),
        ("norm_class_name", "LayerNorm"),
        ("block_class_name", "TransformerPreNormBlock"),
        ("mlp_class_name", "BaseMLP"),
        ("nonlin_name", "ReLU"),
        ("test_time_noise", 0.1),
        ("num_key_value_heads", 2),
        ("num_attention_heads", 3),
        ("head_dim", 32),
        ("padded_vocab_size", 512),
        ("n_layers", 8),
        ("n_heads", 5),
        ("init_values", {"embed_scale": 1.0}),
        ("init_values", [1.0]),
        ("sliding_window", 128),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, key: str, value: object) -> None:
    problems = read(tmp_path, **{key: value})[1]
    assert any(key in line for line in problems)


def weights() -> dict[str, Tensor]:
    return load_file(TINY / "model.safetensors")


def test_derived_tensors_are_compared(tmp_path: Path) -> None:
    shape, tensors = read(tmp_path)[0], weights()
    assert torch.equal(tensors["freqs_cis"][0, :, 0], turn_table(shape))
    Huginn(shape, tensors | {"freqs_cis": tensors["freqs_cis"].bfloat16()})
    head = tensors["lm_head.weight"].clone()
    head[3, 5] += 1e-3
    with pytest.raises(ModelError, match="tied"):
        Huginn(shape, tensors | {"lm_head.weight": head})
    for wrong in (tensors["freqs_cis"].flip(-1), tensors["freqs_cis"] * math.nan):
        with pytest.raises(ModelError, match="freqs_cis"):
            Huginn(shape, tensors | {"freqs_cis": wrong})
    with pytest.raises(ModelError, match="rope_base 10000"):
        Huginn(read(tmp_path, rope_base=10_000)[0], tensors)


def test_seeded_states_have_the_published_distribution() -> None:
    rows, width = 400, 501
    states = initial_state(torch.full((rows,), 11), torch.arange(rows), width, "seeded")
    assert (states.shape, states.dtype) == ((rows, width), torch.float32)
    # The same as std sqrt(2 / (5 n)) cut at three of these, times sqrt(n), for Huginn's n.
    assert pytest.approx(0.00870388 * 72.6636085, rel=1e-6) == STATE_STD
    assert states.abs().max() <= 3 * STATE_STD
    assert states.abs().max() > 2.9 * STATE_STD
    # Four standard errors of 200,400 draws.
    assert abs(states.mean()) < 4 * 0.624 / math.sqrt(states.numel())
    assert states.std().item() == pytest.approx(0.62397, abs=4 * 0.624 / math.sqrt(2 * states.numel()))
    # The largest distance of the distribution functions (Kolmogorov): above 1.95 / sqrt(count) once in a thousand.
    ordered = states.flatten().double().sort().values / STATE_STD
    inside = math.erf(3 / math.sqrt(2))
    function = (torch.erf(ordered / math.sqrt(2)) / inside + 1) / 2
    empirical = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    assert (function - empirical).abs().max() < 1.95 / math.sqrt(len(ordered))


def test_seeded_states_depend_on_seed_position_and_feature_alone() -> None:
    positions, width = torch.arange(50), 30
    states = initial_state(torch.full((50,), 7), positions, width, "seeded")
    other = torch.tensor([9, 7, 7 + (1 << 40), 7])
    mixed = initial_state(other, torch.tensor([3, 49, 3, 3]), width + 3, "seeded")
    assert torch.equal(mixed[[1, 3], :width], states[[49, 3]])
    rows = torch.cat([states, mixed[[0, 2], :width]])
    assert len(set(rows.flatten().tolist())) == rows.numel()
    # No two positions, features or seeds go together: correlations of 1,500 pairs.
    for a, b in ((states[1:], states[:-1]), (states[:, 1:], states[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 4 / math.sqrt(a.numel())
    assert not torch.equal(normals(other, other, 8, purpose=2), normals(other, other, 8))


def test_normals_use_all_words_of_the_generator() -> None:
    seed, position = torch.tensor([5 + (3 << 32)]), torch.tensor([6 + (2 << 32)])
    one, zero = torch.tensor([1]), torch.tensor([0])
    for block, draws in enumerate(normals(seed, position, 8).view(2, 4)):
        words = philox((one * 6, one * 2, one, zero + block), (one * 5, one * 3))
        shares = torch.erf(draws / math.sqrt(2)) / math.erf(3 / math.sqrt(2))
        torch.testing.assert_close((shares + 1) * 2**31 - 0.5, torch.cat(words).double(), atol=1e-4, rtol=0)


def test_zero_states() -> None:
    assert torch.equal(initial_state(torch.tensor([1, 2]), torch.tensor([0, 5]), 3, "zero"), torch.zeros(2, 3))


def test_no_rows() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    assert initial_state(nothing, nothing, 6, "seeded").shape == (0, 6)
