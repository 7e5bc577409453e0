"""Finds the weights that give the asked agreement and mean depth, by measuring.

*Agreement*: the share of tokens whose best next token after `Shape.shallow` loops is also that of full depth. *Depth*:
the loops of each token under the family's rule, Ouro's gate at `EXIT_THRESHOLD`, or Huginn's `latent_diff` at the
threshold that is found. Both are measured over random tokens, all of which run all loops, as in a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlt.depth.criteria import latent_diff
from rlt.errors import RltError
from rlt.synthetic.fit import Spread, criterion_depths, fit_gate, fit_threshold, gate_depths, spread
from rlt.synthetic.forward import Files, best_tokens, pass_flops, run
from rlt.synthetic.shapes import EXIT_THRESHOLD, Shape
from rlt.synthetic.weights import GATE

#: How far from the asked agreement is near enough.
TOLERANCE = 0.01

#: positions of a calibration sequence
SEQUENCE = 64

#: where the search for the branches' scale begins
START = 0.5

#: in the search for an agreement
MOST_PASSES = 12
_SCALES = (2.0**-12, 2.0**6)

#: (pass, share of it that is done)
Progress = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What calibration aims at, over how many random tokens."""

    agreement: float | None = None
    mean_depth: float | None = None
    tokens: int = 512


class Measured(NamedTuple):
    """One run over the calibration tokens."""

    agreement: float
    #: rows after each loop [loops, tokens, hidden] (Ouro), or `latent_diff` after each loop [loops, tokens] (Huginn)
    trail: Tensor


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What was measured with the weights that were found."""

    shallow: int
    agreement: float
    tokens: int
    passes: int
    #: depths under the family's rule at `threshold`, where a mean depth was asked for
    depths: Spread | None = None
    threshold: float | None = None
    #: what the engine must be set to for that, `section.key=value`; nothing where the checkpoint says it all
    settings: tuple[str, ...] = ()


def calibrate(files: Files, shape: Shape, wanted: Wanted, progress: Progress) -> Calibrated:
    """Set the scale and the gate of `files.weights`. Raises `RltError` if what is asked is not reached."""
    weights, spec = files.weights, files.weights.spec
    sequences = max(1, wanted.tokens // SEQUENCE)
    length = min(SEQUENCE, wanted.tokens)
    generator = torch.Generator().manual_seed(weights.seed_of("calibration"))
    tokens = torch.randint(shape.tokens.known, (sequences * length,), generator=generator)
    passes = 0

    def measure(scale: float) -> Measured:
        nonlocal passes
        passes += 1
        weights.scale = scale
        best: dict[int, Tensor] = {}
        trail: list[Tensor] = []
        before = torch.empty(0)

        def seen(loop: int, rows: Tensor, head_rows: Callable[[], Tensor]) -> None:
            nonlocal before
            if loop in (shape.shallow, shape.loops):
                best[loop] = best_tokens(files, head_rows(), shape.tokens.known)
            if spec.family == "huginn" and loop:
                trail.append(latent_diff(rows, before)[0].cpu())
            elif spec.family == "ouro":
                trail.append(rows.float().cpu())
            before = rows
            progress(passes, loop / shape.loops)

        run(spec, files, tokens, sequences, seen)
        same = (best[shape.shallow] == best[shape.loops]).double().mean()
        return Measured(float(same), torch.stack(trail) if trail else torch.empty(0))

    with torch.inference_mode():
        if wanted.agreement is None:
            found = measure(weights.scale)
        else:
            weights.scale, found = find_scale(measure, wanted.agreement, START)
    result = Calibrated(shape.shallow, found.agreement, len(tokens), passes)
    if wanted.mean_depth is None:
        return result
    depths, threshold = _set_exits(files, found.trail, wanted.mean_depth)
    settings: tuple[str, ...] = ()
    if spec.family == "huginn":
        # From states of zeros every first loop changes everything, so depths would be others.
        settings = ("exit.rule=latent_diff", f"exit.threshold={threshold:g}", "model.initial_state=seeded")
    return replace(result, depths=spread(depths, shape.loops), threshold=threshold, settings=settings)


def _set_exits(files: Files, trail: Tensor, mean: float) -> tuple[Tensor, float]:
    """Depths of the calibration tokens, near the asked mean, and the threshold that they belong to."""
    weights = files.weights
    if weights.spec.family == "huginn":
        threshold = fit_threshold(trail, mean)
        return criterion_depths(trail, threshold), threshold
    weight = weights.whole(f"{GATE}.weight")
    weight, bias = fit_gate(trail, weight, mean, EXIT_THRESHOLD, files.disk_dtype)
    weights.found |= {f"{GATE}.weight": weight, f"{GATE}.bias": bias}
    return gate_depths(trail, weight, bias, EXIT_THRESHOLD), EXIT_THRESHOLD


def find_scale(measure: Callable[[float], Measured], asked: float, start: float) -> tuple[float, Measured]:
    """The branches' scale at which `measure` has the asked agreement, and what it measured there.

    Agreement falls as the scale grows. Raises `RltError` if no scale is near enough.
    """
    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None
    scale, results = start, dict[float, Measured]()
    while len(results) < MOST_PASSES and _SCALES[0] <= scale <= _SCALES[1]:
        now = (results.setdefault(scale, measure(scale))).agreement
        if abs(now - asked) <= TOLERANCE:
            break
        low, high = ((scale, now), high) if now > asked else (low, (scale, now))
        if low is None or high is None:
            scale *= 4.0 if high is None else 0.25
            continue
        share = (low[1] - asked) / (low[1] - high[1])
        # Never so close to an end that the next step learns nothing.
        scale = low[0] * (high[0] / low[0]) ** min(max(share, 0.2), 0.8)
    best = min(results, key=lambda tried: abs(results[tried].agreement - asked))
    if abs(results[best].agreement - asked) > 3 * TOLERANCE:
        raise RltError(
            f"--agreement {asked:g} is not reached: the nearest of {len(results)} measurements is "
            f"{results[best].agreement:.3f}; try another value, more --calibration-tokens or another --seed"
        )
    return best, results[best]


def seconds_per_pass(files: Files, shape: Shape, tokens: int) -> float:
    """About how long one measurement takes, from its arithmetic and a timed product."""
    rows = torch.ones(min(tokens, 512), 2048, dtype=files.dtype, device=files.device)
    matrix = torch.ones(8192, 2048, dtype=files.dtype, device=files.device)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        float(linear(rows, matrix)[0, 0])
        best = min(best, time.perf_counter() - start)
    return tokens * pass_flops(files.weights) * best / (2 * rows.numel() * len(matrix))
