"""Reads safetensors checkpoints strictly: every name, shape and dtype is checked before the first byte is loaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlt.errors import ModelError
from rlt.models.directory import CONFIG_FILE, INDEX_FILE, weight_files, weight_index
from rlt.progress import Progress

#: How many names an error lists before it only counts.
SHOWN = 5

_FLOATS = ("F32", "BF16", "F16")


class TensorEntry(NamedTuple):
    """What a safetensors header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_tensors(
    directory: Path,
    expected: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    ignore: Callable[[str], bool] = lambda name: False,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The tensors of `expected` (name to shape), as `dtype` on `device`.

    float32, bfloat16 and float16 on disk are converted to `dtype` with torch's rounding; other kinds are refused.
    Names that are not expected are refused too, unless `ignore(name)`, and so are tensors with NaN or infinity.
    Tensors are read one by one, so the host needs the model and at most one file at a time. `progress` is called after
    every tensor.
    Raises `ModelError` with all problems found.
    """
    wanted = check_tensors(directory, expected, ignore=ignore)
    total, done = checkpoint_bytes(expected, dtype), 0
    tensors: dict[str, Tensor] = {}
    broken: list[str] = []
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in sorted(name for name, entry in wanted.items() if entry.file == file):
                    # A copy even where nothing changes: the reader's tensor is a view of the mapped file.
                    tensors[name] = reader.get_tensor(name).to(device=device, dtype=dtype, copy=True)
                    done += tensors[name].nbytes
                    if not _is_finite(tensors[name]):
                        broken.append(f"{name} (in {file.name})")
                    if progress is not None:
                        progress(file.name, done / total)
        except (SafetensorError, OSError) as error:
            raise _broken(file, error) from error
    if broken:
        raise ModelError(f"{directory}: weights are damaged:\n{_listed('tensors with NaN or infinity', broken)}")
    return tensors


def check_tensors(
    directory: Path, expected: Mapping[str, tuple[int, ...]], *, ignore: Callable[[str], bool] = lambda name: False
) -> dict[str, TensorEntry]:
    """Where each tensor of a checkpoint is, from the files' headers alone. Raises `ModelError` with all problems."""
    entries, problems = _read_headers(directory)
    wanted = {name: entry for name, entry in entries.items() if name in expected or not ignore(name)}
    problems += _mismatches(wanted, expected)
    if problems:
        raise ModelError("\n".join((f"{directory}: the weights do not fit its {CONFIG_FILE}:", *problems)))
    return wanted


def checkpoint_bytes(expected: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Bytes that the tensors of `expected` (name to shape) take in memory as `dtype`."""
    return dtype.itemsize * sum(math.prod(shape) for shape in expected.values())


def fingerprint(directory: Path, load_format: str = "safetensors") -> str:
    """A SHA-256 (hex) that tells checkpoints apart without reading their weights.

    It covers config.json and, for every weight file, its name, size and safetensors header (names, shapes, dtypes,
    offsets). Two checkpoints of one shape that differ only in weight values have the same fingerprint. Of `load_format`
    "dummy", whose weights follow from config.json, no weight file is looked at.
    """
    digest = hashlib.sha256()
    digest.update((directory / CONFIG_FILE).read_bytes())
    if load_format == "dummy":
        digest.update(b"\0dummy")
        return digest.hexdigest()
    for file in weight_files(directory):
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = stream.read(8)
            header_bytes = int.from_bytes(length, "little")
            if len(length) < 8 or header_bytes > size - 8:
                raise ModelError(f"{file}: is cut short or not a safetensors file; download it again")
            digest.update(f"{file.name}\0{size}\0{header_bytes}\0".encode())
            digest.update(stream.read(header_bytes))
    return digest.hexdigest()


def _read_headers(directory: Path) -> tuple[dict[str, TensorEntry], list[str]]:
    """Every tensor in the weight files, and what does not agree between the files and their index."""
    entries: dict[str, TensorEntry] = {}
    doubled: list[str] = []
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in reader.keys():  # noqa: SIM118 - a reader, not a dict
                    if name in entries:
                        doubled.append(f"{name} (in {entries[name].file.name} and {file.name})")
                        continue
                    part = reader.get_slice(name)
                    entries[name] = TensorEntry(file, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise _broken(file, error) from error
    problems = [_listed("tensors in two files", doubled)]
    index = weight_index(directory)
    if index:
        absent = [
            f"{name} (in {file})"
            for name, file in index.items()
            if name not in entries or entries[name].file.name != file
        ]
        problems.append(_listed(f"tensors that {INDEX_FILE} names but the file lacks", absent))
        unlisted = [f"{name} (in {entry.file.name})" for name, entry in entries.items() if name not in index]
        problems.append(_listed(f"tensors that {INDEX_FILE} does not name", unlisted))
    return entries, [problem for problem in problems if problem]


def _is_finite(tensor: Tensor) -> bool:
    # Both propagate NaN; in one pass, and without a mask of the tensor's size.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _mismatches(entries: Mapping[str, TensorEntry], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    missing = [name for name in expected if name not in entries]
    extra = [name for name in entries if name not in expected]
    shared = [(name, entries[name], shape) for name, shape in expected.items() if name in entries]
    shapes = [
        f"{name} is {list(entry.shape)}, not {list(shape)}" for name, entry, shape in shared if entry.shape != shape
    ]
    dtypes = [f"{name} is {entry.dtype}" for name, entry, _ in shared if entry.dtype not in _FLOATS]
    problems = (
        _listed("missing tensors", missing),
        _listed("unknown tensors", extra),
        _listed("wrong shapes", shapes),
        _listed(f"dtypes other than {', '.join(_FLOATS)}", dtypes),
    )
    return [problem for problem in problems if problem]


def _listed(title: str, names: list[str]) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"  {title} ({len(names)}): {', '.join(sorted(names)[:SHOWN])}{rest}"


def _broken(file: Path, error: Exception) -> ModelError:
    return ModelError(f"{file}: is cut short or not a safetensors file ({error}); download it again")
