"""The Muon optimizer: momentum whose step is orthogonalised, so that every direction of a matrix moves equally far."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalise(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Push the singular values of [N, rows, columns] towards 1 by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if tall else matrices
    if x.is_cuda:
        x = x.to(torch.bfloat16)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon:
    """Muon over matrices; those of one shape are stacked, so a step takes few launches for any number of layers."""

    def __init__(self, matrices: Iterable[Tensor], momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        self.groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            self.groups[matrix.shape].append(matrix)
        self.averages = {shape: torch.zeros_like(torch.stack(group)) for shape, group in self.groups.items()}
        self.momentum = momentum
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update; its size is scaled to that of AdamW, so both share a learning rate. Clears the gradients."""
        for shape, group in self.groups.items():
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            average = self.averages[shape].lerp_(gradient, 1 - self.momentum)
            updates = orthogonalise(gradient.lerp(average, self.momentum))
            for p, update in zip(group, updates, strict=True):
                p.mul_(1 - lr * self.weight_decay).add_(update, alpha=-0.2 * lr * max(shape) ** 0.5)
                p.grad = None
