"""The operations of layers by the kernels, for models on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rlt.kernels.activation import silu_mul
from rlt.kernels.available import multiprocessors
from rlt.kernels.linear import MOST_ROWS, linear_plan, skinny_linear, split_workspace
from rlt.kernels.norms import add_rms_norm, rms_norm
from rlt.models.ops import Placement


class TritonOps:
    """See `rlt.models.ops.Ops`. For calls on one stream: they share a workspace."""

    def __init__(self, device: torch.device) -> None:
        self._multiprocessors = multiprocessors(device)
        self._workspace = split_workspace(self._multiprocessors, device)

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        count, (outputs, inner) = len(rows), weight.shape
        if not 0 < count <= MOST_ROWS:
            return functional.linear(rows, weight)
        out = rows.new_empty(count, outputs)
        plan = linear_plan(count, outputs, inner, self._multiprocessors)
        skinny_linear(rows, weight, out, self._workspace, plan=plan)
        return out

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = rows.new_empty(rows.shape)
        rms_norm(rows, weight, out, eps=eps)
        return out

    def add_norm(
        self,
        residual: Tensor,
        branch: Tensor,
        placement: Placement,
        branch_weight: Tensor | None,
        out_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        new = residual.new_empty(residual.shape)
        out = None if out_weight is None else residual.new_empty(residual.shape)
        add_rms_norm(
            residual,
            branch,
            new,
            out,
            placement=placement,
            branch_weight=branch_weight,
            out_weight=out_weight,
            eps=eps,
        )
        return new, new if out is None else out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        silu_mul(gate_up, out)
        return out
