"""From logits to token ids, row by row: no row's result depends on its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from rlt.exec.rng import uniform


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """Return one token id (int64) per row of `logits` [rows, vocab] (float32).

    The other tensors are [rows]. Temperature 0 takes the largest logit. Otherwise the filters work on the tempered
    distribution in the order top-k (0: off), top-p (the token that crosses stays in), min-p, and one uniform number
    keyed by (seed, position) picks from what is left.
    """
    tokens = logits.argmax(-1)
    drawn = (temperature > 0).nonzero()[:, 0]
    if len(drawn) == 0:
        return tokens
    row = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "position": position,
    }
    row = {name: value[drawn] for name, value in row.items()}
    # The largest logit first becomes 0: divided by a tiny temperature, others may overflow, but only downwards.
    lowered = logits[drawn] - logits[drawn].amax(-1, keepdim=True)
    probs = torch.softmax(lowered / row["temperature"][:, None], -1).double()
    u = uniform(row["seed"], row["position"])
    filtered = (row["top_k"] > 0) | (row["top_p"] < 1) | (row["min_p"] > 0)
    picked = torch.empty_like(drawn)
    # Sorting is only paid for by rows that need it; a row takes the same path in every batch.
    plain, sorted_ = (~filtered).nonzero()[:, 0], filtered.nonzero()[:, 0]
    if len(plain):
        picked[plain] = _invert(probs[plain], u[plain])
    if len(sorted_):
        ordered, order = probs[sorted_].sort(dim=-1, descending=True, stable=True)
        kept = _filter(ordered, row["top_k"][sorted_], row["top_p"][sorted_].double(), row["min_p"][sorted_].double())
        rank = _invert(ordered * kept, u[sorted_])
        picked[sorted_] = order.gather(1, rank[:, None])[:, 0]
    return tokens.index_copy(0, drawn, picked)


def _filter(ordered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Mask of the kept entries of `ordered` [rows, vocab], probabilities in descending order."""
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    kept = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    mass = (ordered * kept).cumsum(-1)
    before = mass - ordered
    kept &= (before < top_p[:, None] * mass[:, -1:]) | (top_p[:, None] >= 1)
    kept &= ordered >= min_p[:, None] * ordered[:, :1]
    kept[:, 0] = True
    return kept


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """Index of the entry at share `u` [rows] of the cumulated `weights` [rows, n]; never one of weight 0."""
    cumulated = weights.cumsum(-1)
    target = u[:, None] * cumulated[:, -1:]
    index = torch.searchsorted(cumulated, target, right=True)[:, 0]
    # u < 1, but the product may round up to the total: then the last entry with weight is meant.
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    return torch.minimum(index, last)
