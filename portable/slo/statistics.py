"""Confidence intervals of latencies, and comparisons that the noise cannot decide.

Latencies are skewed and heavy-tailed, so everything here is about medians and their bootstrap intervals (Efron 1979);
nothing is discarded as an outlier. Two functions are compared by the ratio within each interleaved round, which takes
out what slowed both.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RESAMPLES = 2000
_SEED = 20


@dataclass(frozen=True)
class Interval:
    """A median (or another statistic) and the confidence interval around it, in the unit of the samples."""

    median: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """The interval in another unit: every bound times ``factor`` (positive)."""
        return Interval(self.median * factor, self.low * factor, self.high * factor)

    @property
    def half_width(self) -> float:
        """Half the interval's width: what ± shows."""
        return (self.high - self.low) / 2


def bootstrap(samples_s: Sequence[float], confidence: float = 0.95, *, quantile: float = 0.5) -> Interval:
    """The median of ``samples_s`` (or another quantile) with its percentile-bootstrap interval.

    The same samples give the same interval. One sample says nothing about the spread: its interval is [0, ∞).

    Raises:
        ValueError: no samples, or one that is not finite.
    """
    import numpy as np

    values = np.asarray(samples_s, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"bootstrap needs finite samples, not {list(samples_s)!r}")
    middle = float(np.quantile(values, quantile))
    if values.size == 1:
        return Interval(middle, 0.0, float("inf"))
    if values.min() == values.max():
        return Interval(middle, middle, middle)
    from scipy import stats

    found = stats.bootstrap(
        (values,),
        functools.partial(_quantile, quantile=quantile),
        confidence_level=confidence,
        n_resamples=RESAMPLES,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return Interval(middle, min(float(found.low), middle), max(float(found.high), middle))


def ratio(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Interval:
    """How long ``a`` takes relative to ``b``: the median of the ratios within each round, with its interval.

    Args:
        a, b: seconds per call, one a round, of the same rounds of one interleaved run.

    Raises:
        ValueError: the lengths differ, or a sample is not positive and finite.
    """
    if len(a) != len(b):
        raise ValueError(f"ratio pairs rounds: {len(a)} and {len(b)} samples are not from the same rounds")
    if any(y <= 0 for y in b):
        raise ValueError("ratio needs positive samples")
    return bootstrap([x / y for x, y in zip(a, b, strict=True)], confidence)


def beats(candidate: Sequence[float], portable: Sequence[float]) -> bool:
    """Whether ``candidate`` is faster than ``portable`` beyond the noise: the upper bound of their ratio is below 1."""
    return ratio(candidate, portable).high < 1


def _quantile(samples: Any, axis: int = -1, *, quantile: float) -> Any:
    import numpy as np

    return np.quantile(samples, quantile, axis=axis)
