"""From a model name to a model that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rlt.models import nanbeige, ouro
from rlt.models.interface import LoopedModel
from rlt.models.layers import ignorable
from rlt.models.loader import check_tensors, checkpoint_bytes, load_tensors
from rlt.models.spec import ModelSpec


class Maths(NamedTuple):
    """A family's maths: the tensors that it takes, and the model that it makes of them."""

    shapes: Callable[[ModelSpec], dict[str, tuple[int, ...]]]
    build: Callable[[ModelSpec, Mapping[str, Tensor]], LoopedModel]


#: by the families of `rlt.models.families`
MATHS = {
    "ouro": Maths(ouro.tensor_shapes, ouro.Ouro),
    "nanbeige": Maths(nanbeige.tensor_shapes, nanbeige.Nanbeige),
}


def load_model(
    directory: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, float], None] | None = None,
) -> LoopedModel:
    """Load the checkpoint in `directory` to `device`. Raises `ModelError` when its tensors are not those of `spec`."""
    maths = MATHS[spec.family]
    tensors = load_tensors(
        directory, maths.shapes(spec), dtype=dtype, device=device, ignore=ignorable, progress=progress
    )
    return maths.build(spec, tensors)


def check_model(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Check the checkpoint's headers against `spec` without loading it; the bytes its weights take as `dtype`.

    Raises `ModelError`.
    """
    shapes = MATHS[spec.family].shapes(spec)
    check_tensors(directory, shapes, ignore=ignorable)
    return checkpoint_bytes(shapes, dtype)
