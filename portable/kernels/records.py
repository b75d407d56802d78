"""What the ledger holds: verdicts, the decisions that rest on them, and quarantines. Data alone, no I/O."""

from __future__ import annotations

import sys
import time
import uuid
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from portable.errors import LedgerError
from portable.kernels.fingerprint import Fingerprint, changes

Outcome = Literal["met", "unmet", "wrong", "crashed", "hung", "slower", "quarantined"]
Evidence = Literal["measured", "imported", "predicted"]
PORTABLE = "portable"

_OPTIONAL = ("median_s", "low_s", "high_s", "baseline_s")
_NUMBERS = ("limit", "created", *_OPTIONAL)


@dataclass(frozen=True)
class Verdict:
    """What one measurement showed. Make one with `Verdict.new`, which gives it an id and the time.

    Attributes:
        id: unique.
        op: a portable op's name or an overload's.
        workload: the named workload that was measured.
        signature: canonical text of shapes, dtypes and constants.
        backend: where.
        provider: "portable" or a kernel's provider.
        outcome: met or unmet (the SLO), wrong, crashed, hung, slower (than the portable path), quarantined.
        reason: for people.
        metric, limit: the SLO it was judged by.
        median_s, low_s, high_s: seconds: the median and the bounds of its confidence interval; None where not measured.
        baseline_s: seconds: the SLO's baseline in the same run; None where there is none.
        evidence: measured here, imported (measured on a machine of this fingerprint), or predicted (never activates).
        fingerprint: text of the `Fingerprint` of the machine that it was measured on.
        kernel_digest: the digest of the kernel's source; '' for the portable path.
        created: seconds since 1970.
    """

    id: str
    op: str
    workload: str
    signature: str
    backend: str
    provider: str
    outcome: Outcome
    reason: str
    metric: str
    limit: float
    median_s: float | None
    low_s: float | None
    high_s: float | None
    baseline_s: float | None
    evidence: Evidence
    fingerprint: str
    kernel_digest: str
    created: float

    @classmethod
    def new(
        cls,
        *,
        op: str,
        signature: str,
        backend: str,
        provider: str,
        outcome: Outcome,
        metric: str,
        limit: float,
        fingerprint: str | Fingerprint,
        workload: str = "",
        reason: str = "",
        median_s: float | None = None,
        low_s: float | None = None,
        high_s: float | None = None,
        baseline_s: float | None = None,
        evidence: Evidence = "measured",
        kernel_digest: str = "",
    ) -> Verdict:
        """A verdict of now, with an id of its own."""
        text = reason.encode("utf-8", "replace").decode()  # of a crashed process, whose output may be no text
        return cls(
            uuid.uuid4().hex, op, workload, signature, backend, provider, outcome, text, metric, limit, median_s, low_s,
            high_s, baseline_s, evidence, str(fingerprint), kernel_digest, time.time(),
        )  # fmt: skip

    def check(self) -> Verdict:
        """This verdict, if every field has a legal value.

        Raises:
            LedgerError: one has not; the message names it.
        """
        for name, value in asdict(self).items():
            if problem := _problem(name, value):
                text = f"verdict {self.id!r} ({self.op}/{self.provider}): {name} is {value!r}, {problem}"
                raise LedgerError(text, remedy="make it with Verdict.new")
        return self


FIELDS = tuple(f.name for f in fields(Verdict))


def _problem(name: str, value: Any) -> str:
    """What is wrong with the value of a verdict's field; '' if nothing is."""
    if value is None and name in _OPTIONAL:
        return ""
    if name in _NUMBERS:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        return "" if number else f"not a finite number{' or None' if name in _OPTIONAL else ''}"
    if not isinstance(value, str) or not value.isascii() and value.encode("utf-8", "replace").decode() != value:
        return "not a text"
    if name in ("id", "op", "backend", "provider", "fingerprint") and not value:
        return "which is empty"
    legal = {"outcome": get_args(Outcome), "evidence": get_args(Evidence)}.get(name)
    return f"not one of {', '.join(legal)}" if legal and value not in legal else ""


@dataclass(frozen=True)
class StoredDecision:
    """What the ledger says is to be used for one op and signature, and the verdict it rests on.

    Attributes:
        sequence: its place in the ledger's history.
        op, signature, backend, fingerprint: what it is for; each machine (fingerprint) has decisions of its own.
        provider: "portable" or a kernel's; '' where a rollback left no decision (only in the history).
        why: for people.
        verdict: the evidence; None only where provider is ''.
        created: seconds since 1970.
        quarantined: why this provider's kernel is in quarantine now; '' if it is not.
    """

    sequence: int
    op: str
    signature: str
    backend: str
    fingerprint: str
    provider: str
    why: str
    verdict: Verdict | None
    created: float
    quarantined: str = ""

    @property
    def verdict_id(self) -> str:
        return self.verdict.id if self.verdict else ""


@dataclass(frozen=True)
class Quarantine:
    """A kernel that is not to be used, and why; ``lifted`` is None while it holds."""

    op: str
    provider: str
    reason: str
    created: float
    lifted: float | None


def stale_reason(decision: StoredDecision, now_fingerprint: str | Fingerprint, kernel_digest: str) -> str:
    """Why a decision does not count here and now; '' if it does. Pure.

    Args:
        now_fingerprint: of this machine, for the decision's backend.
        kernel_digest: of the kernel that is registered now for the decision's op and provider; '' if none is. Not
            looked at for the portable path.

    Returns:
        Every part that differs, as ``name old → new``, or that the kernel is in quarantine.
    """
    if decision.verdict is None:
        return "there is no decision"
    reasons = changes(decision.verdict.fingerprint, str(now_fingerprint))
    then = decision.verdict.kernel_digest
    if decision.provider != PORTABLE and then != kernel_digest:
        now = f"source {then[:8] or 'unknown'} → {kernel_digest[:8]}" if kernel_digest else "is not registered here"
        reasons.append(f"kernel {decision.provider} {now}")
    if decision.quarantined:
        reasons.append(f"kernel {decision.provider} is in quarantine: {decision.quarantined}")
    if decision.verdict.evidence == "predicted":
        reasons.append("its evidence is only predicted")
    return "; ".join(reasons)
