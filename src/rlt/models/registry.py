"""From a model name to a model that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rlt.errors import ModelError
from rlt.models import huginn, nanbeige, ouro
from rlt.models.interface import LoopedModel
from rlt.models.layers import ignorable
from rlt.models.loader import check_tensors, checkpoint_bytes, load_tensors
from rlt.models.ops import TORCH, Ops
from rlt.models.spec import ModelSpec
from rlt.progress import Progress


class Maths(NamedTuple):
    """A family's maths: the tensors that it takes, and the model that it makes of them."""

    shapes: Callable[[ModelSpec], dict[str, tuple[int, ...]]]
    #: may take tensors out of the dict, which is not used afterwards
    build: Callable[[ModelSpec, dict[str, Tensor], Ops], LoopedModel]
    #: tensors that are read and compared, and take no memory afterwards
    derived: tuple[str, ...] = ()


#: by the families of `rlt.models.families`
MATHS = {
    "ouro": Maths(ouro.tensor_shapes, ouro.Ouro),
    "huginn": Maths(huginn.tensor_shapes, huginn.Huginn, huginn.DERIVED),
    "nanbeige": Maths(nanbeige.tensor_shapes, nanbeige.Nanbeige),
}


def load_model(
    directory: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops = TORCH,
    progress: Progress | None = None,
) -> LoopedModel:
    """Load the checkpoint in `directory` to `device`; its layers compute with `ops`, which must run there.

    Raises `ModelError` when its tensors are not those of `spec`.
    """
    maths = MATHS[spec.family]
    tensors = load_tensors(
        directory, maths.shapes(spec), dtype=dtype, device=device, ignore=ignorable, progress=progress
    )
    try:
        return maths.build(spec, tensors, ops)
    except ModelError as error:
        raise ModelError(f"{directory}: {error}") from error


def check_model(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Check the checkpoint's headers against `spec` without loading it; the bytes its weights take as `dtype`.

    What is only compared while loading is not counted. Raises `ModelError`.
    """
    check_tensors(directory, MATHS[spec.family].shapes(spec), ignore=ignorable)
    return model_bytes(spec, dtype)


def model_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the weights as `dtype`, by their shapes; what is only compared while loading is not counted."""
    maths = MATHS[spec.family]
    shapes = maths.shapes(spec)
    return checkpoint_bytes({name: shape for name, shape in shapes.items() if name not in maths.derived}, dtype)
