"""How rows read, in the terminal and in the report alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from portable.slo.statistics import Interval

from .runner import Row

LEGEND = (
    "[low, high] is the 95 % interval of the figure before it. An SLO is met only if the whole interval meets it; "
    "one that is a ratio is shown as the time that it allows. What was decided before stands until the whole interval "
    "misses its SLO by more than 10 %."
)


def seconds(value: float | None) -> str:
    """A latency in ms (µs below a hundredth of one), with three figures."""
    if value is None:
        return "–"
    ms = 1e3 * value
    return f"{1e3 * ms:.3g} µs" if ms < 0.01 else f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def spread(interval: Interval) -> str:
    """A latency with half its interval's width: ``24.1 ms ±0.6``."""
    if interval.high == float("inf"):
        return f"{seconds(interval.median)} ±?"
    half, ms = 1e3 * interval.half_width, 1e3 * interval.median
    return f"{seconds(interval.median)} ±{1e3 * half if ms < 0.01 else half:.2g}"


def limit(row: Row) -> str:
    """The SLO as a latency where it can be said as one, else as it is written."""
    if row.slo is None:
        return "none"
    if row.judgement is not None and row.judgement.limit_s is not None:
        return seconds(row.judgement.limit_s)
    return str(row.slo)


def decision(row: Row) -> str:
    """What is used and why, in one line."""
    if row.state == "met":
        return "portable ✓"
    if row.state == "kernel":
        took = row.kernel_figures or (seconds(row.kernel_s.median) if row.kernel_s else "")
        return f"kernel {row.provider}  {took}  ✓"
    if row.state == "unjudged":
        return f"portable, unjudged: {row.reason}"
    label = {"unmet": "UNMET", "wrong": "WRONG", "failed": "FAILED"}[row.state]
    return f"{label}: {row.reason.removeprefix(f'misses {row.slo}: ')}"


def tally(rows: Sequence[Row]) -> str:
    """``12 met · 3 met by a kernel · 1 UNMET``: the states that occur."""
    words = {
        "met": "met",
        "kernel": "met by a kernel",
        "unjudged": "without an SLO that could be judged",
        "unmet": "UNMET",
        "wrong": "WRONG",
        "failed": "FAILED",
    }
    counts: Counter[str] = Counter(row.state for row in rows)
    return (
        " · ".join(f"{counts[state]} {word}" for state, word in words.items() if counts[state])
        or "nothing was measured"
    )
