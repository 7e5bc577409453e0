"""A counter-based generator: the draw for (seed, position) is the same in any batch, on any device, at any time."""

from __future__ import annotations

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox 4x32 with 10 rounds (Salmon et al., SC 2011): four words from a counter of four and a key of two.

    All words are int64 tensors of one shape that hold values 0 <= w < 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2**64, so their low and high halves are those of the unsigned product.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


#: what a draw is for: a token, or the state that a token starts from; different purposes never share a number
PURPOSE_SAMPLE, PURPOSE_STATE = 0, 1


def uniform(seed: Tensor, position: Tensor, purpose: int = PURPOSE_SAMPLE) -> Tensor:
    """Return float64 uniforms in [0, 1) with 53 random bits, keyed by (seed, position, purpose); shapes as `seed`."""
    zero = torch.zeros_like(position)
    words = philox(
        (position & _MASK, (position >> 32) & _MASK, zero + purpose, zero), (seed & _MASK, (seed >> 32) & _MASK)
    )
    return ((words[0] << 21) ^ (words[1] >> 11)).double() * 2.0**-53
