from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from rlt.errors import ModelError
from rlt.models import directory
from rlt.models.directory import resolve_model, weight_files, weight_index
from support import DATA

TINY = DATA / "golden" / "ouro-tiny"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint's config.json and weights, free to change."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, tmp_path / name)
    return tmp_path


def refusal(path: str, revision: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(path, revision)
    return str(caught.value)


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_directory_is_itself() -> None:
    assert resolve_model(str(TINY)) == TINY
    assert weight_files(TINY) == [TINY / "model.safetensors"]
    assert weight_index(TINY) == {}


def test_a_built_in_name_is_a_folder_of_the_package(monkeypatch: pytest.MonkeyPatch, broken: Path) -> None:
    shutil.copytree(broken, broken / "assets" / "tiny-ouro")
    monkeypatch.setattr(directory, "ASSETS", broken / "assets")
    monkeypatch.chdir(broken / "assets" / "tiny-ouro")
    assert resolve_model("tiny-ouro") == broken / "assets" / "tiny-ouro"
    assert refusal("tiny-ouro", "main") == (
        "tiny-ouro: is built in, so revision 'main' means nothing; leave model.revision out"
    )


def test_a_revision_of_a_directory_is_refused() -> None:
    assert refusal(str(TINY), "main") == (
        f"{TINY}: is a local directory, so revision 'main' means nothing; leave model.revision out"
    )


def test_a_directory_without_config_is_refused(broken: Path) -> None:
    (broken / "config.json").unlink()
    assert refusal(str(broken)) == f"{broken}: has no config.json; name a directory that holds a whole checkpoint"


def test_a_directory_without_weights_is_refused(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    line = f"{broken}: has no weights: neither model.safetensors nor model.safetensors.index.json is there"
    assert refusal(str(broken)) == line
    (broken / "pytorch_model.bin").touch()
    assert refusal(str(broken)) == f"{line}; pytorch_model.bin is not read: convert it to safetensors"


def test_a_file_is_not_a_directory() -> None:
    path = TINY / "model.safetensors"
    assert refusal(str(path)) == f"{path}: is a file; name the directory that holds config.json and the weights"


@pytest.mark.parametrize("path", ["tiny-oro", "/no/such/place", "./a/b", "a/b/c", "../x", "org/"])
def test_what_is_nothing_at_all_is_refused(path: str) -> None:
    assert refusal(path) == (
        f"{path}: no such directory, and not a built-in model (tiny-ouro, tiny-nanbeige, tiny-huginn) or a Hub id"
        " (org/name) either"
    )


class TestIndex:
    def test_names_its_files_once_and_in_order(self, broken: Path) -> None:
        (broken / "model.safetensors").unlink()
        for name in ("b.safetensors", "a.safetensors"):
            (broken / name).touch()
        write_index(broken, {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
        assert weight_files(broken) == [broken / "a.safetensors", broken / "b.safetensors"]

    def test_must_not_name_a_file_that_is_not_there(self, broken: Path) -> None:
        (broken / "model.safetensors").rename(broken / "a.safetensors")
        write_index(broken, {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"})
        assert refusal(str(broken)) == (
            f"{broken}/model.safetensors.index.json: names files that are not in the directory: "
            "b.safetensors, c.safetensors; complete the download"
        )

    @pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
    def test_must_have_a_map(self, broken: Path, weight_map: Any) -> None:
        (broken / "model.safetensors").unlink()
        write_index(broken, weight_map)
        assert refusal(str(broken)) == (
            f"{broken}/model.safetensors.index.json: weight_map must be an object that maps tensor names to files"
        )

    @pytest.mark.parametrize("file", ["../a.safetensors", "/a.safetensors", "a.bin", 3])
    def test_must_stay_in_its_directory(self, broken: Path, file: Any) -> None:
        (broken / "model.safetensors").unlink()
        write_index(broken, {"x": file})
        assert refusal(str(broken)) == (
            f"{broken}/model.safetensors.index.json: "
            f"x must be in a .safetensors file of the same directory, got {file!r}"
        )


class TestHub:
    def test_fetches_only_what_is_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[str, dict[str, Any]]] = []

        def download(repo: str, **options: Any) -> str:
            calls.append((repo, options))
            return str(TINY)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve_model("org/name", "v1") == TINY
        patterns = ["*.json", "*.safetensors", "*.model", "*.jinja"]
        assert calls == [("org/name", {"revision": "v1", "allow_patterns": patterns})]

    def test_checks_what_it_fetched(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: str(tmp_path))
        assert refusal("org/name").startswith(f"{tmp_path}: has no config.json")

    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (
                LocalEntryNotFoundError("x"),
                "org/name: no such directory, and the Hub cannot be reached and has left no",
            ),
            (
                HfHubHTTPError.__bases__[0]("x"),
                "org/name: no such directory, and the Hub cannot be reached and has left no",
            ),
            (OSError("x"), "org/name: no such directory, and the Hub cannot be reached and has left no"),
            ("gated", "org/name: access must be requested on the Hub; then set HF_TOKEN"),
            ("revision", "org/name: the Hub has no such revision"),
            ("missing", "org/name: no such directory, and no such model on the Hub (a private one needs HF_TOKEN)"),
        ],
    )
    def test_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch, error: Exception | str, line: str) -> None:
        kinds = {"gated": GatedRepoError, "revision": RevisionNotFoundError, "missing": RepositoryNotFoundError}
        if isinstance(error, str):
            error = kinds[error]("x", response=Mock())

        def fail(repo: str, **options: Any) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        assert refusal("org/name").startswith(line)

    def test_a_revision_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(repo: str, **options: Any) -> str:
            raise LocalEntryNotFoundError("x")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        assert refusal("org/name", "v2").startswith("org/name at revision v2: ")

    def test_an_id_that_the_hub_would_not_take(self) -> None:
        assert refusal("org/a--b") == "org/a--b: no such directory, and not a Hub id (org/name) either"
