"""The gate as the runner calls it: which units a workload consists of, and what was decided about them.

A unit is one op with the types of its arguments, as the lowering met it. A workload of one op has one; a model has as
many as it has distinct calls of ops that have kernels, and each is measured by itself before the gate decides about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from portable.kernels.registry import ops_with_kernels
from portable.ops._op import choosing
from portable.slo.gate import Gate, Outcome, baselines_of
from portable.slo.objective import SLO, slo_for
from portable.slo.statistics import Interval, bootstrap, ratio
from portable.slo.trial import Unit, measured

from .measurement import call_of as workload_call
from .measurement import placed
from .runner import Row
from .threads import unbound
from .timer import interleave
from .workloads import Workload


@dataclass(frozen=True)
class Decided:
    """What the gate said of a workload: the runner's `Outcome`.

    Attributes:
        provider: "portable", or the provider of the kernels that won.
        interval: seconds per call of the workload with those kernels; None where the portable path stays.
        reason: one line.
        met: whether the SLO is met by what runs from now on; None where it is the whole workload's measurement that
            says so.
        figures: of the kernels, as the gate saw them.
        samples_s: of the portable path and the baselines, where the gate measured them inside a program.
    """

    provider: str
    interval: Interval | None
    reason: str
    met: bool | None = None
    figures: str = ""
    samples_s: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass
class Gating:
    """Called by the runner for each row that was measured.

    Attributes:
        gate: decides and writes to the ledger.
        slos: of the file, for the units of a model.
        known: what was decided in this run, by (op, signature).
        samples: what that was decided on, by the same.
    """

    gate: Gate
    slos: Mapping[str, SLO]
    known: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    samples: dict[tuple[str, str], Mapping[str, Sequence[float]]] = field(default_factory=dict)
    recorded: dict[str, list[Unit]] = field(default_factory=dict)

    def __call__(self, workload: Workload, row: Row, slo: SLO, *, backend: str, budget_s: float) -> Decided | None:
        units = units_of(workload, backend)
        for unit in units:
            self.recorded.setdefault(unit.op, []).append(unit)
        if workload.group != "models":
            units = [u for u in units if u.op == workload.op]
        if not units:
            return None
        began = time.monotonic()
        outcomes = []
        for i, unit in enumerate(units):
            left = max(budget_s - (time.monotonic() - began), 1.0) / (len(units) - i)
            outcomes.append(self._outcome(workload, row, slo, unit, left))
        if workload.group != "models" and len(outcomes) == 1 and not workload.backward:
            (unit,), (only,) = units, outcomes
            samples = {} if slo.of_a_call else self.samples[unit.op, unit.signature]
            return Decided(only.provider, only.interval, only.reason, only.met, only.figures, samples)
        left = budget_s - (time.monotonic() - began)
        limit_s = row.judgement.limit_s if row.judgement else None
        return _summary(outcomes, lambda: with_kernels(workload, backend, left), limit_s)

    def said(self) -> str:
        """What this run added to the ledger."""
        number = self.gate.written
        return f"{number or 'no'} verdict{'' if number == 1 else 's'} written to the ledger {self.gate.ledger.path}"

    def _outcome(self, workload: Workload, row: Row, slo: SLO, unit: Unit, budget_s: float) -> Outcome:
        key = (unit.op, unit.signature)
        if key in self.known:
            return self.known[key]
        if workload.group == "models":
            slo = slo_for(f"{unit.op.split('.')[1] if '.' in unit.op else unit.op}/{workload.name}", self.slos) or slo
        samples = measured(
            unit, self.gate.backend, {"portable": "off"}, baselines_of(slo), budget_s / 3, alone=slo.of_a_call
        )
        self.samples[key] = samples
        others = [u for u in self.recorded.get(unit.op, ()) if u.signature != unit.signature][-4:]
        self.known[key] = self.gate.decide(
            unit,
            slo,
            samples,
            workload=workload.name,
            others=others,
            budget_s=budget_s,
            ideal_s=row.ideal_s if workload.group == "ops" else None,
        )
        return self.known[key]


def units_of(workload: Workload, backend: str) -> list[Unit]:
    """The distinct calls of ops that have kernels in a workload's programs, as its compilation meets them."""
    import portable as pt

    function, args = placed(workload, pt.device(backend))
    compiled = pt.compile(function, backend=backend, dynamic=False, kernels="off")
    with choosing(ops_with_kernels(pt.backends.get(backend).label())):  # else a capture sees what they are made of
        workload_call(compiled, args, workload.backward)()
    found: dict[tuple[str, str], Unit] = {}
    for (op, signature), (unit_args, kwargs) in pt.explain(compiled, show=False).units.items():
        found[op, signature] = Unit(op, tuple(unit_args), kwargs, signature)
    return list(found.values())


def with_kernels(workload: Workload, backend: str, budget_s: float) -> dict[str, list[float]]:
    """Seconds per call of a whole workload on the portable path alone ("portable") and as decided ("kernels")."""
    import portable as pt

    function, args = placed(workload, pt.device(backend))
    calls = {
        name: workload_call(
            pt.compile(function, backend=backend, dynamic=False, kernels=policy), args, workload.backward
        )
        for name, policy in (("portable", "off"), ("kernels", "auto"))
    }
    with unbound():
        for call in calls.values():
            call()
    return interleave(calls, budget_s=budget_s)


def _summary(
    outcomes: Sequence[Outcome], measured: Callable[[], dict[str, list[float]]], limit_s: float | None
) -> Decided:
    """What was decided about the ops of a workload; ``measured`` says what came of it, where it is not all portable.

    Args:
        limit_s: the workload's own SLO, as seconds per call.
    """
    kernels = [o for o in outcomes if o.provider != "portable"]
    missed = sum(not o.met for o in outcomes)
    ops = "1 op" if len(outcomes) == 1 else f"{len(outcomes)} ops"
    counts = f"{ops} with kernels: {len(kernels)} by a kernel, {missed} UNMET"
    if not kernels:
        return Decided("portable", None, counts)
    samples = measured()
    gain = ratio(samples["kernels"], samples["portable"])
    figures = f"{gain.median:.2f}× the portable path [{gain.low:.2f}, {gain.high:.2f}]"
    time_s = bootstrap(samples["kernels"])
    met = None if limit_s is None else time_s.high <= limit_s
    return Decided(kernels[0].provider, time_s, f"{counts}; with them {figures}", met, figures)
