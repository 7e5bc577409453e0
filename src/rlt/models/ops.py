"""The operations of layers that have several implementations. `TorchOps` is their definition."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rlt.errors import ConfigError
from rlt.kernels.available import obstacle_on

#: What becomes of a branch (the output of attention or of an MLP): residual + branch; residual + norm(branch);
#: norm(residual + branch).
Placement = Literal["plain", "branch", "sum"]


class Ops(Protocol):
    """Functions of rows [rows, width] in the model's dtype, which leave their arguments as they are."""

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """`rows` times the transposed `weight` [outputs, width]: [rows, outputs]."""
        ...

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension: rms in float32, the product in the rows' dtype."""
        ...

    def add_norm(
        self,
        residual: Tensor,
        branch: Tensor,
        placement: Placement,
        branch_weight: Tensor | None,
        out_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """The new residual and its norm with `out_weight`; without that weight, the new residual twice.

        `branch_weight` is that of the norm inside of placements "branch" and "sum"; "plain" has none.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [rows, inner], of [rows, 2 * inner], whose first half is the gate."""
        ...


class TorchOps:
    """In plain torch operations; see `Ops`."""

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(rows, weight)

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        if rows.dtype == torch.float32:
            return functional.rms_norm(rows, weight.shape, weight, eps)
        wide = rows.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return scaled.to(rows.dtype) * weight

    def add_norm(
        self,
        residual: Tensor,
        branch: Tensor,
        placement: Placement,
        branch_weight: Tensor | None,
        out_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        if placement == "branch":
            assert branch_weight is not None
            branch = self.rms_norm(branch, branch_weight, eps)
        new = residual + branch
        if placement == "sum":
            assert branch_weight is not None
            new = self.rms_norm(new, branch_weight, eps)
        return new, new if out_weight is None else self.rms_norm(new, out_weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


TORCH = TorchOps()


def choose_ops(name: Literal["auto", "torch", "triton"], device: torch.device, dtype: torch.dtype) -> Ops:
    """The operations that `engine.kernels` means; "auto" are torch's, as in `rlt.attention.backends`.

    Raises `ConfigError` when "triton" cannot run.
    """
    if name != "triton":
        return TORCH
    why = obstacle_on(device, dtype)
    if why is not None:
        raise ConfigError([f'engine.kernels = "{name}" cannot run on {device}: {why}'])
    from rlt.kernels.ops import TritonOps

    return TritonOps(device)
