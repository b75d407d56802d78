"""The gate: a kernel is used only where it is needed, correct, and better; the ledger keeps why.

In this order: the portable path is measured; only if the worse bound of its interval breaks the SLO are candidates
tried, each in a process of its own, interleaved with the portable path; a candidate wins only if it is correct on every
case, its own worse bound meets the SLO, and it beats the portable path beyond the noise; if none does, the portable
path stays and the row is UNMET. A kernel that crashes, hangs or answers wrongly is put into quarantine with the reason.

What was decided on this very machine for the same SLO stands until a measurement contradicts it beyond the noise, and
by more than runs differ: otherwise an op whose time is close to its limit would change its kernel with every run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from portable import backends
from portable.errors import LedgerError
from portable.kernels import registry
from portable.kernels.fingerprint import fingerprint
from portable.kernels.ledger import Ledger, StoredDecision, Verdict, stale_reason
from portable.kernels.registry import Kernel
from portable.slo.judgement import Judgement, judge
from portable.slo.objective import SLO
from portable.slo.statistics import Interval, beats, bootstrap, ratio
from portable.slo.trial import Request, Trial, Unit, run

PORTABLE = "portable"
BETWEEN_RUNS = 0.1  # how far two runs may be apart, which the interval of one does not know: memory layout, neighbours


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not run, and why."""

    provider: str
    outcome: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What the gate decided about one unit.

    Attributes:
        provider: what runs from now on.
        met: whether the SLO is met by it.
        reason: one line with the figures.
        interval: seconds per call of the kernel that won, for a ratio its ratio times the baseline beside the portable
            path; None where the portable path stays.
        figures: of that kernel, in the SLO's metric and of the run that it was tried in.
        rejected: the candidates that were tried and lost.
        not_tried: the candidates that nobody needed.
    """

    provider: str
    met: bool
    reason: str
    interval: Interval | None = None
    figures: str = ""
    rejected: tuple[Rejected, ...] = ()
    not_tried: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Winner:
    kernel: Kernel
    verdict: Verdict
    reason: str
    time_s: Interval
    figures: str


@dataclass
class Gate:
    """Decides about units on one backend and writes what it saw into the ledger.

    Attributes:
        backend: as the user names it; "xla:cpu" is what decisions are stored under.
        label: the backend with its platform.
        trial: runs one candidate; `trial.run` in its own process.
        written: how many verdicts it has added to the ledger.
    """

    backend: str
    label: str
    ledger: Ledger = field(default_factory=Ledger)
    trial: Callable[..., Trial] = run
    timeout_s: float = 120.0
    memory_mb: float = 8_000.0
    written: int = 0

    def decide(
        self,
        unit: Unit,
        slo: SLO,
        samples_s: Mapping[str, Sequence[float]],
        *,
        workload: str = "",
        others: Sequence[Unit] = (),
        budget_s: float = 10.0,
        ideal_s: float | None = None,
        modules: Mapping[str, str] = {},
    ) -> Outcome:
        """Decide about ``unit``, whose portable path has been measured.

        Args:
            samples_s: seconds per call of "portable" and of the baselines, of one interleaved run.
            others: further recorded units of the op, on which a kernel must be correct too.
            budget_s: for all candidates together.
            ideal_s: what the machine's peak allows, for an SLO on the roofline.
            modules: {provider: module that registers its kernel}, where that is not portable's own.
        """
        first = judge(slo, samples_s, ideal_s=ideal_s)
        kernels = registry.kernels_for(unit.op, self.label)
        if first.met is None:  # no evidence for anything
            return Outcome(PORTABLE, False, first.reason, not_tried=tuple(k.name for k in kernels))
        verdict = self._portable_verdict(unit, slo, first, samples_s, workload)
        standing = self._standing(unit, slo)
        if first.met and (standing in ("", PORTABLE) or first.bounds()[1] * (1 + BETWEEN_RUNS) <= 1):
            self._decide(unit, PORTABLE, verdict, first.reason)
            return Outcome(PORTABLE, True, first.reason, not_tried=tuple(k.name for k in kernels))
        if standing == PORTABLE and not _contradicted(first):
            return Outcome(PORTABLE, True, _stands(first), not_tried=tuple(k.name for k in kernels))
        winners: list[_Winner] = []
        rejected: list[Rejected] = []
        wanted = [k for k in kernels if k.provider == standing] if first.met else kernels
        able = [k for k in wanted if not self._ineligible(k, unit, rejected)]
        began = time.monotonic()
        for i, kernel in enumerate(able):
            left = max(budget_s - (time.monotonic() - began), 1.0) / (len(able) - i)
            stands = kernel.provider == standing
            won = self._try(kernel, unit, slo, first, workload, others, left, ideal_s, modules, rejected, stands)
            if won is not None:
                winners.append(won)
        if not winners:
            tried = "; ".join(f"{r.provider} {r.outcome}: {r.reason}" for r in rejected)
            reason = f"{first.reason}; {tried or 'no kernel is registered for it'}"
            self._decide(unit, PORTABLE, verdict, reason)
            return Outcome(PORTABLE, bool(first.met), reason, rejected=tuple(rejected))
        best = min(winners, key=lambda w: w.time_s.median)
        for winner in winners:
            if winner.kernel.provider == standing and best.time_s.high * (1 + BETWEEN_RUNS) >= winner.time_s.low:
                best = winner
        provider = best.kernel.provider
        if best.verdict.outcome == "met" and (problem := self._decide(unit, provider, best.verdict, best.reason)):
            rejected.append(Rejected(provider, "not eligible", problem))
            return Outcome(PORTABLE, False, problem, rejected=tuple(rejected))
        return Outcome(provider, True, best.reason, best.time_s, best.figures, tuple(rejected))

    def _standing(self, unit: Unit, slo: SLO) -> str:
        """The provider that was decided for ``unit`` by this SLO, on evidence that met it and counts here and now; or
        ''."""
        now = fingerprint(self.label)
        found: list[StoredDecision] = self.ledger.decisions(
            unit.op, signature=unit.signature, backend=self.label, fingerprint=now
        )
        for decision in found:
            kernel = registry.KERNELS.get((unit.op, decision.provider))
            met = decision.verdict is not None and decision.verdict.outcome == "met"
            same = decision.verdict is not None and (decision.verdict.metric, decision.verdict.limit) == (
                slo.metric, slo.limit,
            )  # fmt: skip
            if met and same and not stale_reason(decision, now, kernel.digest if kernel else ""):
                return decision.provider
        return ""

    def _decide(self, unit: Unit, provider: str, verdict: Verdict, why: str) -> str:
        """Enter a decision; what kept it out, if another process has quarantined the kernel meanwhile."""
        try:
            self.ledger.decide(unit.op, unit.signature, self.label, provider, verdict.id, why)
        except LedgerError as failure:
            if provider == PORTABLE:
                raise
            return failure.message
        return ""

    def _ineligible(self, kernel: Kernel, unit: Unit, rejected: list[Rejected]) -> bool:
        why = self.ledger.quarantined(kernel.op, kernel.provider)
        path = backends.backend_class(self.backend.partition(":")[0]).path
        why = f"in quarantine: {why}" if why else kernel.not_on(path) or kernel.why_not(unit.args, unit.kwargs)
        if why:
            rejected.append(Rejected(kernel.provider, "not eligible", why))
        return bool(why)

    def _try(
        self,
        kernel: Kernel,
        unit: Unit,
        slo: SLO,
        first: Judgement,
        workload: str,
        others: Sequence[Unit],
        budget_s: float,
        ideal_s: float | None,
        modules: Mapping[str, str],
        rejected: list[Rejected],
        stands: bool,
    ) -> _Winner | None:
        module = modules.get(kernel.provider, kernel.implementation.__module__)
        own = module.startswith("portable.")
        request = Request(
            unit, kernel.provider, self.backend, tuple(others), baselines_of(slo), "" if own else module, budget_s,
            seed=time.time_ns() % 2**31, alone=slo.of_a_call,
        )  # fmt: skip
        trial = self.trial(request, timeout_s=self.timeout_s + budget_s, memory_mb=self.memory_mb)
        if trial.outcome == "impossible":
            rejected.append(Rejected(kernel.provider, "not tried", trial.reason))
            return None
        if trial.outcome != "measured":
            self._write(unit, kernel, slo, trial.outcome, trial.reason, workload, None)
            self.ledger.quarantine(kernel.op, kernel.provider, f"{trial.outcome}: {trial.reason}")
            rejected.append(Rejected(kernel.provider, trial.outcome, trial.reason))
            return None
        samples = trial.samples_s
        judged = judge(slo, samples, subject="candidate", ideal_s=ideal_s)
        gain = ratio(samples["candidate"], samples[PORTABLE])
        time_s = bootstrap(samples["candidate"])
        if slo.metric == "ratio" and judged.value and first.limit_s:  # the baseline may have had another speed there
            time_s = judged.value.scaled(first.limit_s / slo.limit)
        figures = f"{gain.median:.2f}× the portable path [{gain.low:.2f}, {gain.high:.2f}]"
        if not judged.met:
            outcome, why = "unmet", f"correct, too slow: {judged.reason}"
        elif not beats(samples["candidate"], samples[PORTABLE]):
            outcome, why = "slower", f"not faster beyond the noise: {figures}"
        else:
            outcome, why = "met", ""
        reason = f"portable {first.reason}; kernel {judged.reason}, {figures}, correct on {trial.cases} cases"
        verdict = self._write(unit, kernel, slo, outcome, why or reason, workload, samples)
        if outcome != "met":
            if stands and not _contradicted(judged) and gain.low < 1 + BETWEEN_RUNS:
                return _Winner(kernel, verdict, f"{_stands(judged)}, {figures}", time_s, judged.figures)
            rejected.append(Rejected(kernel.provider, outcome, why))
            return None
        return _Winner(kernel, verdict, reason, time_s, judged.figures)

    def _portable_verdict(
        self, unit: Unit, slo: SLO, judged: Judgement, samples: Mapping[str, Sequence[float]], workload: str
    ) -> Verdict:
        outcome = "met" if judged.met else "unmet"
        return self._write(unit, None, slo, outcome, judged.reason, workload, samples)

    def _write(
        self,
        unit: Unit,
        kernel: Kernel | None,
        slo: SLO,
        outcome: Any,
        reason: str,
        workload: str,
        samples: Mapping[str, Sequence[float]] | None,
    ) -> Verdict:
        own = bootstrap(samples[PORTABLE if kernel is None else "candidate"]) if samples else None
        natives = [bootstrap(samples[n]).median for n in ("eager", "inductor") if samples and samples.get(n)]
        verdict = Verdict.new(
            op=unit.op,
            signature=unit.signature,
            backend=self.label,
            provider=kernel.provider if kernel else PORTABLE,
            outcome=outcome,
            metric=slo.metric,
            limit=slo.limit,
            fingerprint=fingerprint(self.label),
            workload=workload,
            reason=reason,
            median_s=own.median if own else None,
            low_s=own.low if own else None,
            high_s=own.high if own else None,
            baseline_s=min(natives) if natives else None,
            kernel_digest=kernel.digest if kernel else "",
        )
        self.ledger.add(verdict)
        self.written += 1
        return verdict


def _contradicted(judged: Judgement) -> bool:
    """Whether a measurement contradicts that the SLO is met, beyond the noise."""
    return judged.bounds()[0] > 1 + BETWEEN_RUNS


def _stands(judged: Judgement) -> str:
    return f"stands as decided: {judged.reason}, not beyond the noise"


def baselines_of(slo: SLO) -> tuple[str, ...]:
    """The baselines that an SLO needs in the same run."""
    if slo.metric != "ratio":
        return ("eager",)
    return ("eager", "inductor") if slo.baseline == "best_native" else (slo.baseline,)
