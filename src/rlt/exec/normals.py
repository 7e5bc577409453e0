"""Normal numbers from the counter-based generator: the same for (seed, position) in any batch and in any chunk."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlt.exec.rng import PURPOSE_STATE, philox

_MASK = 0xFFFFFFFF


def normals(seed: Tensor, position: Tensor, count: int, purpose: int = PURPOSE_STATE, cut: float = 3.0) -> Tensor:
    """`count` draws per row, [rows, count] float64, of a standard normal variable conditioned on |x| <= `cut`.

    `seed` and `position` are [rows], int64. Draw i of a row depends on (seed, position, purpose, i) alone: it is word
    i % 4 of Philox at counter (position, purpose, i // 4), put through the inverse of the cumulated distribution, so
    nothing is drawn twice and `count` only says where to stop.
    """
    blocks = torch.arange(-(-count // 4), device=seed.device).expand(len(seed), -1)
    row, zero = position[:, None], torch.zeros_like(blocks)
    words = philox(
        (zero + (row & _MASK), zero + ((row >> 32) & _MASK), zero + purpose, blocks),
        (zero + (seed[:, None] & _MASK), zero + ((seed[:, None] >> 32) & _MASK)),
    )
    # The middle of each of 2**32 equal steps of (-1, 1), never an end.
    share = (torch.stack(words, -1).flatten(1)[:, :count].double() + 0.5) * 2.0**-31 - 1.0
    return math.sqrt(2.0) * torch.erfinv(share * math.erf(cut / math.sqrt(2.0)))
