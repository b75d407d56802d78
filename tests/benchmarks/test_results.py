"""results.json, and what a comparison with an earlier one finds."""

import json
import math

import pytest

from benchmarks import results
from portable.errors import ConfigError
from portable.slo.statistics import Interval
from tests.benchmarks.stubs import measured

HERE = {"device": "EPYC", "architecture": "x86", "torch": "2.13"}


@pytest.fixture
def content_of(rows_of):
    def make(figures, fingerprint=HERE, **options):
        rows = rows_of(
            {name: m if not isinstance(m, tuple) else measured(*m) for name, m in figures.items()}, **options
        )
        return results.to_dict(rows, backend="xla", suite="quick", fingerprint=fingerprint)

    return make


def kinds(findings):
    return [(f.kind, f.workload) for f in findings]


def test_what_is_written_is_read_again(content_of, tmp_path):
    path = tmp_path / "results.json"
    content = content_of({"a/b": (0.01, 0.01)})
    results.write(path, content)
    assert results.read(path) == content
    assert content["fingerprint"] == HERE
    assert len(content["rows"][0]["samples_s"]["portable"]) == 7


def test_numbers_that_are_not_finite_become_null(content_of):
    row = content_of({"a/b": (0.01, 0.01)})["rows"][0]
    assert row["latency_s"]["portable"]["median"] == 0.01
    assert results._finite({"x": [math.inf, math.nan, 1.0]}) == {"x": [None, None, 1.0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[]", "it has no rows"),
        ('{"schema": 99, "rows": []}', "schema 99, this version reads 1"),
        ('{"schema": 1, "rows": [{"workload": "a"}]}', "a row lacks"),
    ],
)
def test_a_baseline_that_is_none_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        results.read(path)
    assert str(path) in str(raised.value)


def test_noise_is_no_finding(content_of):
    before, now = content_of({"a/b": (0.0100, 0.01)}), content_of({"a/b": (0.0104, 0.01)})
    assert results.compare(now, before) == []


def test_a_regression_beyond_the_noise_is_found(content_of):
    before, now = content_of({"a/b": (0.010, 0.01)}), content_of({"a/b": (0.012, 0.01)})
    (found,) = results.compare(now, before)
    assert (found.kind, found.workload, found.fails) == ("regressed", "a/b", True)
    assert "10 → 12 ms (1.20×)" in found.text


def test_a_machine_that_is_slower_altogether_is_no_regression(content_of):
    before, now = content_of({"a/b": (0.010, 0.010)}), content_of({"a/b": (0.015, 0.015)})
    assert results.compare(now, before) == []


def test_an_unexplained_win_is_found(content_of):
    before, now = content_of({"a/b": (0.010, 0.01)}), content_of({"a/b": (0.002, 0.01)})
    assert kinds(results.compare(now, before)) == [("unexplained win", "a/b")]


def test_a_win_by_new_software_or_a_kernel_is_explained(content_of, rows_of):
    before = content_of({"a/b": (0.010, 0.01)})
    assert results.compare(content_of({"a/b": (0.002, 0.01)}, {**HERE, "torch": "2.14"}), before) == []
    rows = rows_of({"a/b": measured(0.010, 0.01)})
    rows[0].state, rows[0].provider, rows[0].kernel_s = "kernel", "aten", Interval(0.002, 0.0019, 0.0021)
    now = results.to_dict(rows, backend="xla", suite="quick", fingerprint=HERE)
    assert results.compare(now, before) == []


def test_a_missing_row_is_found_and_a_new_one_is_named(content_of):
    before, now = content_of({"a/old": (0.01, 0.01)}), content_of({"a/new": (0.01, 0.01)})
    found = results.compare(now, before)
    assert kinds(found) == [("missing", "a/old"), ("new", "a/new")]
    assert [f.fails for f in found] == [True, False]


def test_only_the_workloads_that_were_asked_for_can_be_missing(content_of):
    before, now = content_of({"a/1": (0.01, 0.01), "a/2": (0.01, 0.01)}), content_of({"a/1": (0.01, 0.01)})
    assert results.compare(now, before, selected=["a/1"]) == []


def test_a_row_that_fails_or_is_wrong_now_has_regressed(content_of):
    before = content_of({"a/1": (0.01, 0.01), "a/2": (0.01, 0.01)})
    now = content_of({"a/1": RuntimeError("gone"), "a/2": measured(0.01, 0.01, wrong="off")})
    assert kinds(results.compare(now, before)) == [("regressed", "a/1"), ("regressed", "a/2")]
    json.dumps(now, allow_nan=False)


@pytest.mark.parametrize("part", ["device", "architecture"])
def test_runs_of_other_hardware_are_not_compared(content_of, part):
    now = content_of({"a/b": (0.01, 0.01)}, {**HERE, part: "other"})
    with pytest.raises(ConfigError, match=f"another {part}"):
        results.compare(now, content_of({"a/b": (0.01, 0.01)}))
