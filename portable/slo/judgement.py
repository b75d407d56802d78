"""How an SLO is judged: by the bound of the confidence interval that is worse for the one who is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from portable.slo.objective import SLO
from portable.slo.statistics import Interval, bootstrap, ratio

MS = 1000.0


@dataclass(frozen=True)
class Judgement:
    """Whether a measurement meets an SLO.

    Attributes:
        slo: what was asked.
        value: what was measured, in the metric's unit; None where it could not be.
        met: True, False, or None where it could not be judged.
        reason: one clause with the figures.
        limit_s: the limit as seconds per call, where the metric is a latency or can be said as one.
        badness: value over limit (limit over value for "roofline"); above 1 the median misses.
    """

    slo: SLO
    value: Interval | None
    met: bool | None
    reason: str
    limit_s: float | None = None
    badness: float = 0.0

    @property
    def figures(self) -> str:
        """The reason without the verdict: ``1.14 × eager [1.13, 1.15]``."""
        return self.reason.rpartition(": ")[2]

    def bounds(self) -> tuple[float, float]:
        """Badness at the better and at the worse end of the interval; nothing is known where it could not be judged."""
        if self.value is None:
            return 0.0, float("inf")
        if self.slo.metric == "roofline":
            return self.slo.limit / self.value.high, self.slo.limit / self.value.low
        return self.value.low / self.slo.limit, self.value.high / self.slo.limit


def best_native(samples_s: Mapping[str, Sequence[float]], names: Sequence[str] = ("eager", "inductor")) -> str | None:
    """The name of the fastest baseline among those measured, by median; None where there is none."""
    measured = [name for name in names if samples_s.get(name)]
    return min(measured, key=lambda name: bootstrap(samples_s[name]).median) if measured else None


def judge(
    slo: SLO,
    samples_s: Mapping[str, Sequence[float]],
    *,
    subject: str = "portable",
    ideal_s: float | None = None,
    peak_mb: float | None = None,
) -> Judgement:
    """Judge ``subject`` by one interleaved run.

    Args:
        samples_s: seconds per call, one a round, by name: ``subject`` and the baselines.
        ideal_s: seconds that the machine's peak allows, for metric "roofline".
        peak_mb: peak memory of a call of ``subject``, for metric "peak_mb".
    """
    own = samples_s[subject]
    if slo.metric in ("p50_ms", "p99_ms"):
        value = bootstrap(own, quantile=0.5 if slo.metric == "p50_ms" else 0.99).scaled(MS)
        return _at_most(slo, value, "ms", slo.limit / MS)
    if slo.metric == "ratio":
        baseline = best_native(samples_s) if slo.baseline == "best_native" else slo.baseline
        if baseline is None or not samples_s.get(baseline):
            return Judgement(slo, None, None, f"baseline {slo.baseline.replace('_', ' ')} was not measured")
        limit_s = slo.limit * bootstrap(samples_s[baseline]).median
        return _at_most(slo, ratio(own, samples_s[baseline]), f"× {baseline}", limit_s)
    if slo.metric == "peak_mb":
        if peak_mb is None:
            return Judgement(slo, None, None, "peak memory was not measured")
        return _at_most(slo, Interval(peak_mb, peak_mb, peak_mb), "MB", None)
    return _of_roofline(slo, own, ideal_s)


def _of_roofline(slo: SLO, own: Sequence[float], ideal_s: float | None) -> Judgement:
    if not ideal_s:
        return Judgement(slo, None, None, "the machine's peak was not measured")
    time = bootstrap(own)
    value = Interval(ideal_s / time.median, ideal_s / time.high, ideal_s / time.low if time.low else float("inf"))
    met = value.low >= slo.limit
    reason = f"{'meets' if met else 'misses'} {slo}: {value.median:.0%} [{value.low:.0%}, {value.high:.0%}]"
    return Judgement(slo, value, met, reason, ideal_s / slo.limit, slo.limit / value.median)


def _at_most(slo: SLO, value: Interval, unit: str, limit_s: float | None) -> Judgement:
    met = value.high <= slo.limit
    figures = f"{value.median:.3g} {unit} [{value.low:.3g}, {value.high:.3g}]"
    return Judgement(
        slo, value, met, f"{'meets' if met else 'misses'} {slo}: {figures}", limit_s, value.median / slo.limit
    )
