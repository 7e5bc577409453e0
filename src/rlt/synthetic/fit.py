"""Exits with an asked mean depth, out of what every loop made of every token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlt.depth.ouro import ouro_exit

#: Standard deviation of the gate's logits over tokens: at a mean of 2.5, depths spread about evenly over four loops.
GATE_STD = 1.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Depths of tokens."""

    mean: float
    #: share of tokens by depth, from 1 on
    shares: tuple[float, ...]


def spread(depths: Tensor, loops: int) -> Spread:
    """The distribution of depths [tokens]."""
    counts = torch.bincount(depths, minlength=loops + 1)[1:].double()
    return Spread(float(depths.double().mean()), tuple((counts / len(depths)).tolist()))


def fit_gate(rows: Tensor, weight: Tensor, mean: float, threshold: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gate weight [1, hidden] and bias [1], rounded to `dtype`, that give these rows the mean depth.

    `rows` are [loops, tokens, hidden]. The weight is `weight` [1, hidden] made so large that logits differ by
    `GATE_STD` between tokens.
    """
    logits = (rows @ weight[0])[:-1]
    scaled = (weight * (GATE_STD / logits.std())).to(dtype).float()

    def deeper(bias: float) -> bool:
        return float(gate_depths(rows, scaled, torch.tensor([bias]), threshold).double().mean()) > mean

    # More bias, fewer loops.
    bias = _turn(deeper, -60.0, 60.0)
    return scaled, torch.tensor([bias]).to(dtype).float()


def gate_depths(rows: Tensor, weight: Tensor, bias: Tensor, threshold: float) -> Tensor:
    """Loops [tokens] that Ouro's rule runs, of `rows` [loops, tokens, hidden]."""
    loops, tokens = rows.shape[:2]
    survival = torch.ones(tokens)
    ones = torch.ones(tokens, dtype=torch.int64)
    depths = ones * loops
    for loop, logit in enumerate((rows @ weight[0] + bias)[:-1], start=1):
        survival, stops = ouro_exit(logit, survival, ones * loop, torch.full((tokens,), threshold), ones)
        depths = torch.where(stops, depths.clamp(max=loop), depths)
    return depths


def fit_threshold(values: Tensor, mean: float) -> float:
    """The threshold of a criterion that gives `values` [loops, tokens] this mean depth, to three digits."""

    def deeper(exponent: float) -> bool:
        return float(criterion_depths(values, 10**exponent).double().mean()) > mean

    # A higher threshold, fewer loops.
    return float(f"{10 ** _turn(deeper, -6.0, 2.0):.3g}")


def criterion_depths(values: Tensor, threshold: float) -> Tensor:
    """Loops [tokens] until `values` [loops, tokens] are below the threshold for the first time, or all."""
    stops = values < threshold
    stops[-1] = True
    return stops.int().argmax(0) + 1


def _turn(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where `holds` turns from true to false, between `low` and `high`."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2
