"""The ledger: the store of verdicts, of the decisions that rest on them, and of quarantined kernels.

Many processes read and write it at once; a process that is killed loses nothing that it was told is stored
(portable/kernels/storage.py). Nothing in it is ever overwritten: a decision is superseded by a later one, a rollback is
a new entry that restores an older one, a quarantine is lifted by a date. Only `Ledger.prune` removes, and only what no
decision rests on, or what was decided on other machines.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from portable import config
from portable.errors import LedgerError
from portable.kernels import exchange
from portable.kernels.fingerprint import Fingerprint
from portable.kernels.records import FIELDS, PORTABLE, Quarantine, StoredDecision, Verdict, stale_reason
from portable.kernels.storage import Storage

__all__ = ["Imported", "Ledger", "Pruned", "Quarantine", "StoredDecision", "Verdict", "stale_reason"]

DAY_S = 86_400.0

_COLUMNS = ", ".join(f'"{name}"' for name in FIELDS)
_OF = ("op", "signature", "backend", "fingerprint")  # what a decision is for
_DECISIONS = f"""
    SELECT d.sequence, d.op, d.signature, d.backend, d.fingerprint, d.provider, d.why, d.created AS decided, d.verdict,
        {", ".join(f'v."{name}" AS verdict_{name}' for name in FIELDS)},
        (SELECT q.reason FROM quarantines q WHERE q.op = d.op AND q.provider = d.provider AND q.lifted IS NULL
         ORDER BY q.sequence DESC) AS quarantined
    FROM decisions d LEFT JOIN verdicts v ON v.id = d.verdict
"""
_IN_FORCE = "d.sequence IN (SELECT max(sequence) FROM decisions GROUP BY op, signature, backend, fingerprint)"


@dataclass(frozen=True)
class Imported:
    """What an import did: verdicts that are new here, verdicts that were here already, decisions now in force."""

    added: int
    known: int
    decisions: int


@dataclass(frozen=True)
class Pruned:
    """What a prune removed: the ids of verdicts, and the number of entries in the history of decisions."""

    verdicts: tuple[str, ...]
    decisions: int


class Ledger:
    """The ledger in one file.

    Args:
        path: default PORTABLE_LEDGER. Nothing is made before the first write; a ledger that does not exist is empty.
        timeout_s: how long to wait for other processes.
        set_aside: False for who only looks: a damaged file is then an error, and left as it is.

    Every method raises `LedgerError` where the file cannot be read (or written), stays locked, is no ledger, or belongs
    to a newer version. A damaged ledger is set aside under another name, with a warning, and a new one begun.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, timeout_s: float = 30.0, set_aside: bool = True
    ) -> None:
        try:
            self.path = Path(path or config.get("PORTABLE_LEDGER")).expanduser().resolve()
        except (OSError, RuntimeError) as failure:
            raise LedgerError(
                f"the ledger's path is not usable: {failure}", remedy="set PORTABLE_LEDGER to an absolute path"
            ) from failure
        self._storage = Storage(self.path, timeout_s, set_aside)

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r})"

    def require_writable(self) -> None:
        """Make the ledger if there is none: what is measured from now on can be stored.

        Raises:
            LedgerError: it cannot.
        """
        self._storage.write(lambda db: None)

    # Verdicts.

    def add(self, verdict: Verdict) -> str:
        """Store a verdict and return its id; it is then on the disk. The same verdict again changes nothing.

        Raises:
            LedgerError: a field is not legal, or another verdict has this id.
        """
        verdict.check()
        self._storage.write(lambda db: _insert(db, verdict))
        return verdict.id

    def verdicts(
        self,
        op: str | None = None,
        *,
        id: str | None = None,
        signature: str | None = None,
        workload: str | None = None,
        backend: str | None = None,
        provider: str | None = None,
        outcome: str | None = None,
        evidence: str | None = None,
        fingerprint: str | Fingerprint | None = None,
    ) -> list[Verdict]:
        """The verdicts with these properties, oldest first."""
        where, values = _matching(
            op=op, id=id, signature=signature, workload=workload, backend=backend, provider=provider, outcome=outcome,
            evidence=evidence, fingerprint=fingerprint,
        )  # fmt: skip
        query = f"SELECT {_COLUMNS} FROM verdicts WHERE {where} ORDER BY sequence"
        return self._storage.read(lambda db: [Verdict(**dict(row)) for row in db.execute(query, values)])

    # Decisions.

    def decide(self, op: str, signature: str, backend: str, provider: str, verdict_id: str, why: str) -> StoredDecision:
        """From now on ``provider`` is what runs ``op`` with ``signature`` on machines of the verdict's fingerprint.

        Deciding again for the provider that is in force renews its evidence; a rollback then goes back to what was in
        force before that provider.

        Raises:
            LedgerError: there is no such verdict, or it is no evidence for this: it is of another op, signature,
                backend or provider, says that the kernel did not meet the SLO, or is only predicted; or the kernel is
                in quarantine.
        """

        def change(db: sqlite3.Connection) -> StoredDecision:
            verdict = _verdict(db, verdict_id)
            if problem := _no_evidence(verdict, op, signature, backend, provider):
                raise LedgerError(
                    f"{op}/{provider} on {backend} cannot rest on verdict {verdict_id}: {problem}",
                    remedy="decide on a verdict of this very op, signature, backend and provider that met its SLO",
                )
            if reason := _quarantined(db, op, provider):
                raise LedgerError(
                    f"kernel {op}/{provider} is in quarantine: {reason}",
                    remedy=f"lift it first: portable ledger quarantine {op} {provider} --lift",
                )
            head = _head(db, (op, signature, backend, verdict.fingerprint))
            previous = None
            if head:
                previous = head["previous"] if head["provider"] == provider else head["sequence"]
            return _append(db, (op, signature, backend, verdict.fingerprint), provider, verdict.id, why, previous)

        return self._storage.write(change)

    def decisions(
        self,
        op: str | None = None,
        *,
        signature: str | None = None,
        backend: str | None = None,
        fingerprint: str | Fingerprint | None = None,
        history: bool = False,
    ) -> list[StoredDecision]:
        """The decisions in force, oldest first; they may be stale (`stale_reason`).

        Args:
            fingerprint: give at most one decision an op, signature and backend: this machine's, or the latest of
                another machine (which is stale here) where this one has none. Without it: every machine's.
            history: also those that were superseded or rolled back.
        """
        where, values = _matching("d.", op=op, signature=signature, backend=backend)
        query = f"{_DECISIONS} WHERE {where} {'' if history else f'AND {_IN_FORCE}'} ORDER BY d.sequence"
        found = self._storage.read(lambda db: [_decision(row) for row in db.execute(query, values)])
        if history:
            return [d for d in found if fingerprint is None or d.fingerprint == str(fingerprint)]
        if fingerprint is not None:
            here = str(fingerprint)
            one: dict[tuple[str, str, str], StoredDecision] = {}
            for d in sorted(found, key=lambda d: (d.fingerprint == here, d.sequence)):
                one[d.op, d.signature, d.backend] = d
            found = sorted(one.values(), key=lambda d: d.sequence)
        return [d for d in found if d.provider]

    def rollback(
        self,
        op: str,
        *,
        signature: str | None = None,
        backend: str | None = None,
        fingerprint: str | Fingerprint | None = None,
    ) -> list[StoredDecision]:
        """Restore the decision before the last one, for every signature, backend and machine of ``op`` or those named.

        The history is kept; a rollback is an entry of its own, and another one goes one step further back. Where there
        is nothing before, no decision is left: the portable path.

        Returns:
            What is in force now; provider '' where nothing is.

        Raises:
            LedgerError: nothing is decided for this op.
        """
        where, values = _matching("d.", op=op, signature=signature, backend=backend, fingerprint=fingerprint)

        def change(db: sqlite3.Connection) -> list[StoredDecision]:
            query = f"SELECT d.* FROM decisions d WHERE {where} AND d.provider != '' AND {_IN_FORCE}"
            heads = db.execute(f"{query} ORDER BY d.sequence", values).fetchall()
            if not heads:
                raise LedgerError(
                    f"the ledger holds no decision for {op} that could be rolled back",
                    remedy="`portable ledger show` lists the decisions",
                )
            return [_restore(db, head) for head in heads]

        return self._storage.write(change)

    # Quarantine.

    def quarantine(self, op: str, provider: str, reason: str) -> None:
        """Make a kernel ineligible, on every backend and whatever its digest, until `lift`.

        Raises:
            LedgerError: no reason, or no kernel is named.
        """
        if not (op and provider and reason.strip()) or provider == PORTABLE:
            raise LedgerError(
                f"cannot quarantine {op!r}/{provider!r} for the reason {reason!r}",
                remedy="name an op, a kernel's provider (the portable path has no quarantine) and a reason",
            )
        text = reason.encode("utf-8", "replace").decode()
        row = (op, provider, text, time.time())
        self._storage.write(
            lambda db: db.execute("INSERT INTO quarantines (op, provider, reason, created) VALUES (?, ?, ?, ?)", row)
        )

    def lift(self, op: str, provider: str) -> None:
        """End a quarantine; what was decided before it is in force again.

        Raises:
            LedgerError: the kernel is not in quarantine.
        """

        def change(db: sqlite3.Connection) -> None:
            of = "op = ? AND provider = ? AND lifted IS NULL"
            if not db.execute(f"UPDATE quarantines SET lifted = ? WHERE {of}", (time.time(), op, provider)).rowcount:
                raise LedgerError(
                    f"kernel {op}/{provider} is not in quarantine", remedy="`portable ledger show` lists those that are"
                )

        self._storage.write(change)

    def quarantined(self, op: str, provider: str) -> str:
        """Why a kernel is in quarantine; '' if it is not."""
        return self._storage.read(lambda db: _quarantined(db, op, provider))

    def quarantines(self, *, history: bool = False) -> list[Quarantine]:
        """The quarantines that hold, oldest first; with ``history`` also those that were lifted."""
        columns = "op, provider, reason, created, lifted"
        query = f"SELECT {columns} FROM quarantines WHERE ? OR lifted IS NULL ORDER BY sequence"
        return self._storage.read(lambda db: [Quarantine(**dict(row)) for row in db.execute(query, (history,))])

    # Upkeep.

    def prune(
        self,
        *,
        older_than_days: float = 90.0,
        fingerprints: Mapping[str, str | Fingerprint] | None = None,
        dry_run: bool = False,
    ) -> Pruned:
        """Remove old verdicts that no decision rests on.

        Args:
            older_than_days: what is younger stays.
            fingerprints: of this machine, by backend: on these backends the history of decisions of any other machine
                goes too, once its latest entry is that old.
            dry_run: only say what would go.
        """
        before = time.time() - older_than_days * DAY_S

        def change(db: sqlite3.Connection) -> Pruned:
            decisions = 0
            for backend, here in (fingerprints or {}).items():
                decisions += db.execute(
                    """DELETE FROM decisions WHERE backend = ? AND (op, signature, fingerprint) IN (
                       SELECT op, signature, fingerprint FROM decisions WHERE backend = ? AND fingerprint != ?
                       GROUP BY op, signature, fingerprint HAVING max(created) < ?)""",
                    (backend, backend, str(here), before),
                ).rowcount
            unused = "created < ? AND id NOT IN (SELECT verdict FROM decisions WHERE verdict IS NOT NULL)"
            ids = tuple(row["id"] for row in db.execute(f"SELECT id FROM verdicts WHERE {unused}", (before,)))
            db.execute(f"DELETE FROM verdicts WHERE {unused}", (before,))
            if dry_run:
                raise _Undo(Pruned(ids, decisions))
            return Pruned(ids, decisions)

        try:
            return self._storage.write(change)
        except _Undo as undone:
            return undone.pruned

    # Exchange.

    def export_json(self, path: str | os.PathLike[str], *, op: str | None = None, backend: str | None = None) -> int:
        """Write verdicts and the decisions in force to a JSON file, each with a content digest.

        Returns:
            The number of verdicts.

        Raises:
            LedgerError: also where ``path`` cannot be written.
        """
        verdicts = self.verdicts(op, backend=backend)
        known = {v.id for v in verdicts}
        exchange.write(path, verdicts, [d for d in self.decisions(op, backend=backend) if d.verdict_id in known])
        return len(verdicts)

    def import_json(self, path: str | os.PathLike[str]) -> Imported:
        """Take over an exported file: all of it or, where anything is wrong with it, nothing.

        Measured verdicts become ``imported``; predicted ones stay so. They keep their fingerprint, and so count only
        on a machine of that fingerprint. A decision of the file comes into force where the ledger has none yet for the
        same op, signature, backend and fingerprint: what was decided here stays.

        Raises:
            LedgerError: the file is no export, or of a newer version; or a verdict or decision does not match its
                digest (all such are named), has fields that are not legal, or contradicts what the ledger holds.
        """
        verdicts, decisions = exchange.read(path)

        def change(db: sqlite3.Connection) -> Imported:
            added = sum(_insert(db, verdict) for verdict in verdicts)
            adopted = sum(_adopt(db, record, path) for record in decisions)
            return Imported(added, len(verdicts) - added, adopted)

        return self._storage.write(change)


class _Undo(Exception):
    def __init__(self, pruned: Pruned) -> None:
        self.pruned = pruned


def _matching(prefix: str = "", **properties: Any) -> tuple[str, list[str]]:
    """A WHERE condition and its values: those properties that are not None."""
    given = {name: str(value) for name, value in properties.items() if value is not None}
    return " AND ".join(["1", *(f"{prefix}{name} = ?" for name in given)]), list(given.values())


def _insert(db: sqlite3.Connection, verdict: Verdict) -> bool:
    """Whether the verdict is new."""
    there = db.execute(f"SELECT {_COLUMNS} FROM verdicts WHERE id = ?", (verdict.id,)).fetchone()
    if there is None:
        values = tuple(asdict(verdict).values())
        db.execute(f"INSERT INTO verdicts ({_COLUMNS}) VALUES ({', '.join('?' * len(values))})", values)
        return True
    if replace(Verdict(**dict(there)), evidence=verdict.evidence) != verdict:
        raise LedgerError(
            f"the ledger holds another verdict with the id {verdict.id} ({verdict.op}/{verdict.provider})",
            remedy="a verdict is never changed: add a new one, made with Verdict.new",
        )
    return False


def _verdict(db: sqlite3.Connection, id: str) -> Verdict:
    row = db.execute(f"SELECT {_COLUMNS} FROM verdicts WHERE id = ?", (id,)).fetchone()
    if row is None:
        raise LedgerError(f"the ledger holds no verdict {id!r}", remedy="add the verdict before deciding on it")
    return Verdict(**dict(row))


def _no_evidence(verdict: Verdict, op: str, signature: str, backend: str, provider: str) -> str:
    """Why a verdict is no evidence for a decision; '' if it is."""
    wanted = {"op": op, "signature": signature, "backend": backend}
    if provider != PORTABLE:
        wanted |= {"provider": provider, "outcome": "met"}
    wrong = [f"its {name} is {getattr(verdict, name)!r}" for name in wanted if getattr(verdict, name) != wanted[name]]
    if provider != PORTABLE and verdict.evidence == "predicted":
        wrong.append("it is only predicted")
    return ", ".join(wrong)


def _quarantined(db: sqlite3.Connection, op: str, provider: str) -> str:
    row = db.execute(
        "SELECT reason FROM quarantines WHERE op = ? AND provider = ? AND lifted IS NULL ORDER BY sequence DESC",
        (op, provider),
    ).fetchone()
    return row["reason"] if row else ""


def _head(db: sqlite3.Connection, of: tuple[str, ...]) -> sqlite3.Row | None:
    """The latest entry for (op, signature, backend, fingerprint)."""
    where = " AND ".join(f"{name} = ?" for name in _OF)
    row: sqlite3.Row | None = db.execute(
        f"SELECT * FROM decisions WHERE {where} ORDER BY sequence DESC LIMIT 1", of
    ).fetchone()
    return row


def _append(
    db: sqlite3.Connection, of: tuple[str, ...], provider: str, verdict: str | None, why: str, previous: int | None
) -> StoredDecision:
    values = (*of, provider, verdict, why, time.time(), previous)
    columns = f"{', '.join(_OF)}, provider, verdict, why, created, previous"
    cursor = db.execute(f"INSERT INTO decisions ({columns}) VALUES ({', '.join('?' * len(values))})", values)
    return _decision(db.execute(f"{_DECISIONS} WHERE d.sequence = ?", (cursor.lastrowid,)).fetchone())


def _restore(db: sqlite3.Connection, head: sqlite3.Row) -> StoredDecision:
    """Append what was in force before ``head``."""
    of = tuple(head[name] for name in _OF)
    row = db.execute("SELECT * FROM decisions WHERE sequence = ?", (head["previous"],)).fetchone()
    if row is None:
        return _append(db, of, "", None, f"{head['provider']} rolled back", None)
    return _append(db, of, row["provider"], row["verdict"], row["why"], row["previous"])


def _decision(row: sqlite3.Row) -> StoredDecision:
    verdict = Verdict(**{name: row[f"verdict_{name}"] for name in FIELDS}) if row["verdict"] is not None else None
    return StoredDecision(
        row["sequence"], row["op"], row["signature"], row["backend"], row["fingerprint"], row["provider"], row["why"],
        verdict, row["decided"], row["quarantined"] or "",
    )  # fmt: skip


def _adopt(db: sqlite3.Connection, record: Mapping[str, str], path: str | os.PathLike[str]) -> bool:
    """Bring an imported decision into force where the ledger has none; whether it was."""
    op, signature, backend, provider = (record[name] for name in ("op", "signature", "backend", "provider"))
    verdict = _verdict(db, record["verdict"])
    if problem := _no_evidence(verdict, op, signature, backend, provider):
        raise LedgerError(
            f"{path} is refused, nothing is imported: {op}/{provider} cannot rest on verdict {verdict.id}: {problem}",
            remedy=exchange.EXPORT_AGAIN,
        )
    of = (op, signature, backend, verdict.fingerprint)
    if _head(db, of) is not None:
        return False
    _append(db, of, provider, verdict.id, record["why"], None)
    return True
