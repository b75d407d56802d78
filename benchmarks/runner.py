"""Run a suite: measure each workload, judge its SLO, let the gate decide, and yield each row as soon as it is known."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from portable.slo.judgement import Judgement, best_native, judge
from portable.slo.objective import SLO, slo_for
from portable.slo.statistics import Interval, bootstrap, ratio

from .measurement import BASELINES, Measurement, measure
from .roofline import Peak
from .workloads import Workload

State = Literal["met", "kernel", "unmet", "unjudged", "wrong", "failed"]
BUDGET_S = {"quick": 115.0, "ops": 600.0, "models": 240.0, "all": 840.0}
MIN_ROUNDS = 7
_WORST_FIRST: tuple[State, ...] = ("failed", "wrong", "unmet", "kernel", "met", "unjudged")


class Outcome(Protocol):
    """What a gate says of one workload.

    Attributes:
        provider: what is used from now on: "portable", or the provider of a kernel that won.
        interval: seconds per call of that kernel; None where the portable path stays.
        reason: why, candidates that were rejected included; one line.
        figures: of the kernel that won.
        met: whether the SLO is met now; None where the row's own judgement says so.
        samples_s: what that was judged on, where not the row's own samples.
    """

    provider: str
    interval: Interval | None
    reason: str
    met: bool | None
    figures: str
    samples_s: Mapping[str, Sequence[float]]


Gate = Callable[..., Outcome | None]


@dataclass
class Row:
    """The result of one workload.

    Attributes:
        state: "met" (by the portable path), "kernel" (met by one), "unmet", "unjudged" (no SLO), "wrong" or "failed".
        provider: what is used from now on: "portable" or a kernel's provider.
        reason: why, with figures.
        samples_s: seconds per call, one a round, by name.
        latency_s, p99_s: of each name in ``samples_s``, with intervals.
        kernel_s: of the kernel that won.
        kernel_figures: of the same, in the SLO's metric and of the run that it was tried in.
        ratios: the portable path's time over each baseline's.
        roofline: fraction of the machine's peak that the portable path reaches, at its median; None where unknown.
    """

    workload: str
    op: str
    model: str
    backend: str
    backward: bool
    state: State
    provider: str = "portable"
    reason: str = ""
    slo: SLO | None = None
    judgement: Judgement | None = None
    samples_s: dict[str, list[float]] = field(default_factory=dict)
    latency_s: dict[str, Interval] = field(default_factory=dict)
    p99_s: dict[str, float] = field(default_factory=dict)
    kernel_s: Interval | None = None
    kernel_figures: str = ""
    ratios: dict[str, Interval] = field(default_factory=dict)
    best_native: str | None = None
    compile_s: dict[str, float] = field(default_factory=dict)
    peak_mb: dict[str, float] = field(default_factory=dict)
    flops: int = 0
    moved: int = 0
    ideal_s: float | None = None
    roofline: float | None = None
    notes: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def rank(self) -> tuple[int, float]:
        """Sorts rows worst first."""
        badness = self.judgement.badness if self.judgement else 0.0
        return _WORST_FIRST.index(self.state), -badness

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in results.json."""
        return asdict(self)


def run(
    workloads: Sequence[Workload],
    backend: str,
    slos: Mapping[str, SLO],
    *,
    budget_s: float,
    compare: Sequence[str] = BASELINES,
    gate: Gate | None = None,
    peak: Peak | None = None,
    min_rounds: int = MIN_ROUNDS,
    measurer: Callable[..., Measurement] = measure,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Row]:
    """Measure ``workloads`` on ``backend`` and yield a row for each, in their order.

    Each workload gets an equal share of the time that is left. Where that is less than twice the longest compilation by
    Inductor so far, its first apart, Inductor is left out, and the row says so.

    Args:
        gate: called as ``gate(workload, row, slo, backend=…, budget_s=…)`` for each row that was measured, is correct
            and has an SLO. It decides and records; None measures and reports only.
        peak: of the machine, for roofline fractions.
        measurer: as `measurement.measure`.
    """
    began, compiling = clock(), 0.0
    for index, workload in enumerate(workloads):
        started = clock()
        share = max(budget_s - (started - began), 0.0) / (len(workloads) - index)
        row = Row(workload.name, workload.op, workload.model, backend, workload.backward, "unjudged")
        row.slo = slo_for(workload.name, slos)
        try:
            measured = measurer(
                workload,
                backend,
                compare=compare,
                budget_s=share if gate is None else 0.6 * share,
                min_rounds=min_rounds,
                with_inductor=share > 2 * compiling,
            )
            if index:  # the first compilation starts Inductor up as well
                compiling = max(compiling, measured.compile_s.get("inductor", 0.0))
            fill(row, measured, peak)
            if gate is not None and row.slo is not None and row.state in ("met", "unmet"):
                left = max(share - (clock() - started), 1.0)
                decide(row, gate(workload, row, row.slo, backend=backend, budget_s=left))
        except Exception as failure:  # a workload may fail in any way: that is its result, and the others go on
            row.state = "failed"
            row.reason = (
                f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure).strip() else ''}"
            )
        row.elapsed_s = clock() - started
        yield row


def fill(row: Row, measured: Measurement, peak: Peak | None) -> None:
    """Put a measurement into a row, and judge it."""
    row.samples_s, row.compile_s, row.peak_mb = measured.samples_s, measured.compile_s, measured.peak_mb
    row.notes = list(measured.notes)
    if measured.cost is not None:
        row.flops, row.moved = measured.cost.flops, measured.cost.moved
        if peak is not None:
            row.ideal_s = peak.ideal_s(measured.cost.moved, measured.cost.flops, measured.cost.dtype)
    if measured.wrong:
        row.state, row.reason = "wrong", measured.wrong
    _figures(row, judged=not measured.wrong)


def _figures(row: Row, *, judged: bool = True) -> None:
    """What follows from a row's samples."""
    row.latency_s = {name: bootstrap(samples) for name, samples in row.samples_s.items()}
    row.p99_s = {name: _p99(samples) for name, samples in row.samples_s.items()}
    row.best_native = best_native(row.samples_s)
    own = row.samples_s["portable"]
    row.ratios = {name: ratio(own, samples) for name, samples in row.samples_s.items() if name != "portable"}
    row.roofline = row.ideal_s / row.latency_s["portable"].median if row.ideal_s else None
    if not judged:
        return
    if row.slo is None:
        row.state, row.reason = "unjudged", "no SLO"
    else:
        found = judge(row.slo, row.samples_s, ideal_s=row.ideal_s, peak_mb=row.peak_mb.get("portable"))
        row.judgement, row.reason = found, found.reason
        row.state = "unjudged" if found.met is None else "met" if found.met else "unmet"


def decide(row: Row, outcome: Outcome | None) -> None:
    """Take a gate's word into the row; None leaves it as it was judged."""
    if outcome is None:
        return
    if outcome.samples_s:
        alone = row.latency_s["portable"].median
        row.notes.append(f"figures are of a call inside a program; a call by itself takes {1e3 * alone:.3g} ms")
        row.samples_s = {name: list(samples) for name, samples in outcome.samples_s.items()}
        _figures(row)
    row.provider, row.reason = outcome.provider, outcome.reason or row.reason
    if outcome.met is not None and row.state != "unjudged":
        row.state = "met" if outcome.met else "unmet"
    if outcome.provider != "portable":
        row.kernel_s, row.kernel_figures = outcome.interval, outcome.figures
        if outcome.met is not False:
            row.state = "kernel"


def worst_first(rows: Sequence[Row]) -> list[Row]:
    """Failures, then wrong results, then missed SLOs by how much, then the rest."""
    return sorted(rows, key=lambda row: row.rank)


def _p99(samples: Sequence[float]) -> float:
    """The 99th percentile, by the nearest rank: with few samples the slowest of them."""
    ordered = sorted(samples)
    return ordered[min(math.ceil(0.99 * len(ordered)), len(ordered)) - 1]
