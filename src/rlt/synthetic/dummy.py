"""A model whose weights are made while it is opened: speed can be measured without a checkpoint's weights."""

from __future__ import annotations

import torch

from rlt.models.interface import LoopedModel
from rlt.models.loader import checkpoint_bytes
from rlt.models.ops import TORCH, Ops
from rlt.models.registry import MATHS
from rlt.models.spec import ModelSpec
from rlt.progress import Progress
from rlt.synthetic.weights import Weights

SEED = 0


def dummy_model(
    spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, ops: Ops = TORCH, progress: Progress | None = None
) -> LoopedModel:
    """The model of `spec` with the weights that `rlt make-checkpoint --seed 0` writes unless told what to reach.

    They are made in pieces and rounded to `dtype` once, so the host needs little memory beside the model's.
    """
    weights, maths = Weights(spec, SEED), MATHS[spec.family]
    total, done = checkpoint_bytes(weights.shapes, dtype), 0
    tensors = {}
    for name, shape in weights.shapes.items():
        tensor = tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        flat, place = tensor.view(-1), 0
        for block in weights.blocks(name):
            flat[place : place + block.numel()] = block.flatten().to(device)
            place += block.numel()
        assert place == flat.numel(), name
        done += tensor.nbytes
        if progress is not None:
            progress(name, done / total)
    return maths.build(spec, tensors, ops)
