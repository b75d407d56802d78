"""The ledger: what is stored stays stored, what is decided can be undone, and no file is fatal."""

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from portable import cli
from portable.errors import ConfigError, LedgerError
from portable.kernels import exchange, storage
from portable.kernels.fingerprint import Fingerprint, changes, fingerprint
from portable.kernels.ledger import Imported, Ledger, StoredDecision, Verdict, stale_reason

ROOT = Path(cli.__file__).parent.parent
HERE = Fingerprint.of({"device": "abacus", "driver": "1", "torch": "2.13.0"})
ELSEWHERE = Fingerprint.of({"device": "abacus", "driver": "2", "torch": "2.14.0"})
YEAR_S = 365 * 86_400


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite", timeout_s=20)


def verdict(provider: str = "portable", **fields) -> Verdict:
    portable = provider == "portable"
    given = {
        "op": "rms_norm",
        "workload": "rms_norm/llama",
        "signature": "float32[8,64]",
        "backend": "xla",
        "outcome": "unmet" if portable else "met",
        "metric": "ratio",
        "limit": 1.25,
        "median_s": 0.5,
        "low_s": 0.25,
        "high_s": 0.75,
        "fingerprint": HERE,
        "kernel_digest": "" if portable else "d1",
    }
    return Verdict.new(provider=provider, **given | fields)


def decide(ledger: Ledger, v: Verdict, why: str = "because") -> StoredDecision:
    ledger.add(v)
    return ledger.decide(v.op, v.signature, v.backend, v.provider, v.id, why)


def in_force(ledger: Ledger) -> list[str]:
    return [d.provider for d in ledger.decisions()]


# What is stored.


def test_a_verdict_comes_back_as_it_went_in(ledger):
    stored = [verdict(), verdict("mine", median_s=None, low_s=None, high_s=None, baseline_s=None, reason="ünïcode 'x'")]
    assert [ledger.add(v) for v in stored] == [v.id for v in stored]
    assert ledger.verdicts() == stored


def test_reading_a_ledger_that_does_not_exist_makes_none(ledger):
    assert (ledger.verdicts(), ledger.decisions(), ledger.quarantines(), ledger.quarantined("a", "b")) == (
        [],
        [],
        [],
        "",
    )
    assert list(ledger.path.parent.iterdir()) == []


def test_the_same_verdict_twice_is_one_and_another_under_its_id_is_refused(ledger):
    v = verdict()
    ledger.add(v)
    ledger.add(v)
    with pytest.raises(LedgerError, match=f"another verdict with the id {v.id}"):
        ledger.add(replace(v, median_s=0.1))
    assert ledger.verdicts() == [v]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("outcome", "great", "not one of met, unmet, wrong"),
        ("evidence", "guessed", "not one of measured, imported, predicted"),
        ("median_s", float("nan"), "not a finite number or None"),
        ("limit", float("inf"), "not a finite number"),
        ("limit", None, "not a finite number"),
        ("limit", True, "not a finite number"),
        ("low_s", 10**400, "not a finite number or None"),
        ("op", "", "which is empty"),
        ("signature", 3, "not a text"),
        ("workload", "\udcff", "not a text"),
    ],
)
def test_a_field_without_a_legal_value_is_refused_by_name(ledger, field, value, says):
    with pytest.raises(LedgerError, match=f"{field} is .*{says}"):
        ledger.add(replace(verdict(), **{field: value}))
    assert ledger.verdicts() == []


def test_the_output_of_a_crashed_process_is_a_legal_reason(ledger):
    ledger.add(verdict("mine", outcome="crashed", reason=b"\xff\x00segv".decode("utf-8", "surrogateescape")))
    assert ledger.verdicts()[0].reason == "?\x00segv"


def test_verdicts_are_found_by_each_property(ledger):
    one, other = (
        verdict(),
        verdict("mine", op="swiglu", backend="cpu", workload="w", signature="s", fingerprint=ELSEWHERE),
    )
    ledger.add(one)
    ledger.add(other)
    assert ledger.verdicts("swiglu") == [other]
    for name in ("id", "signature", "workload", "backend", "provider", "outcome", "fingerprint"):
        assert ledger.verdicts(**{name: getattr(one, name)}) == [one], name
    assert ledger.verdicts(evidence="predicted") == []


def test_the_path_is_that_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PORTABLE_LEDGER", str(tmp_path / "deep" / "er" / "l.sqlite"))
    Ledger().add(verdict())
    assert len(Ledger(tmp_path / "deep/er/l.sqlite").verdicts()) == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PORTABLE_LEDGER")
    assert Ledger().path == tmp_path / ".local/share/portable/ledger.sqlite"


# Decisions.


def test_a_decision_gives_its_verdict(ledger):
    v = verdict()
    made = decide(ledger, v, "meets its SLO")
    assert ledger.decisions() == [made]
    assert (made.verdict, made.verdict_id, made.why, made.fingerprint) == (v, v.id, "meets its SLO", HERE.text)


def test_the_latest_decision_is_in_force_and_the_history_is_kept(ledger):
    decide(ledger, verdict())
    decide(ledger, verdict("mine"))
    assert in_force(ledger) == ["mine"]
    assert [d.provider for d in ledger.decisions(history=True)] == ["portable", "mine"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"outcome": "unmet"}, "its outcome is 'unmet'"),
        ({"outcome": "wrong"}, "its outcome is 'wrong'"),
        ({"evidence": "predicted"}, "it is only predicted"),
        ({"op": "swiglu"}, "its op is 'swiglu'"),
        ({"signature": "float32[9]"}, "its signature is 'float32"),
        ({"backend": "cuda"}, "its backend is 'cuda'"),
        ({"provider": "yours"}, "its provider is 'yours'"),
    ],
)
def test_a_kernel_is_not_decided_for_on_a_verdict_that_is_no_evidence(ledger, fields, says):
    v = replace(verdict("mine"), **fields)
    ledger.add(v)
    with pytest.raises(LedgerError, match=says):
        ledger.decide("rms_norm", "float32[8,64]", "xla", "mine", v.id, "because")
    assert ledger.decisions() == []


def test_a_decision_without_its_verdict_is_refused(ledger):
    with pytest.raises(LedgerError, match="holds no verdict 'nowhere'"):
        ledger.decide("rms_norm", "s", "xla", "portable", "nowhere", "because")


def test_each_machine_has_decisions_of_its_own(ledger):
    decide(ledger, verdict(fingerprint=ELSEWHERE))
    mine = decide(ledger, verdict("mine"))
    other = decide(ledger, verdict("other", fingerprint=ELSEWHERE))
    assert ledger.decisions() == [mine, other]
    assert ledger.decisions(fingerprint=HERE) == [mine]
    assert ledger.decisions(fingerprint=ELSEWHERE) == [other]
    assert ledger.decisions(fingerprint="a third machine") == [other]  # stale there, and shown as such


# Staleness.


def test_a_decision_is_fresh_on_the_machine_and_with_the_kernel_it_was_made_for(ledger):
    assert stale_reason(decide(ledger, verdict("mine")), HERE, "d1") == ""
    assert stale_reason(decide(ledger, verdict()), HERE.text, "") == ""


def test_every_part_that_changed_is_named(ledger):
    reason = stale_reason(decide(ledger, verdict("mine")), ELSEWHERE, "d2")
    assert reason == "driver 1 → 2; torch 2.13.0 → 2.14.0; kernel mine source d1 → d2"


def test_a_kernel_that_is_gone_or_in_quarantine_is_stale(ledger):
    made = decide(ledger, verdict("mine"))
    assert stale_reason(made, HERE, "") == "kernel mine is not registered here"
    ledger.quarantine("rms_norm", "mine", "wrong on NaN")
    assert stale_reason(ledger.decisions()[0], HERE, "d1") == "kernel mine is in quarantine: wrong on NaN"


def test_the_fingerprint_names_the_machine_and_every_version():
    print_ = fingerprint("cpu")
    wanted = {"device", "architecture", "driver", "runtime", "torch", "jax", "jaxlib", "triton", "portable"}
    assert set(print_.parts) == wanted
    assert all(print_.parts.values())
    assert Fingerprint.parse(print_.text) == print_
    assert fingerprint("xla").parts["runtime"].startswith("PJRT")


def test_a_part_that_only_one_fingerprint_has_is_a_change():
    assert changes('{"a":"1"}', '{"a":"1","b":"2"}') == ["b absent → 2"]
    assert changes("old", "new") == ["fingerprint old → new"]
    assert changes("same", "same") == []


# Rollback.


def test_rollback_restores_the_decision_before_the_last_one(ledger):
    first = decide(ledger, verdict(), "slow but right")
    decide(ledger, verdict("mine"))
    (restored,) = ledger.rollback("rms_norm")
    assert (restored.provider, restored.verdict, restored.why) == ("portable", first.verdict, "slow but right")
    assert ledger.decisions() == [restored]
    assert [d.provider for d in ledger.decisions(history=True)] == ["portable", "mine", "portable"]


def test_rollback_goes_on_to_the_beginning_and_then_refuses(ledger):
    for provider in ("portable", "mine", "yours"):
        decide(ledger, verdict(provider))
    assert [ledger.rollback("rms_norm")[0].provider for _ in range(3)] == ["mine", "portable", ""]
    assert ledger.decisions() == []
    with pytest.raises(LedgerError, match="no decision for rms_norm"):
        ledger.rollback("rms_norm")


def test_a_decision_after_a_rollback_rolls_back_to_what_was_restored(ledger):
    for provider in ("portable", "mine"):
        decide(ledger, verdict(provider))
    ledger.rollback("rms_norm")
    decide(ledger, verdict("yours"))
    assert ledger.rollback("rms_norm")[0].provider == "portable"


def test_renewed_evidence_does_not_hide_what_was_in_force_before(ledger):
    for provider in ("portable", "mine", "mine", "mine"):
        decide(ledger, verdict(provider))
    assert ledger.rollback("rms_norm")[0].provider == "portable"


def test_rollback_undoes_every_signature_of_the_op_or_the_one_named(ledger):
    for signature in ("a", "b"):
        for provider in ("portable", "mine"):
            decide(ledger, verdict(provider, signature=signature))
    decide(ledger, verdict("mine", op="swiglu"))
    ledger.rollback("rms_norm", signature="a")
    assert {(d.op, d.signature): d.provider for d in ledger.decisions("rms_norm")} == {
        ("rms_norm", "a"): "portable",
        ("rms_norm", "b"): "mine",
    }
    ledger.rollback("rms_norm", signature="b")
    assert [d.provider for d in ledger.decisions("rms_norm")] == ["portable", "portable"]
    assert [d.provider for d in ledger.decisions("swiglu")] == ["mine"]


# Quarantine.


def test_a_kernel_in_quarantine_is_ineligible_until_it_is_lifted(ledger):
    decide(ledger, verdict("mine"))
    ledger.quarantine("rms_norm", "mine", "segfault")
    assert ledger.quarantined("rms_norm", "mine") == "segfault"
    with pytest.raises(LedgerError, match="is in quarantine: segfault.*(?s:.*)--lift"):
        decide(ledger, verdict("mine"))
    ledger.lift("rms_norm", "mine")
    assert ledger.quarantined("rms_norm", "mine") == ""
    assert stale_reason(ledger.decisions()[0], HERE, "d1") == ""
    assert [q.reason for q in ledger.quarantines(history=True)] == ["segfault"]
    assert ledger.quarantines() == []


@pytest.mark.parametrize("of", [("", "mine", "r"), ("op", "", "r"), ("op", "mine", " "), ("op", "portable", "r")])
def test_a_quarantine_needs_a_kernel_and_a_reason(ledger, of):
    with pytest.raises(LedgerError, match="cannot quarantine"):
        ledger.quarantine(*of)


def test_lifting_what_is_not_in_quarantine_is_refused(ledger):
    with pytest.raises(LedgerError, match="op/mine is not in quarantine"):
        ledger.lift("op", "mine")


# Upkeep.


def test_prune_removes_old_verdicts_that_no_decision_rests_on(ledger):
    old = time.time() - YEAR_S
    unused, used, young = replace(verdict(), created=old), replace(verdict(), created=old), verdict()
    for v in (unused, young):
        ledger.add(v)
    decide(ledger, used)
    assert ledger.prune(dry_run=True).verdicts == (unused.id,)
    assert len(ledger.verdicts()) == 3
    assert ledger.prune().verdicts == (unused.id,)
    assert ledger.verdicts() == [young, used]


def test_prune_removes_the_history_of_other_machines_only_where_it_is_told_what_this_one_is(ledger):
    stays = decide(ledger, verdict())
    for provider in ("portable", "mine"):
        decide(ledger, verdict(provider, fingerprint=ELSEWHERE))
    assert ledger.prune(older_than_days=-1).decisions == 0
    assert ledger.prune(fingerprints={"xla": HERE}).decisions == 0  # too young
    gone = ledger.prune(older_than_days=-1, fingerprints={"xla": HERE})
    assert (gone.decisions, len(gone.verdicts)) == (2, 2)
    assert ledger.decisions(history=True) == [stays]


# Exchange.


@pytest.fixture
def other(tmp_path) -> Ledger:
    return Ledger(tmp_path / "other.sqlite")


def test_an_imported_ledger_has_the_same_verdicts_and_decisions_marked_as_imported(ledger, other, tmp_path):
    decide(ledger, verdict())
    made = decide(ledger, verdict("mine"), "meets")
    ledger.add(verdict("mine", evidence="predicted"))
    assert ledger.export_json(tmp_path / "e.json") == 3
    assert other.import_json(tmp_path / "e.json") == Imported(added=3, known=0, decisions=1)
    assert [v.evidence for v in other.verdicts()] == ["imported", "imported", "predicted"]
    assert [replace(v, evidence=w.evidence) for v, w in zip(other.verdicts(), ledger.verdicts(), strict=True)] == (
        ledger.verdicts()
    )
    (taken,) = other.decisions()
    assert (taken.provider, taken.why, taken.verdict_id) == ("mine", "meets", made.verdict_id)
    assert stale_reason(taken, HERE, "d1") == ""
    assert stale_reason(taken, ELSEWHERE, "d1").startswith("driver 1 → 2")


def test_importing_twice_or_what_was_exported_here_changes_nothing(ledger, tmp_path):
    decide(ledger, verdict("mine"))
    before = ledger.verdicts(), ledger.decisions()
    ledger.export_json(tmp_path / "e.json")
    assert ledger.import_json(tmp_path / "e.json") == Imported(0, 1, 0)
    assert (ledger.verdicts(), ledger.decisions()) == before


def test_an_import_never_replaces_what_was_decided_here(ledger, other, tmp_path):
    decide(ledger, verdict("mine"))
    decide(other, verdict())
    ledger.export_json(tmp_path / "e.json")
    assert other.import_json(tmp_path / "e.json").decisions == 0
    assert in_force(other) == ["portable"]


def edited(path: Path, change) -> Path:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


def redigested(record: dict, **fields) -> None:
    record.update(fields)
    record["digest"] = exchange.digest(record)


def test_a_verdict_that_does_not_match_its_digest_is_refused_by_name_and_nothing_is_imported(ledger, other, tmp_path):
    good, bad = verdict(), verdict("mine")
    ledger.add(good)
    ledger.add(bad)
    ledger.export_json(tmp_path / "e.json")
    edited(tmp_path / "e.json", lambda d: d["verdicts"][1].update(median_s=0.001))
    with pytest.raises(
        LedgerError, match=rf"verdict {bad.id} \(rms_norm/mine\): its content does not match its digest"
    ):
        other.import_json(tmp_path / "e.json")
    assert other.verdicts() == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(format="x"), "is not an exported ledger"),
        (lambda d: d.update(version=2), "has format version 2(?s:.*)upgrade portable"),
        (lambda d: d.pop("verdicts"), "'verdicts' is not a list of objects"),
        (lambda d: d.update(verdicts=[3]), "'verdicts' is not a list of objects"),
        (lambda d: d["verdicts"][0].pop("digest"), "does not match its digest"),
        (lambda d: redigested(d["verdicts"][0], extra=1), "unknown extra"),
        (lambda d: (d["verdicts"][0].pop("op"), redigested(d["verdicts"][0])), r"\(\?/mine\): no op"),
        (lambda d: redigested(d["verdicts"][0], outcome="great"), "outcome is 'great'"),
        (lambda d: redigested(d["verdicts"][0], limit=None), "limit is None"),
        (lambda d: redigested(d["verdicts"][0], outcome="wrong"), "cannot rest on verdict .* its outcome is 'wrong'"),
        (lambda d: d["decisions"][0].update(provider="x"), "decision rms_norm/x: its content does not match"),
        (lambda d: redigested(d["decisions"][0], why=3), "a field is not a text"),
        (lambda d: redigested(d["decisions"][0], verdict="nowhere"), "holds no verdict 'nowhere'"),
        (lambda d: redigested(d["decisions"][0], provider="x"), "its provider is 'mine'"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(ledger, other, tmp_path, change, says):
    decide(ledger, verdict("mine"))
    ledger.export_json(tmp_path / "e.json")
    with pytest.raises(LedgerError, match=says):
        other.import_json(edited(tmp_path / "e.json", change))
    assert (other.verdicts(), other.decisions()) == ([], [])


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\ud800"])
def test_what_is_not_json_is_refused(other, tmp_path, text):
    (tmp_path / "e.json").write_text(text, errors="surrogatepass")
    with pytest.raises(LedgerError, match="is not JSON"):
        other.import_json(tmp_path / "e.json")


def test_a_path_that_cannot_be_read_or_written_is_named(ledger, tmp_path):
    with pytest.raises(LedgerError, match=r"cannot read .*nowhere\.json: No such file"):
        ledger.import_json(tmp_path / "nowhere.json")
    with pytest.raises(LedgerError, match=r"cannot write .*e\.json: No such file"):
        ledger.export_json(tmp_path / "no" / "e.json")


# Files that are damaged, foreign, newer, older, read-only, locked.


def many(ledger: Ledger, number: int = 200) -> None:
    for _ in range(3):
        ledger.add(verdict())
    with sqlite3.connect(ledger.path) as db:
        for n in range(number):
            columns = ", ".join(f'"{c}"' for c in storage_columns() if c not in ("sequence", "id"))
            db.execute(
                f"INSERT INTO verdicts (id, {columns}) SELECT 'n{n}', {columns} FROM verdicts WHERE sequence = 1"
            )
    db.close()


def storage_columns() -> list[str]:
    db = sqlite3.connect(":memory:")
    db.executescript(storage.SCHEMA[0])
    return [row[1] for row in db.execute("PRAGMA table_info(verdicts)")]


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(8192))


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def truncated_at_a_page(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 8192 * 4096)


def truncated_in_the_header(path: Path) -> None:
    os.truncate(path, 50)


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(os.urandom(3 * 4096))


@pytest.mark.parametrize("damage", [garbage, truncated, truncated_at_a_page, truncated_in_the_header, overwritten])
@pytest.mark.parametrize("first", ["read", "write"])
def test_a_damaged_file_is_set_aside_with_a_warning_and_a_new_one_begun(ledger, damage, first, caplog):
    many(ledger)
    damage(ledger.path)
    left = ledger.path.read_bytes()
    new = Ledger(ledger.path)
    with caplog.at_level(logging.WARNING, "portable"):
        if first == "read":
            assert new.verdicts() == []
        v = verdict()
        new.add(v)
    assert new.verdicts() == [v]
    (aside,) = ledger.path.parent.glob("ledger.sqlite.damaged-*[0-9Z]")
    assert aside.read_bytes() == left
    (message,) = [r.getMessage() for r in caplog.records]
    assert str(ledger.path) in message
    assert str(aside) in message


def test_a_second_damaged_file_does_not_replace_the_first(ledger):
    for _ in range(3):
        garbage(ledger.path)
        ledger.add(verdict())
    assert len(list(ledger.path.parent.glob("ledger.sqlite.damaged-*"))) == 3
    assert len(ledger.verdicts()) == 1


def test_processes_that_find_the_file_damaged_at_once_set_it_aside_once_and_lose_nothing(ledger):
    many(ledger)
    truncated(ledger.path)
    told = finished(started(ledger.path, 8, 5))
    assert sorted(v.id for v in ledger.verdicts()) == sorted(told)
    assert len(list(ledger.path.parent.glob("ledger.sqlite.damaged-*[0-9Z]"))) == 1


def test_a_file_that_is_set_aside_while_it_is_opened_for_reading_is_an_empty_ledger(ledger, monkeypatch):
    ledger.add(verdict())
    connect = storage.Storage._connect

    def too_late(self, uri):
        self.path.unlink(missing_ok=True)
        return connect(self, uri)

    monkeypatch.setattr(storage.Storage, "_connect", too_late)
    assert Ledger(ledger.path).verdicts() == []


def test_an_empty_file_is_an_empty_ledger(ledger, caplog):
    ledger.path.touch()
    assert ledger.verdicts() == []
    ledger.add(verdict())
    assert len(ledger.verdicts()) == 1
    assert caplog.records == []


def test_the_file_of_another_program_is_refused_and_left_alone(ledger):
    with sqlite3.connect(ledger.path) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    before = ledger.path.read_bytes()
    for use in (ledger.verdicts, lambda: ledger.add(verdict())):
        with pytest.raises(LedgerError, match=r"another program(?s:.*)PORTABLE_LEDGER"):
            use()
    assert ledger.path.read_bytes() == before


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_another_program_s_database_stays_untouched_whatever_is_open(ledger, mode):
    theirs = sqlite3.connect(ledger.path)
    theirs.execute(f"PRAGMA journal_mode = {mode}")
    theirs.execute("CREATE TABLE theirs (x)")
    theirs.commit()
    before = {p.name: p.read_bytes() for p in ledger.path.parent.iterdir() if not p.name.endswith("-shm")}
    for use in (ledger.verdicts, lambda: ledger.add(verdict())):
        with pytest.raises(LedgerError, match=r"another program(?s:.*)PORTABLE_LEDGER"):
            use()
    after = {p.name: p.read_bytes() for p in ledger.path.parent.iterdir() if not p.name.endswith("-shm")}
    theirs.close()
    assert after == before


def test_another_program_s_database_that_is_damaged_is_not_set_aside(tmp_path):
    path = tmp_path / "history"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 100)  # the page that says which tables there are
    refused_and_untouched(path, "another program")


def refused_and_untouched(path: Path, match: str) -> None:
    """Neither reading nor writing changes the file or its folder."""
    before, beside = path.read_bytes(), sorted(path.parent.iterdir())
    for use in (Ledger(path).verdicts, lambda: Ledger(path).add(verdict())):
        with pytest.raises(
            LedgerError, match=rf"{match}(?s:.*)set PORTABLE_LEDGER to another path, or remove the file"
        ):
            use()
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == beside


@pytest.mark.parametrize("content", ["import torch\n", "x", "SQL" * 5000], ids=["text", "byte", "long"])
def test_a_file_that_was_never_a_ledger_is_refused_and_untouched(tmp_path, content):
    path = tmp_path / "models.py"
    path.write_text(content)
    refused_and_untouched(path, "is not a ledger")


def test_a_ledger_of_any_name_that_is_damaged_is_set_aside(tmp_path):
    ledger = Ledger(tmp_path / "measurements")
    many(ledger)
    truncated(ledger.path)
    assert ledger.verdicts() == []
    assert len(list(tmp_path.glob("measurements.damaged-*[0-9Z]"))) == 1


def test_a_ledger_that_is_still_in_the_log_alone_is_read(tmp_path):
    ledger = Ledger(tmp_path / "measurements")
    holder = sqlite3.connect(ledger.path)
    holder.execute("PRAGMA journal_mode = WAL")
    holder.execute("SELECT count(*) FROM sqlite_master").fetchall()
    ledger.add(v := verdict())  # who closes the file last moves the log into it: here that is the holder
    assert ledger.path.read_bytes()[storage.APPLICATION_AT :][:4] == bytes(4)
    assert Ledger(ledger.path).verdicts() == [v]
    holder.close()


def test_a_newer_version_is_refused_by_name_and_left_alone(ledger):
    ledger.add(verdict())
    with sqlite3.connect(ledger.path) as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    before = ledger.path.read_bytes()
    for use in (ledger.verdicts, lambda: ledger.add(verdict())):
        with pytest.raises(LedgerError, match=r"is of version 7; this portable knows .* 1(?s:.*)upgrade portable"):
            use()
    assert ledger.path.read_bytes() == before


NEXT = (*storage.SCHEMA, "ALTER TABLE verdicts ADD COLUMN more TEXT; UPDATE verdicts SET more = id;")


@pytest.mark.parametrize("first", ["read", "write"])
def test_an_upgrade_of_the_schema_keeps_every_verdict(ledger, monkeypatch, first):
    stored = [verdict() for _ in range(5)]
    for v in stored:
        ledger.add(v)
    made = decide(ledger, verdict("mine"))
    monkeypatch.setattr(storage, "SCHEMA", NEXT)
    new = Ledger(ledger.path)
    if first == "write":
        new.quarantine("rms_norm", "yours", "slow")
    assert new.verdicts() == [*stored, made.verdict]
    assert new.decisions() == [made]
    with sqlite3.connect(ledger.path) as db:
        assert db.execute("SELECT count(*) FROM verdicts WHERE more = id").fetchone() == (6,)
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
    db.close()


def test_an_upgrade_that_fails_leaves_the_ledger_at_its_old_version(ledger, monkeypatch):
    v = verdict()
    ledger.add(v)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "SCHEMA", (*storage.SCHEMA, "DROP TABLE decisions; DELETE FROM verdicts; NONSENSE;"))
        with pytest.raises(LedgerError, match="NONSENSE"):
            ledger.verdicts()
    assert ledger.verdicts() == [v]


def test_the_folder_of_the_ledger_may_not_be_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="cannot write the ledger"):
        Ledger(tmp_path / "file" / "l.sqlite").add(verdict())
    with pytest.raises(LedgerError, match="cannot read the ledger"):
        Ledger(tmp_path).verdicts()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that another user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="ledger-test-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


UNPRIVILEGED = """
import json, os, sys
sys.path.insert(0, sys.argv[2])
from portable.errors import LedgerError
from portable.kernels.ledger import Ledger, Verdict
import portable.kernels.exchange, tempfile, shutil, logging
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
ledger, out = Ledger(sys.argv[1]), {}
try:
    out["ids"] = [v.id for v in ledger.verdicts()]
    ledger.add(Verdict.new(op="o", signature="s", backend="b", provider="portable", outcome="met", metric="ratio",
                           limit=1, fingerprint="f"))
except LedgerError as failure:
    out["error"] = str(failure)
print(json.dumps(out))
"""


def unprivileged(path: Path) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(path), str(ROOT)], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"stderr": done.stderr}


def read_only(folder: Path, mode: int) -> None:
    for path in folder.iterdir():
        path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    folder.chmod(mode)


def test_a_read_only_folder_can_be_read_and_refuses_to_be_written(shared):
    ledger = Ledger(shared / "ledger.sqlite")
    ids = [ledger.add(verdict()) for _ in range(3)]
    read_only(shared, 0o555)
    result = unprivileged(ledger.path)
    assert result["ids"] == ids
    assert f"cannot be written: its folder {shared} is read-only" in result["error"]
    assert "PORTABLE_LEDGER" in result["error"]


def test_a_read_only_file_can_be_read_and_refuses_to_be_written(shared):
    ledger = Ledger(shared / "ledger.sqlite")
    ids = [ledger.add(verdict()) for _ in range(3)]
    read_only(shared, 0o777)
    result = unprivileged(ledger.path)
    assert result["ids"] == ids
    assert "cannot be written: the file is read-only" in result["error"]


def test_a_read_only_ledger_shows_what_is_only_in_its_log(shared, ledger):
    ids = [ledger.add(verdict())]
    with ledger_open(ledger.path):
        ids += [ledger.add(verdict()) for _ in range(3)]
        for suffix in ("", "-wal"):
            shutil.copy(f"{ledger.path}{suffix}", shared)
    assert (shared / "ledger.sqlite-wal").stat().st_size > 0
    read_only(shared, 0o555)
    assert unprivileged(shared / "ledger.sqlite")["ids"] == ids


@contextlib.contextmanager
def ledger_open(path: Path) -> Iterator[None]:
    """Another program has the file open: its log is kept."""
    db = sqlite3.connect(path)
    db.execute("SELECT count(*) FROM verdicts").fetchall()
    yield
    db.close()


def test_a_read_only_ledger_that_is_damaged_counts_as_empty_with_a_warning(shared):
    garbage(shared / "ledger.sqlite")
    read_only(shared, 0o555)
    result = unprivileged(shared / "ledger.sqlite")
    assert result["ids"] == []
    assert "is damaged and read-only" in result["stderr"]


def test_a_ledger_that_is_locked_for_a_while_is_waited_for(ledger):
    ledger.add(verdict())
    db = sqlite3.connect(ledger.path, isolation_level=None, check_same_thread=False)
    db.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.5, lambda: db.execute("ROLLBACK"))
    timer.start()
    ledger.add(verdict())
    timer.join()
    db.close()
    assert len(ledger.verdicts()) == 2


def test_a_ledger_that_stays_locked_is_a_clear_error_and_can_still_be_read(ledger):
    ledger.add(verdict())
    db = sqlite3.connect(ledger.path, isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    impatient = Ledger(ledger.path, timeout_s=0.2)
    with pytest.raises(LedgerError, match=r"stayed locked for 0\.2 s(?s:.*)try again"):
        impatient.add(verdict())
    assert len(impatient.verdicts()) == 1
    db.close()


def test_a_full_disk_is_a_clear_error_and_changes_nothing(ledger, monkeypatch):
    ledger.add(verdict())
    connect = storage.Storage._connect

    def small(self, uri):
        db = connect(self, uri)
        db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
        return db

    monkeypatch.setattr(storage.Storage, "_connect", small)
    with pytest.raises(LedgerError, match=r"is full(?s:.*)make room"):
        ledger.add(verdict(reason="x" * 100_000))
    assert len(ledger.verdicts()) == 1


# Many processes; processes that are killed.

WRITER = """
import sys
sys.path.insert(0, sys.argv[3])
from portable.kernels.ledger import Ledger, Verdict
print("ready", flush=True)
ledger = Ledger(sys.argv[1], timeout_s=60)
for _ in range(int(sys.argv[2])):
    v = Verdict.new(op="o", signature="s", backend="b", provider="portable", outcome="met", metric="ratio", limit=1,
                    fingerprint="f", reason="r" * 2_000)
    ledger.add(v)
    print(v.id, flush=True)
    ledger.decide("o", "s", "b", "portable", v.id, "because")
"""


class Writer:
    """A process that adds verdicts, says so after each, and decides on each."""

    def __init__(self, path: Path, number: int) -> None:
        command = [sys.executable, "-c", WRITER, str(path), str(number), str(ROOT)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.out = self.process.stdout

    def ready(self) -> None:
        assert self.out.readline() == "ready\n"

    def finish(self) -> list[str]:
        """What it said it had stored, once it is done."""
        said = self.out.read().split()
        assert self.process.wait(timeout=120) == 0
        return said

    def kill(self) -> list[str]:
        """What it had said when it died; a line that it did not end does not count."""
        self.process.send_signal(signal.SIGKILL)
        said = self.out.read()
        self.process.wait(timeout=120)
        return said[: said.rfind("\n") + 1].split()


def started(path: Path, processes: int, number: int) -> list[Writer]:
    return [Writer(path, number) for _ in range(processes)]


def finished(writers: list[Writer]) -> list[str]:
    for w in writers:
        w.ready()
    return [v for w in writers for v in w.finish()]


def intact(path: Path) -> bool:
    db = sqlite3.connect(path)
    found = db.execute("PRAGMA integrity_check").fetchall() + db.execute("PRAGMA foreign_key_check").fetchall()
    db.close()
    return found == [("ok",)]


def test_eight_processes_that_write_at_once_from_the_first_moment_lose_nothing(ledger):
    told = finished(started(ledger.path, 8, 15))
    assert len(told) == 8 * 15
    assert sorted(v.id for v in ledger.verdicts()) == sorted(told)
    assert len(ledger.decisions(history=True)) == 8 * 15
    assert len(ledger.decisions()) == 1
    assert intact(ledger.path)


@pytest.mark.parametrize(
    ("kills", "seed"), [(24, 0), pytest.param(240, 1, marks=pytest.mark.slow)], ids=["24-kills", "240-kills"]
)
def test_a_kill_at_any_moment_loses_no_verdict_that_was_stored(tmp_path, kills, seed):
    dice = random.Random(seed)
    together, path, killed = 6, tmp_path / "0.sqlite", 0
    told: list[str] = []
    while killed < kills:
        if killed % (4 * together) == 0:
            path, told = tmp_path / f"{killed}.sqlite", []  # a new one: the making of the file is interrupted as well
        writers = started(path, together, 100_000)
        for w in writers:
            w.ready()
        for w in dice.sample(writers, together):
            time.sleep(dice.uniform(0, 0.08))
            told += w.kill()
            killed += 1
        if path.exists():
            assert intact(path)
        stored = {v.id for v in Ledger(path, timeout_s=60).verdicts()}
        assert set(told) <= stored
        assert len(stored) <= len(told) + killed  # at most the one that each was writing
    assert told
    assert list(tmp_path.glob("*damaged*")) == []


FORKING = """
import os, sys
sys.path.insert(0, sys.argv[2])
from portable.kernels.ledger import Ledger, Verdict
ledger = Ledger(sys.argv[1])
def add():
    ledger.add(Verdict.new(op="o", signature="s", backend="b", provider="portable", outcome="met", metric="ratio",
                           limit=1, fingerprint="f"))
add()
if child := os.fork():
    add()
    assert os.waitpid(child, 0)[1] == 0
else:
    add()
"""


def test_a_process_that_forks_shares_nothing_with_its_child(ledger):
    subprocess.run([sys.executable, "-c", FORKING, str(ledger.path), str(ROOT)], check=True, timeout=60)
    assert len(ledger.verdicts()) == 3


def test_threads_share_one_ledger(ledger):
    threads = [threading.Thread(target=lambda: [ledger.add(verdict()) for _ in range(5)]) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(ledger.verdicts()) == 30


# The command line.


def command(ledger: Ledger, *args: str) -> str:
    env = {"PORTABLE_LEDGER": str(ledger.path)}
    with mock.patch("portable.kernels.command.console", Console(width=250)):
        result = CliRunner().invoke(cli.app, ["ledger", *args], env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_show_says_what_is_in_force_and_what_is_stale_and_why(ledger):
    fresh, stale = verdict(fingerprint=fingerprint("cpu"), backend="cpu"), verdict("mine", backend="cpu", op="swiglu")
    decide(ledger, fresh, "meets its SLO")
    decide(ledger, stale)
    shown = command(ledger, "show")
    assert f"portable meets its SLO {fresh.id[:8]} measured" in shown
    assert "in force" in shown
    assert "stale: architecture" in shown
    assert "torch 2.13.0 → " in shown
    assert "2 verdicts, 2 decisions, 1 stale" in shown
    assert "500 ms [250, 750] ratio ≤ 1.25 measured" in command(ledger, "show", "--verdicts")


@pytest.mark.parametrize("arguments", [("show",), ("show", "--json"), ("export", "out.json")])
def test_commands_that_read_report_a_damaged_ledger_and_move_nothing(ledger, arguments):
    many(ledger)
    truncated(ledger.path)
    before = ledger.path.read_bytes()
    with pytest.raises(LedgerError, match=r"is damaged(?s:.*)left as it is(?s:.*)begins a new one"):
        command(ledger, *arguments)
    assert ledger.path.read_bytes() == before
    assert list(ledger.path.parent.glob("*damaged*")) == []


def test_show_speaks_json(ledger):
    made = decide(ledger, verdict(backend="nowhere"))
    decide(ledger, verdict(op="swiglu"))
    document = json.loads(command(ledger, "show", "--json", "--op", "rms_norm"))
    (row,) = document["decisions"]
    assert row["verdict"]["id"] == made.verdict_id
    assert "unknown backend 'nowhere'" in row["state"]
    assert [v["id"] for v in document["verdicts"]] == [made.verdict_id]


@pytest.fixture
def mine(kernel):
    """A kernel rms_norm/mine."""
    kernel("rms_norm", provider="mine", backends=("xla",), abi="jax")(lambda x, weight, eps: x)


@pytest.mark.parametrize("reason", [(), ("--reason", "slow")])
def test_a_kernel_that_is_not_registered_cannot_be_quarantined_by_mistake(ledger, mine, reason):
    with pytest.raises(ConfigError, match=r"rms_norm has no kernel by 'mime'(?s:.*)it has: .*mine"):
        command(ledger, "quarantine", "rms_norm", "mime", *reason)
    with pytest.raises(ConfigError, match=r"there is no kernel of 'rms_nrm'(?s:.*)one of .*rms_norm"):
        command(ledger, "quarantine", "rms_nrm", "mine", *reason)
    assert ledger.quarantines() == []


def test_a_quarantine_of_a_kernel_that_is_gone_can_be_lifted(ledger):
    ledger.quarantine("rms_norm", "gone", "slow")
    assert "is eligible again" in command(ledger, "quarantine", "rms_norm", "gone", "--lift")


def test_the_help_says_that_a_reason_is_required(ledger):
    shown = command(ledger, "quarantine", "--help").replace("│", " ")
    assert "Required, unless --lift" in " ".join(shown.split())


def test_rollback_quarantine_and_lift_on_the_command_line(ledger, mine):
    for provider in ("portable", "mine"):
        decide(ledger, verdict(provider))
    assert "rms_norm float32[8,64] on xla: portable (verdict" in command(ledger, "rollback", "rms_norm")
    assert "portable: nothing is decided" in command(ledger, "rollback", "rms_norm")
    assert "is in quarantine" in command(ledger, "quarantine", "rms_norm", "mine", "--reason", "wrong on NaN")
    assert "in quarantine: rms_norm/mine since" in command(ledger, "show")
    assert "is eligible again" in command(ledger, "quarantine", "rms_norm", "mine", "--lift")
    with pytest.raises(LedgerError, match="no reason"):
        command(ledger, "quarantine", "rms_norm", "mine")


def test_export_import_and_prune_on_the_command_line(ledger, other, tmp_path):
    decide(ledger, verdict("mine"))
    ledger.add(replace(verdict(), created=time.time() - YEAR_S))
    path = str(tmp_path / "e.json")
    assert "2 verdicts written" in command(ledger, "export", path)
    assert "2 verdicts imported; 1 decision came into force" in command(other, "import", path)
    assert "0 verdicts imported, 2 known already" in command(other, "import", path)
    assert "would be removed: 1 verdict," in command(other, "prune", "--dry-run")
    assert "removed: 1 verdict," in command(other, "prune")
