"""Ouro's learned exit: stop when the accumulated probability of having stopped reaches the threshold."""

from __future__ import annotations

import torch
from torch import Tensor


def ouro_exit(
    gate_logit: Tensor, survival: Tensor, loops: Tensor, threshold: Tensor, min_loops: Tensor
) -> tuple[Tensor, Tensor]:
    """Which rows reach the threshold with their `loops`-th loop.

    All inputs are [rows]: `gate_logit`, `survival` (of the loops before, 1 at the start) and `threshold` are float32,
    `loops` (executed so far, this one included) and `min_loops` are int64. Returns the new survival and a bool mask.
    Hazard = sigmoid(gate), survival = prod(1 - hazard), CDF = 1 - survival; a row stops at the first loop >= min_loops
    with CDF >= threshold (Ouro, arXiv 2510.25741), or at its loop limit, whose own gate is ignored: the caller's part.
    A threshold of 1 or more never stops early, also where the CDF rounds to 1.
    """
    # sigmoid(-g) is 1 - sigmoid(g) without losing the small end.
    survival = survival * torch.sigmoid(-gate_logit)
    return survival, (1.0 - survival >= threshold) & (threshold < 1.0) & (loops >= min_loops)
