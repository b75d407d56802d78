"""README's table of backends says what the committed reports show."""

import json

import pytest

from portable import backends
from portable.backends.diagnosis import diagnosis
from tests.conformance.backend_matrix import PATHS, README, reports, state, table, written


def report(backend, evidence="runs", passed=3, failed=0, complete=True):
    counts = {"passed": passed, "failed": failed, "not_run": 0, "failures": []}
    return {
        "date": "2026-12-01",
        "complete": complete,
        "versions": {"torch": "2.13.0"},
        "backends": {backend: {evidence: counts, "hardware": {"device": "H200"}}},
    }


def test_readme_has_the_table_that_the_reports_make():
    text = README.read_text(encoding="utf-8")
    assert text == written(text, table(reports())), "run python -m tests.conformance.backend_matrix"


def test_every_backend_has_a_row():
    assert set(PATHS) == set(backends.BUILTIN)


def test_doctor_claims_what_the_table_does():
    claimed = {row["name"]: row["evidence"] for row in diagnosis()["backends"]}
    shown = {name: state(name, reports()) for name in PATHS}
    elsewhere = {name for name in shown if shown[name].startswith("verified on")}  # a device of another machine
    assert [name for name in PATHS if name not in elsewhere and not shown[name].startswith(claimed[name])] == []


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], "contract only"),
        ([report("cuda")], "verified on H200 (2026-12-01, torch 2.13.0)"),
        ([report("cuda"), report("cuda")], "verified on H200 (2026-12-01, torch 2.13.0)"),
        ([report("cuda:h200", "compiles")], "compiled for h200"),
        ([report("cuda:h200", "compiles"), report("cuda")], "verified on H200 (2026-12-01, torch 2.13.0)"),
        (
            [report("cuda", failed=2)],
            "verified on H200 (2026-12-01, torch 2.13.0), but for 2 of 5 tests of `cuda`",
        ),
        ([report("cuda:h200", "compiles", failed=1)], "compiled for h200, but for 1 of 4 tests of `cuda:h200`"),
        ([report("cuda", passed=0)], "contract only"),
        ([report("cuda", passed=0, failed=3)], "contract only"),
        ([report("rocm")], "contract only"),
        (
            [report("cuda", complete=False)],
            "verified on H200 (2026-12-01, torch 2.13.0; the first 3 tests alone)",
        ),
    ],
)
def test_a_state_is_the_strongest_evidence_and_no_failure_is_hidden(found, expected):
    assert state("cuda", found) == expected


@pytest.mark.parametrize("name", ["cpu", "xla"])
def test_what_every_change_is_tested_on_is_verified_here(name):
    assert state(name, [report(name)]) == "verified here"
    assert state(name, list(reports())) == "verified here"


def test_the_results_of_a_device_check_are_a_report(tmp_path):
    (tmp_path / "cuda.json").write_text(json.dumps({"steps": [], "conformance": report("cuda")}))
    (tmp_path / "broken.json").write_text(json.dumps({"steps": [], "conformance": None}))
    assert list(reports([tmp_path])) == [report("cuda")]
