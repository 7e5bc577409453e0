"""Where kernels run: compiled on a CUDA device, else in Triton's interpreter, which knows float32 only."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    #: of results of size 1 that went through sums and exponentials
    tolerance: float

    @property
    def interpreted(self) -> bool:
        return self.device.type == "cpu"

    def normal(self, *shape: int, seed: int) -> Tensor:
        """Standard normal numbers, the same on every device but for the rounding to the dtype."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)

    def spread(self, *shape: int, fill: float = torch.nan) -> Tensor:
        """A tensor of `fill` with gaps of NaN between its rows and its entries' last dimension of stride 1."""
        wide = torch.full((*shape[:-1], shape[-1] + 16), torch.nan, device=self.device, dtype=self.dtype)
        view = wide[..., : shape[-1]]
        view.fill_(fill)
        return view

    def close(self, got: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(got.double().cpu(), wanted.double().cpu(), rtol=self.tolerance, atol=self.tolerance)
