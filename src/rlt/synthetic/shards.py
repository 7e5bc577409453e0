"""Writes safetensors files tensor by tensor and block by block, so that no tensor is ever whole in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rlt.models.directory import INDEX_FILE

#: A file takes no further tensor beyond this.
SHARD_BYTES = 2_000_000_000

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Entry(NamedTuple):
    """A tensor of a file that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def split(entries: Iterable[Entry], late: Callable[[str], bool], limit: int = SHARD_BYTES) -> list[list[Entry]]:
    """The entries by file: in order and up to `limit` bytes each (a larger tensor alone); `late` names in the last."""
    files: list[list[Entry]] = [[]]
    last: list[Entry] = []
    size = 0
    for entry in entries:
        if late(entry.name):
            last.append(entry)
            continue
        if files[-1] and size + entry.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return [*files, last]


def file_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_file(
    path: Path, entries: list[Entry], blocks: Callable[[str], Iterable[Tensor]], progress: Callable[[int], None]
) -> None:
    """Write one file. `blocks(name)` gives a tensor's values in order, in pieces of any shape and float dtype.

    `progress` is called with the bytes of each piece.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.nbytes
        header[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    # Data start at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in entries:
            written = 0
            for block in blocks(entry.name):
                data = block.to(entry.dtype).contiguous().view(torch.uint8).numpy()
                file.write(data.data)
                written += data.nbytes
                progress(data.nbytes)
            assert written == entry.nbytes, f"{entry.name}: {written} bytes instead of {entry.nbytes}"


def write_index(directory: Path, files: Mapping[str, list[Entry]]) -> None:
    """Write the index over `files` (name to entries)."""
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entries in files.values() for entry in entries)},
        "weight_map": {entry.name: name for name, entries in files.items() for entry in entries},
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
