from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlt.errors import ModelError
from rlt.models import layers
from rlt.models.checkpoint import read_spec
from rlt.models.directory import ASSETS
from rlt.models.loader import checkpoint_bytes, fingerprint, load_tensors
from rlt.models.registry import load_model
from support import DATA

CPU = torch.device("cpu")
EXPECTED = {"a": (2, 3), "b": (4,), "c": (1,)}


def values() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor([1.0, 1 / 3, 60000.0, -1e-30]),
        "c": torch.tensor([-0.5]),
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file(values(), tmp_path / "model.safetensors")
    return tmp_path


def shard(directory: Path, *groups: str, index: dict[str, str] | None = None) -> None:
    """Split the tensors into files by name; `index` replaces the index that fits."""
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05}.safetensors"
        save_file({name: values()[name] for name in names}, directory / file)
        weight_map.update(dict.fromkeys(names, file))
    text = json.dumps({"weight_map": weight_map if index is None else index})
    (directory / "model.safetensors.index.json").write_text(text)


def refusal(directory: Path, expected: dict[str, tuple[int, ...]] = EXPECTED) -> list[str]:
    with pytest.raises(ModelError) as caught:
        load_tensors(directory, expected, dtype=torch.float32, device=CPU)
    return str(caught.value).replace(f"{directory}/", "").split("\n")


HEADER = "the weights do not fit its config.json:"


def test_tensors_come_as_they_are(checkpoint: Path) -> None:
    loaded = load_tensors(checkpoint, EXPECTED, dtype=torch.float32, device=CPU)
    assert loaded.keys() == EXPECTED.keys()
    assert all(torch.equal(loaded[name], value) for name, value in values().items())


def test_tensors_outlive_their_file(checkpoint: Path) -> None:
    loaded = load_tensors(checkpoint, EXPECTED, dtype=torch.float32, device=CPU)
    file = checkpoint / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\0" * file.stat().st_size)
    assert all(torch.equal(loaded[name], value) for name, value in values().items())


@pytest.mark.parametrize("disk", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_are_converted(tmp_path: Path, disk: torch.dtype, wanted: torch.dtype) -> None:
    save_file({name: value.to(disk) for name, value in values().items()}, tmp_path / "model.safetensors")
    loaded = load_tensors(tmp_path, EXPECTED, dtype=wanted, device=CPU)
    for name, value in values().items():
        assert loaded[name].dtype == wanted
        assert torch.equal(loaded[name], value.to(disk).to(wanted))


def test_shards_are_read_through_their_index(checkpoint: Path) -> None:
    shard(checkpoint, "ac", "b")
    steps: list[tuple[str, float]] = []
    loaded = load_tensors(
        checkpoint, EXPECTED, dtype=torch.bfloat16, device=CPU, progress=lambda file, share: steps.append((file, share))
    )
    assert all(torch.equal(loaded[name], value.bfloat16()) for name, value in values().items())
    assert steps == [
        ("model-00001.safetensors", 6 / 11),
        ("model-00001.safetensors", 7 / 11),
        ("model-00002.safetensors", 1.0),
    ]


def test_names_and_shapes_are_checked_together(checkpoint: Path) -> None:
    assert refusal(checkpoint, {"a": (3, 2), "b": (4,), "d": (9,)}) == [
        f"{checkpoint}: {HEADER}",
        "  missing tensors (1): d",
        "  unknown tensors (1): c",
        "  wrong shapes (1): a is [2, 3], not [3, 2]",
    ]


def test_long_lists_are_shortened(checkpoint: Path) -> None:
    assert refusal(checkpoint, EXPECTED | {f"x{i}": (1,) for i in range(9)}) == [
        f"{checkpoint}: {HEADER}",
        "  missing tensors (9): x0, x1, x2, x3, x4 and 4 more",
    ]


def test_known_leftovers_are_ignored(checkpoint: Path) -> None:
    expected = {"a": (2, 3)}
    loaded = load_tensors(checkpoint, expected, dtype=torch.float32, device=CPU, ignore=lambda name: name in "abc")
    assert loaded.keys() == {"a"}


def test_a_missing_tensor_is_never_ignored(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match=r"missing tensors \(1\): d"):
        load_tensors(checkpoint, EXPECTED | {"d": (1,)}, dtype=torch.float32, device=CPU, ignore=lambda name: True)


def test_integers_are_not_weights(checkpoint: Path) -> None:
    save_file(values() | {"c": torch.tensor([1])}, checkpoint / "model.safetensors")
    assert refusal(checkpoint) == [f"{checkpoint}: {HEADER}", "  dtypes other than F32, BF16, F16 (1): c is I64"]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_damaged_numbers_are_named(checkpoint: Path, dtype: torch.dtype, wrong: float) -> None:
    shard(checkpoint, "ac", "b")
    file = checkpoint / "model-00002.safetensors"
    save_file({"b": torch.tensor([1.0, wrong, 2.0, 3.0])}, file)
    with pytest.raises(ModelError) as caught:
        load_tensors(checkpoint, EXPECTED, dtype=dtype, device=CPU)
    assert str(caught.value).split("\n") == [
        f"{checkpoint}: weights are damaged:",
        "  tensors with NaN or infinity (1): b (in model-00002.safetensors)",
    ]


@pytest.mark.parametrize("family", ["ouro", "nanbeige"])
def test_building_holds_one_layer_twice_at_most(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Joined matrices are copies, so the parts of each layer must have gone when the next one is joined."""
    directory = ASSETS / f"tiny-{family}"
    spec, left, read = read_spec(directory), [], layers._read_layer

    def spy(tensors: dict[str, torch.Tensor], prefix: str, norms: tuple[str, ...]) -> layers.Layer:
        layer = read(tensors, prefix, norms)
        left.append(len({name.split(".")[2] for name in tensors if name.startswith("model.layers.")}))
        return layer

    monkeypatch.setattr(layers, "_read_layer", spy)
    load_model(directory, spec, dtype=torch.float32, device=CPU)
    assert left == list(range(spec.layers - 1, -1, -1))


@pytest.mark.parametrize("name", ["lm_head.weight", "freqs_cis"])
def test_what_follows_from_other_files_is_refused_with_its_directory(tmp_path: Path, name: str) -> None:
    tiny = DATA / "golden" / "huginn-tiny"
    shutil.copy(tiny / "config.json", tmp_path)
    tensors = load_file(tiny / "model.safetensors")
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_model(tmp_path, read_spec(tmp_path), dtype=torch.float32, device=CPU)
    assert str(caught.value).startswith(f"{tmp_path}: {name} is not ")


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_a_file_that_is_cut_short_is_named(checkpoint: Path, keep: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    (line,) = refusal(checkpoint)
    assert line.startswith("model.safetensors: is cut short or not a safetensors file (")
    assert line.endswith("); download it again")


@pytest.mark.parametrize("content", [b"\xff" * 64, b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_that_is_something_else_is_named(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    (line,) = refusal(checkpoint)
    assert line.startswith("model.safetensors: is cut short or not a safetensors file (")


def test_a_tensor_in_two_files_is_refused(checkpoint: Path) -> None:
    shard(checkpoint, "ac", "bc")
    assert refusal(checkpoint) == [
        f"{checkpoint}: {HEADER}",
        "  tensors in two files (1): c (in model-00001.safetensors and model-00002.safetensors)",
        "  tensors that model.safetensors.index.json names but the file lacks (1): c (in model-00002.safetensors)",
    ]


def test_an_index_must_agree_with_its_files(checkpoint: Path) -> None:
    one, two = "model-00001.safetensors", "model-00002.safetensors"
    shard(checkpoint, "ac", "b", index={"a": two, "b": two, "d": one})
    assert refusal(checkpoint) == [
        f"{checkpoint}: {HEADER}",
        "  tensors that model.safetensors.index.json names but the file lacks (2): "
        "a (in model-00002.safetensors), d (in model-00001.safetensors)",
        "  tensors that model.safetensors.index.json does not name (1): c (in model-00001.safetensors)",
    ]


def test_bytes_are_counted_in_the_wanted_dtype() -> None:
    assert checkpoint_bytes(EXPECTED, torch.float32) == 44
    assert checkpoint_bytes(EXPECTED, torch.bfloat16) == 22


class TestFingerprint:
    def test_is_the_same_for_a_copy(self, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        copy = tmp_path_factory.mktemp("copy")
        for name in ("config.json", "model.safetensors"):
            (copy / name).write_bytes((checkpoint / name).read_bytes())
        assert fingerprint(copy) == fingerprint(checkpoint)
        assert len(fingerprint(copy)) == 64

    def test_changes_with_the_config(self, checkpoint: Path) -> None:
        before = fingerprint(checkpoint)
        (checkpoint / "config.json").write_text('{"rope_theta": 1}')
        assert fingerprint(checkpoint) != before

    def test_changes_with_a_header(self, checkpoint: Path) -> None:
        before = fingerprint(checkpoint)
        save_file(values() | {"c": torch.zeros(1, dtype=torch.bfloat16)}, checkpoint / "model.safetensors")
        assert fingerprint(checkpoint) != before

    def test_does_not_read_weights(self, checkpoint: Path) -> None:
        before = fingerprint(checkpoint)
        save_file(values() | {"c": torch.tensor([7.0])}, checkpoint / "model.safetensors")
        assert fingerprint(checkpoint) == before

    @pytest.mark.parametrize("keep", [0, 20])
    def test_needs_a_whole_header(self, checkpoint: Path, keep: int) -> None:
        file = checkpoint / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(ModelError, match=r"model.safetensors: is cut short or not a safetensors file; download"):
            fingerprint(checkpoint)


def test_the_golden_checkpoint_loads() -> None:
    tiny = DATA / "golden" / "ouro-tiny"
    stored = load_file(tiny / "model.safetensors")
    expected = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    loaded = load_tensors(tiny, expected, dtype=torch.float32, device=CPU)
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)
