"""Ledgers as JSON: verdicts and decisions, each with a digest of its content.

The digest shows that a record was damaged or edited by hand. It is no signature: who can write the file can renew it,
so import only from those whose measurements you trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import portable
from portable.errors import LedgerError
from portable.kernels.records import FIELDS, StoredDecision, Verdict

FORMAT = "portable-ledger"
VERSION = 1
EXPORT_AGAIN = "export it again with `portable ledger export` on the machine that it comes from"

_DECISION = ("op", "signature", "backend", "provider", "verdict", "why")


def digest(record: Mapping[str, Any]) -> str:
    """The content digest of a record: SHA-256 of all its fields but ``digest``, as canonical JSON."""
    content = {name: value for name, value in record.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def write(path: str | os.PathLike[str], verdicts: Iterable[Verdict], decisions: Iterable[StoredDecision]) -> None:
    """Write an export; the file is there whole or not at all.

    Raises:
        LedgerError: ``path`` cannot be written.
    """
    decided = [
        dict(zip(_DECISION, (d.op, d.signature, d.backend, d.provider, d.verdict_id, d.why), strict=True))
        for d in decisions
    ]
    document = {
        "format": FORMAT,
        "version": VERSION,
        "portable": portable.__version__,
        "verdicts": [{**record, "digest": digest(record)} for record in map(asdict, verdicts)],
        "decisions": [{**record, "digest": digest(record)} for record in decided],
    }
    whole = Path(path)
    partial = whole.with_name(f".{whole.name}.{os.getpid()}")
    try:
        try:
            with partial.open("w", encoding="utf-8") as file:
                json.dump(document, file, indent=1, ensure_ascii=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(whole)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    except OSError as failure:
        raise LedgerError(
            f"cannot write {path}: {failure.strerror or failure}", remedy="name a file in a folder that you can write"
        ) from failure


def read(path: str | os.PathLike[str]) -> tuple[list[Verdict], list[dict[str, str]]]:
    """The verdicts of an export, as imported ones, and its decisions.

    Raises:
        LedgerError: it is no export, of another version, or holds records that are not whole; all of them are named.
    """
    document = _document(path)
    verdicts, problems = [], []
    for record in document["verdicts"]:
        try:
            verdicts.append(_verdict(record))
        except LedgerError as failure:
            problems.append(failure.message)
    for record in document["decisions"]:
        name = f"decision {record.get('op', '?')}/{record.get('provider', '?')}"
        if problem := _problem(record, _DECISION):
            problems.append(f"{name}: {problem}")
        elif not all(isinstance(value, str) for value in record.values()):
            problems.append(f"{name}: a field is not a text")
    if problems:
        raise LedgerError(f"{path} is refused, nothing is imported: {'; '.join(problems)}", remedy=EXPORT_AGAIN)
    return verdicts, document["decisions"]


def _verdict(record: dict[str, Any]) -> Verdict:
    if problem := _problem(record, FIELDS):
        name = f"verdict {record.get('id', '?')} ({record.get('op', '?')}/{record.get('provider', '?')})"
        raise LedgerError(f"{name}: {problem}")
    verdict = Verdict(**{name: record[name] for name in FIELDS}).check()
    return verdict if verdict.evidence == "predicted" else replace(verdict, evidence="imported")


def _problem(record: dict[str, Any], fields: tuple[str, ...]) -> str:
    """Why a record is not whole; '' if it is."""
    if record.get("digest") != digest(record):
        return "its content does not match its digest"
    given = set(record) - {"digest"}
    return ", ".join([*(f"no {f}" for f in fields if f not in given), *(f"unknown {f}" for f in given - {*fields})])


def _document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """An exported file, its outer form checked."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as failure:
        raise LedgerError(
            f"cannot read {path}: {failure.strerror or failure}", remedy="name a file of `portable ledger export`"
        ) from failure
    except (ValueError, RecursionError) as failure:
        raise LedgerError(f"{path} is not JSON: {failure}", remedy=EXPORT_AGAIN) from failure
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise LedgerError(f"{path} is not an exported ledger", remedy="name a file of `portable ledger export`")
    version = document.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        raise LedgerError(
            f"{path} has format version {version!r}; this portable knows version {VERSION}",
            remedy="upgrade portable" if newer else EXPORT_AGAIN,
        )
    for part in ("verdicts", "decisions"):
        rows = document.get(part)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise LedgerError(f"{path}: {part!r} is not a list of objects", remedy=EXPORT_AGAIN)
    return document
