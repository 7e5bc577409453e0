"""Exit criteria of models without a learned gate: how much the last loop still changed a row.

The formulas are those of Huginn's published generation code (arXiv 2502.05171); everything is float32 and per row, so
a row's value does not depend on its neighbours. A step takes what the last loop made of each row, and what the
criterion carried from its look before, and returns the values [rows] and what to carry on. Some look at states
[rows, hidden], which are raw core outputs; the others at logits [rows, vocab] of coda and head run on those states.
Default thresholds are in `rlt.depth.table`, under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

#: (states or logits, carried) -> (values [rows] float32, carried)
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

#: Probabilities below this share of the largest count as unlikely in `minp_kl`.
MIN_P = 0.1


class Criterion(NamedTuple):
    """A criterion and when it says that a row may stop."""

    step: Step
    #: (initial states [rows, hidden], vocab) -> carried before the first loop, [rows, ...]
    begin: Callable[[Tensor, int], Tensor]
    #: stop at values of at least the threshold, and not below it
    at_least: bool = False

    def stops(self, values: Tensor, threshold: float | Tensor) -> Tensor:
        """Mask [rows]; a value that is not a number never stops a row, nor does a threshold of 0 that must be undercut
        (a rounded divergence may be slightly negative)."""
        return values >= threshold if self.at_least else (values < threshold) & (threshold > 0)


def latent_diff(states: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """|s - s_previous| / |s|, L2 over features. Carries the states, which start at the initial ones."""
    now = states.float()
    return (now - previous.float()).norm(dim=-1) / now.norm(dim=-1), states


def cosine(states: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """1 - cosine of the angle between s and s_previous: 0/0, not a number, after an initial state of zeros."""
    now, before = states.float(), previous.float()
    return 1.0 - (now * before).sum(-1) / (now.norm(dim=-1) * before.norm(dim=-1)), states


def entropy(logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """|H - H_previous| of the distributions, in nats. Carries H [rows], which starts at 100, so the first is large."""
    probabilities = logits.float().softmax(-1)
    # The published code adds the 1e-10 to the logarithm's argument.
    now = -(probabilities * (probabilities + 1e-10).log()).sum(-1)
    return (now - previous).abs(), now


def kl(logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """KL(P_previous || P) in nats. Carries log P [rows, vocab], which starts uniform."""
    return _divergence(log_softmax(logits.float(), -1), previous)


def minp_kl(logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """`kl` with every probability below `MIN_P` times the row's largest set to 1 / vocab, and the sum to 1 again.

    It jumps where a probability crosses that limit.
    """
    probabilities = logits.float().softmax(-1)
    unlikely = probabilities < MIN_P * probabilities.amax(-1, keepdim=True)
    flat = probabilities.masked_fill(unlikely, 1.0 / logits.shape[-1])
    return _divergence((flat / flat.sum(-1, keepdim=True)).log(), previous)


def argmax(logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """For how many loops the best token has not changed. Carries (best token, count) [rows, 2], int64."""
    best = logits.argmax(-1)
    count = torch.where(best == previous[:, 0], previous[:, 1] + 1, 0)
    return count.float(), torch.stack([best, count], -1)


def _divergence(log_now: Tensor, log_before: Tensor) -> tuple[Tensor, Tensor]:
    return (log_before.exp() * (log_before - log_now)).sum(-1), log_now


def _states(states: Tensor, vocab: int) -> Tensor:
    return states


def _uniform(states: Tensor, vocab: int) -> Tensor:
    return torch.full((len(states), vocab), -math.log(vocab), device=states.device)


def _high(states: Tensor, vocab: int) -> Tensor:
    return torch.full((len(states),), 100.0, device=states.device)


def _no_token(states: Tensor, vocab: int) -> Tensor:
    return torch.tensor([-1, 0], device=states.device).repeat(len(states), 1)


#: by name
CRITERIA = {
    "latent_diff": Criterion(latent_diff, _states),
    "cosine": Criterion(cosine, _states),
    "entropy": Criterion(entropy, _high),
    "kl": Criterion(kl, _uniform),
    "minp_kl": Criterion(minp_kl, _uniform),
    "argmax": Criterion(argmax, _no_token, at_least=True),
}
