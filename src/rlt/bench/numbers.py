"""Percentiles of measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` (0 to 100) of `values` do not exceed, with linear interpolation; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def tails_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds, for latencies."""
    return {name: round(percentile(seconds, p) * 1e3, 3) for name, p in (("p50", 50), ("p99", 99))}


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile in milliseconds, for repeated steps."""
    return {name: round(percentile(seconds, p) * 1e3, 3) for name, p in (("median", 50), ("p10", 10), ("p90", 90))}
