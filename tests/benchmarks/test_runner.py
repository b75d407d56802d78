"""The runner: each workload becomes a row with its state, whatever happens to it."""

import pytest

from benchmarks import gating
from benchmarks.gating import Decided
from benchmarks.runner import run, worst_first
from benchmarks.text import decision, limit, seconds, spread, tally
from portable.slo.gate import Outcome
from portable.slo.statistics import Interval
from tests.benchmarks.stubs import SLOS, measured, workload


def test_a_row_is_met_unmet_wrong_or_failed(rows_of):
    rows = rows_of(
        {
            "a/met": measured(0.01, 0.01),
            "a/unmet": measured(0.02, 0.01),
            "a/wrong": measured(0.001, 0.01, wrong="result 0 is off by 0.5 of its scale"),
            "a/failed": RuntimeError("no lowering\nmore"),
        }
    )
    assert [row.state for row in rows] == ["met", "unmet", "wrong", "failed"]
    assert rows[2].reason == "result 0 is off by 0.5 of its scale"
    assert rows[3].reason == "RuntimeError: no lowering"


def test_rows_are_shown_worst_first(rows_of):
    rows = rows_of(
        {
            "a/met": measured(0.01, 0.01),
            "a/unmet": measured(0.02, 0.01),
            "a/worse": measured(0.05, 0.01),
            "a/failed": RuntimeError("x"),
        }
    )
    assert [row.workload for row in worst_first(rows)] == ["a/failed", "a/worse", "a/unmet", "a/met"]


def test_a_row_has_its_figures(rows_of):
    (row,) = rows_of({"a/met": measured(0.01, 0.02)})
    assert row.latency_s["portable"].median == pytest.approx(0.01)
    assert row.ratios["eager"].median == pytest.approx(0.5)
    assert row.best_native == "eager"
    assert row.ideal_s == pytest.approx(0.001)  # 10 MB at 10 GB/s
    assert row.roofline == pytest.approx(0.1)
    assert row.p99_s["portable"] == pytest.approx(0.0101)


def test_without_an_slo_a_row_is_unjudged():
    (row,) = run([workload("a/b")], "xla", {}, budget_s=1.0, measurer=lambda *_, **__: measured(0.02, 0.01))
    assert (row.state, row.reason) == ("unjudged", "no SLO")


def test_the_gate_is_asked_about_correct_rows_alone_and_its_word_counts(rows_of):
    asked = []

    def gate(found, row, slo, *, backend, budget_s):
        asked.append((found.name, slo, backend))
        assert budget_s > 0
        if row.state == "met":
            return Decided("portable", None, row.reason)
        return Decided("aten", Interval(0.011, 0.010, 0.012), "kernel 1.02×, correct on 14 cases")

    results = {
        "a/met": measured(0.01, 0.01),
        "a/slow": measured(0.02, 0.01),
        "a/wrong": measured(0.02, 0.01, wrong="no"),
    }
    met, slow, wrong = rows_of(results, gate=gate)
    assert asked == [("a/met", SLOS["*"], "xla"), ("a/slow", SLOS["*"], "xla")]
    assert (met.state, met.provider) == ("met", "portable")
    assert (slow.state, slow.provider, slow.kernel_s.median) == ("kernel", "aten", 0.011)
    assert wrong.state == "wrong"


def test_a_gate_that_finds_none_leaves_the_row_unmet_with_its_reasons(rows_of):
    gate = lambda *_, **__: Decided("portable", None, "aten wrong: on zero-size")  # noqa: E731
    (row,) = rows_of({"a/slow": measured(0.02, 0.01)}, gate=gate)
    assert (row.state, row.reason) == ("unmet", "aten wrong: on zero-size")


def test_an_op_is_judged_by_what_it_costs_inside_a_program():
    inside = measured(0.01, 0.01).samples_s
    gate = lambda *_, **__: Decided("portable", None, "meets it", True, "", inside)  # noqa: E731
    measurer = lambda *_, **__: measured(0.02, 0.01)  # noqa: E731
    (row,) = run([workload("a/b")], "xla", SLOS, budget_s=1.0, gate=gate, measurer=measurer)
    assert (row.state, row.latency_s["portable"].median) == ("met", pytest.approx(0.01))
    assert row.notes == ["figures are of a call inside a program; a call by itself takes 20 ms"]


def test_the_time_that_is_left_is_shared_and_inductor_left_out_where_it_does_not_fit():
    now, calls = [0.0], []

    def measurer(found, backend, *, budget_s, with_inductor, **_):
        calls.append((round(budget_s, 6), with_inductor))
        now[0] += 4.0
        result = measured(0.01, 0.01)
        result.compile_s["inductor"] = 1.6
        return result

    list(run([workload(f"a/{i}") for i in range(3)], "xla", SLOS, budget_s=12, measurer=measurer, clock=lambda: now[0]))
    assert calls == [(4.0, True), (4.0, True), (4.0, True)]
    now[0], calls[:] = 0.0, []
    list(run([workload(f"a/{i}") for i in range(3)], "xla", SLOS, budget_s=9, measurer=measurer, clock=lambda: now[0]))
    assert calls == [(3.0, True), (2.5, True), (1.0, False)]


def test_a_row_is_yielded_as_soon_as_it_is_known():
    measuring = []

    def measurer(found, backend, **_):
        measuring.append(found.name)
        return measured(0.01, 0.01)

    rows = run([workload("a/1"), workload("a/2")], "xla", SLOS, budget_s=1.0, measurer=measurer)
    assert next(rows).workload == "a/1"
    assert measuring == ["a/1"]


def test_rows_read_as_the_user_is_shown_them(rows_of):
    rows = rows_of({"a/met": measured(0.01, 0.01), "a/slow": measured(0.02, 0.01), "a/failed": RuntimeError("x")})
    assert [decision(row).split(":")[0] for row in rows] == ["portable ✓", "UNMET", "FAILED"]
    assert limit(rows[0]) == "12.5 ms"
    assert tally(rows) == "1 met · 1 UNMET · 1 FAILED"
    assert tally([]) == "nothing was measured"
    assert [seconds(x) for x in (0.0241, 4.2e-6, 0.151, None)] == ["24.1 ms", "4.2 µs", "151 ms", "–"]
    assert spread(Interval(0.0241, 0.0235, 0.0247)) == "24.1 ms ±0.6"


@pytest.mark.parametrize(("ops", "said"), [(1, "1 op with kernels: 0 by a kernel"), (2, "2 ops with kernels: 0")])
def test_a_workload_says_how_many_of_its_ops_have_kernels(ops, said):
    summary = gating._summary([Outcome("portable", True, "")] * ops, lambda: {}, None)
    assert summary.reason.startswith(said)
