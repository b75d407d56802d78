"""What the ledger says about the kernels of one backend on this machine, read once a compilation."""

from __future__ import annotations

import warnings
from typing import Any

from portable.errors import LedgerError
from portable.kernels import registry
from portable.kernels.fingerprint import fingerprint
from portable.kernels.ledger import Ledger, stale_reason
from portable.kernels.select import Evidence

WAIT_S = 2.0  # a compilation does not wait longer for whoever holds the ledger


class Evidences:
    """The decisions in force for ``backend`` (e.g. "xla:cpu"), with why one is stale.

    A ledger that cannot be read is no reason to stop a compilation: every op is then portable, and a warning says so.
    """

    def __init__(self, backend: str, ledger: Ledger | None = None) -> None:
        self._backend = backend
        self._decisions: dict[tuple[str, str], Any] = {}
        self._quarantined: dict[str, str] = {}
        try:
            book = ledger or Ledger(timeout_s=WAIT_S)
            if not book.path.exists():
                return
            self._now = fingerprint(backend)
            for decision in book.decisions(backend=backend, fingerprint=self._now):
                self._decisions[decision.op, decision.signature] = decision
            self._quarantined = {f"{q.op}/{q.provider}": q.reason for q in book.quarantines()}
        except (LedgerError, OSError) as failure:
            warnings.warn(f"kernels are not used: {failure}", stacklevel=2)

    def lookup(self, op: str, signature: str) -> Evidence | None:
        """The decision for one op and signature, ready for `select`."""
        decision = self._decisions.get((op, signature))
        if decision is None:
            return None
        kernel = registry.KERNELS.get((op, decision.provider))
        stale = stale_reason(decision, self._now, kernel.digest if kernel else "")
        return Evidence(decision.provider, decision.why, decision.verdict_id[:8], stale)

    def with_kernels(self) -> frozenset[str]:
        """The ops for which a kernel has been decided, on evidence that counts here and now."""
        found = [(op, self.lookup(op, signature)) for op, signature in self._decisions]
        return frozenset(op for op, e in found if e and e.provider != "portable" and not e.stale)

    def quarantined(self, name: str) -> str:
        """Why the kernel ``op/provider`` is in quarantine; '' if it is not."""
        reason = self._quarantined.get(name, "")
        return f"in quarantine: {reason}" if reason else ""
