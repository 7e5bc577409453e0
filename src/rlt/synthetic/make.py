"""Makes a synthetic checkpoint: large tensors first, then what calibration finds, then the files that name them."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlt.engine import choose_dtype
from rlt.errors import ConfigError
from rlt.models.checkpoint import GENERATION_FILE
from rlt.models.directory import CONFIG_FILE
from rlt.models.families import FAMILIES
from rlt.models.keys import Keys
from rlt.models.registry import MATHS
from rlt.models.spec import ModelSpec
from rlt.synthetic.calibrate import MOST_PASSES, Calibrated, Wanted, calibrate, seconds_per_pass
from rlt.synthetic.forward import Files
from rlt.synthetic.shapes import EXIT_THRESHOLD, Shape
from rlt.synthetic.shards import Entry, file_name, split, write_file, write_index
from rlt.synthetic.tokenizer import write_tokenizer
from rlt.synthetic.weights import Weights

NOTES_FILE = "synthetic.json"

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


#: passes that take longer than this many seconds are announced
LONG_PASS_S = 10.0

#: (what is done, share of it that is done)
Progress = Callable[[str, float], None]
#: told once, before a long wait
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What to make, and where. `dtype` is that of the weights on disk."""

    shape: Shape
    directory: Path
    dtype: str
    seed: int
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint that was written; `calibrated` is None where nothing was asked for."""

    parameters: int
    tensors: int
    disk_bytes: int
    files: int
    scale: float
    calibrated: Calibrated | None


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    """What the engine reads from a config.json with this content. Raises `ModelError`."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / CONFIG_FILE
        path.write_text(json.dumps(config))
        keys = Keys(path)
        model_type = keys.take("model_type")
        (family,) = (family for family in FAMILIES.values() if family.model_type == model_type)
        spec = family.read(keys)
        problems = keys.finish()
        assert not problems, problems
        return spec


def make_checkpoint(job: Job, device: torch.device, progress: Progress, announce: Announce) -> Made:
    """Write the checkpoint. Raises `ConfigError` for what cannot be made, and `RltError` when calibration fails.

    Needs an empty or new directory; what a failure leaves in it is removed.
    """
    directory, existed = job.directory, job.directory.exists()
    if existed and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError([f"--out: {directory} is there and not empty; name a new directory"])
    _check_disk(job)
    directory.mkdir(parents=True, exist_ok=True)
    done = False
    try:
        made = _make(job, device, progress, announce)
        done = True
        return made
    finally:
        if not done:
            for file in directory.iterdir():
                file.unlink()
            if not existed:
                directory.rmdir()


def _make(job: Job, device: torch.device, progress: Progress, announce: Announce) -> Made:
    shape, wanted = job.shape, job.wanted
    config = dict(shape.config) | {"torch_dtype": job.dtype}
    if wanted.mean_depth is not None and "early_exit_threshold" in config:
        config["early_exit_threshold"] = EXIT_THRESHOLD
    spec = read_config(config)
    weights = Weights(spec, job.seed)
    disk_dtype = _DTYPES[job.dtype]
    parts = split(entries(weights, disk_dtype), weights.is_late)
    files = {file_name(index, len(parts)): part for index, part in enumerate(parts)}
    total = sum(entry.nbytes for part in parts for entry in part)
    done = 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        progress("writing", done / total)

    *large, last = files
    for name in large:
        write_file(job.directory / name, files[name], weights.blocks, wrote)
    calibrated = None
    if wanted.agreement is not None or wanted.mean_depth is not None:
        index = {entry.name: name for name in large for entry in files[name]}
        read = Files(job.directory, index, weights, disk_dtype=disk_dtype, dtype=compute_dtype(device), device=device)
        about = seconds_per_pass(read, shape, wanted.tokens)
        if about > LONG_PASS_S:
            most = 1 if wanted.agreement is None else MOST_PASSES
            announce(
                f"calibration on {device}: about {about:.0f} s a pass, {most} at most; a GPU (--device) or fewer "
                "--calibration-tokens take less"
            )
        calibrated = calibrate(read, shape, wanted, lambda number, share: progress(f"pass {number}", share))
    # Small tensors last: some are known only now.
    write_file(job.directory / last, files[last], weights.blocks, wrote)
    write_index(job.directory, files)
    write_tokenizer(job.directory, shape.tokens, spec.max_positions)
    _write_json(job.directory / GENERATION_FILE, shape.generation)
    derived = MATHS[spec.family].derived
    made = Made(
        parameters=sum(math.prod(size) for name, size in weights.shapes.items() if name not in derived),
        tensors=len(weights.shapes),
        disk_bytes=total,
        files=len(files),
        scale=weights.scale,
        calibrated=calibrated,
    )
    notes = {"family": shape.family, "shape": shape.name, "seed": job.seed, "asked": asdict(wanted)} | asdict(made)
    _write_json(job.directory / NOTES_FILE, notes)
    # Without it the directory is no checkpoint, so it comes last.
    _write_json(job.directory / CONFIG_FILE, config)
    return made


def entries(weights: Weights, dtype: torch.dtype) -> list[Entry]:
    """All tensors; Huginn's rotary table is float32 always, as in the published file."""
    return [
        Entry(name, shape, torch.float32 if name == "freqs_cis" else dtype) for name, shape in weights.shapes.items()
    ]


def compute_dtype(device: torch.device) -> torch.dtype:
    """What the engine computes in on this device unless told otherwise."""
    return choose_dtype("auto", device)


def _check_disk(job: Job) -> None:
    weights = Weights(read_config(dict(job.shape.config) | {"torch_dtype": job.dtype}), job.seed)
    needed = sum(entry.nbytes for entry in entries(weights, _DTYPES[job.dtype]))
    place = job.directory.absolute()
    while not place.exists():
        place = place.parent
    if (free := shutil.disk_usage(place).free) < needed:
        raise ConfigError([f"--out: {place} has {free / 1e9:.1f} GB free; the checkpoint needs {needed / 1e9:.1f} GB"])


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
