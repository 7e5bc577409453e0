"""From a model name to a model that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rlt.models import ouro
from rlt.models.loader import check_tensors, checkpoint_bytes, load_tensors
from rlt.models.spec import ModelSpec


def load_model(
    directory: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, float], None] | None = None,
) -> ouro.Ouro:
    """Load the checkpoint in `directory` to `device`. Raises `ModelError` when its tensors are not those of `spec`."""
    tensors = load_tensors(
        directory,
        ouro.tensor_shapes(spec),
        dtype=dtype,
        device=device,
        ignore=ouro.ignorable,
        progress=progress,
    )
    return ouro.Ouro(spec, tensors)


def check_model(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Check the checkpoint's headers against `spec` without loading it; the bytes its weights take as `dtype`.

    Raises `ModelError`.
    """
    shapes = ouro.tensor_shapes(spec)
    check_tensors(directory, shapes, ignore=ouro.ignorable)
    return checkpoint_bytes(shapes, dtype)
