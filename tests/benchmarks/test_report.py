"""report.html: every row is in it, worst first, and it needs nothing from outside."""

import re
from html.parser import HTMLParser

import pytest

from benchmarks import report
from benchmarks.results import Finding
from portable.slo.statistics import Interval
from tests.benchmarks.stubs import PEAK, measured

CONTENT = {
    "backend": "xla",
    "suite": "quick",
    "created": "2026-01-01T00:00:00Z",
    "fingerprint": {"device": "EPYC <x>", "torch": "2.13"},
    "peak": PEAK.to_dict(),
}


@pytest.fixture
def rows(rows_of):
    rows = rows_of(
        {
            "cumsum/met": measured(0.01, 0.01),
            "cumsum/slow": measured(0.02, 0.01),
            "cumsum/kernel": measured(0.03, 0.01),
            "cumsum/wrong": measured(0.01, 0.01, wrong="result 0 is off"),
            "cumsum/failed": RuntimeError("no lowering for <this>"),
        }
    )
    rows[2].state, rows[2].provider, rows[2].kernel_s = "kernel", "aten", Interval(0.011, 0.010, 0.012)
    return rows


def test_every_row_is_there_with_its_decision_worst_first(rows):
    page = report.render(rows, CONTENT)
    table = page[page.index("<h2>Every workload") :]
    places = [
        table.index(name) for name in ("cumsum/failed", "cumsum/wrong", "cumsum/slow", "cumsum/kernel", "cumsum/met")
    ]
    assert places == sorted(places)
    assert table.count("<tr>") - table[table.index("Measured on") :].count("<tr>") == 1 + len(rows)
    for text in (
        "kernel aten",
        "UNMET</span><br>2 × eager",
        "WRONG</span><br>result 0 is off",
        "FAILED</span><br>RuntimeError: no lowering for &lt;this&gt;",
    ):
        assert text in table


def test_every_measured_row_is_in_the_plots(rows):
    svgs = re.findall(r"<svg.*?</svg>", report.render(rows, CONTENT), re.DOTALL)
    assert len(svgs) == 3
    for svg in svgs:
        for name in ("met", "slow", "kernel", "wrong"):
            assert f"cumsum/{name}" in svg


def test_it_needs_no_network(rows):
    page = report.render(rows, CONTENT)
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", page)
    fetched = [u for u in re.findall(r"""(?:src|href)=["']([^"']+)""", page) if not u.startswith("#")]
    assert fetched == []


def test_it_is_light_and_dark(rows):
    page = report.render(rows, CONTENT)
    assert "prefers-color-scheme:dark" in page
    for placeholder, (name, light, dark) in report.COLOURS.items():
        assert placeholder not in page
        assert f"--{name}:{light};" in page
        assert f"--{name}:{dark};" in page
    assert "var(--portable)" in page


def test_it_is_well_formed(rows):
    void, still_open = {"meta", "br"}, []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in void:
                still_open.append(tag)

        def handle_endtag(self, tag):
            assert still_open.pop() == tag

    Checker().feed(report.render(rows, CONTENT))
    assert still_open == []


def test_what_was_measured_on_is_said_and_escaped(rows):
    page = report.render(rows, CONTENT)
    assert "EPYC &lt;x&gt;" in page
    assert "10 GB/s" in page


def test_findings_are_shown(rows):
    page = report.render(rows, CONTENT, [Finding("regressed", "cumsum/met", "1 → 2 ms")])
    assert "Against the baseline" in page
    assert "1 → 2 ms" in page


def test_a_run_in_which_everything_failed_has_a_report_too(rows_of, tmp_path):
    path = tmp_path / "report.html"
    report.write(path, rows_of({"a/b": RuntimeError("x")}), CONTENT)
    assert "FAILED</span><br>RuntimeError: x" in path.read_text()
    assert "<svg" not in path.read_text()
