"""Where a model's files are: a built-in name, a directory or a Hub id becomes a checked directory. No torch here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rlt.errors import ModelError

ASSETS = Path(__file__).parent / "assets"
#: Built-in models by name, those of them that are there; their files are in `assets/<name>` of this package.
BUILT_IN = tuple(name for name in ("tiny-ouro", "tiny-nanbeige", "tiny-huginn") if (ASSETS / name).is_dir())

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja"]
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth")


def resolve_model(path: str, revision: str | None = None, load_format: str = "safetensors") -> Path:
    """The local directory of the model that `path` names, with a config.json and weights in it.

    `path` is a built-in name, a directory, or a Hub id (`org/name`, fetched into the Hub's own cache; `revision` is a
    branch, tag or commit there). A built-in name wins over a directory of that name, which `./name` reaches. With
    `load_format` "dummy" it needs no weights. Raises `ModelError`.
    """
    if path in BUILT_IN:
        _refuse_revision(path, revision, "is built in")
        return _checked(ASSETS / path, load_format)
    local = Path(path).expanduser()
    if local.exists():
        if not local.is_dir():
            raise ModelError(f"{path}: is a file; name the directory that holds {CONFIG_FILE} and the weights")
        _refuse_revision(path, revision, "is a local directory")
        return _checked(local, load_format)
    if _HUB_ID.fullmatch(path):
        return _checked(_download(path, revision, load_format), load_format)
    raise ModelError(
        f"{path}: no such directory, and not a built-in model ({', '.join(BUILT_IN)}) or a Hub id (org/name) either"
    )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, in name order: the single file, or else those of the index.

    Raises `ModelError` if there are none, or if the index is broken or names a file that is not there.
    """
    single = directory / WEIGHTS_FILE
    if single.is_file():
        return [single]
    names = sorted(set(weight_index(directory).values()))
    files = [directory / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{directory / INDEX_FILE}: names files that are not in the directory: {', '.join(missing)}; "
            "complete the download"
        )
    return files


def weight_index(directory: Path) -> dict[str, str]:
    """Tensor name to file name as the index says, or an empty dict for a model in a single file."""
    if (directory / WEIGHTS_FILE).is_file():
        return {}
    index = directory / INDEX_FILE
    if not index.is_file():
        pickles = [name for name in _PICKLES if (directory / name).exists()]
        hint = f"; {pickles[0]} is not read: convert it to safetensors" if pickles else ""
        raise ModelError(f"{directory}: has no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there{hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map must be an object that maps tensor names to files")
    for name, file in weight_map.items():
        # A plain name only: an index must not reach outside its directory.
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise ModelError(f"{index}: {name} must be in a .safetensors file of the same directory, got {file!r}")
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ModelError` naming the file."""
    try:
        # Some editors put a byte order mark in front, which changes nothing.
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ModelError(f"{path}: is nested too deeply") from error
    except ValueError as error:  # e.g. an integer of more digits than Python reads
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return data


def _checked(directory: Path, load_format: str) -> Path:
    if not (directory / CONFIG_FILE).is_file():
        raise ModelError(f"{directory}: has no {CONFIG_FILE}; name a directory that holds a whole checkpoint")
    if load_format != "dummy":
        weight_files(directory)
    return directory


def _refuse_revision(path: str, revision: str | None, what: str) -> None:
    if revision is not None:
        raise ModelError(f"{path}: {what}, so revision {revision!r} means nothing; leave model.revision out")


def _download(repo: str, revision: str | None, load_format: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # Its first base is the base error of the HTTP library that this version of the Hub client uses.
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]
    where = repo if revision is None else f"{repo} at revision {revision}"
    try:
        files = [pattern for pattern in _HUB_FILES if load_format != "dummy" or "safetensors" not in pattern]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=files))
    except HFValidationError as error:
        raise ModelError(f"{where}: no such directory, and not a Hub id (org/name) either") from error
    except GatedRepoError as error:
        raise ModelError(f"{where}: access must be requested on the Hub; then set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{where}: the Hub has no such revision") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{where}: no such directory, and no such model on the Hub (a private one needs HF_TOKEN)"
        ) from error
    except (LocalEntryNotFoundError, transport_error, OSError) as error:
        raise ModelError(
            f"{where}: no such directory, and the Hub cannot be reached and has left no whole copy in its cache; "
            "go online once, or give a local directory"
        ) from error
