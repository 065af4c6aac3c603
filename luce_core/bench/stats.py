"""Spreads and percentiles. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import floor

from attrs import frozen


@frozen
class Spread:
    """What repetitions gave."""

    median: float
    low: float
    high: float
    stddev: float | None
    """Of the sample (n - 1); None for a single value, which has none."""
    samples: tuple[float, ...]


def spread(values: Sequence[float]) -> Spread:
    """Of one or more values."""
    if not values:
        raise ValueError("no values, so no spread")
    return Spread(
        median=statistics.median(values),
        low=min(values),
        high=max(values),
        stddev=statistics.stdev(values) if len(values) > 1 else None,
        samples=tuple(values),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default: 0 is the least value, 100 the greatest."""
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = min(floor(place), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@frozen
class Percentiles:
    """What a server's latencies are told by."""

    p50: float
    p90: float
    p99: float


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """None of nothing."""
    if not values:
        return None
    return Percentiles(*(percentile(values, percent) for percent in (50, 90, 99)))
