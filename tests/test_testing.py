"""The pytest plugin, as another package's tests use it."""

import json
import subprocess
import sys

import pytest

TEST = """
import torch
import portable as pt

def test_double(portable_backend):
    compiled = pt.compile(lambda x: x * 2, backend=portable_backend)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert pt.explain(compiled, show=False).backend == portable_backend
"""


@pytest.fixture
def plugin():
    """How to load the plugin where no entry point does."""
    import importlib.metadata

    names = [e.name for e in importlib.metadata.entry_points(group="pytest11")]
    return [] if "portable" in names else ["-p", "portable.testing"]


@pytest.mark.parametrize(
    ("options", "runs"), [([], ["xla"]), (["--portable-backends", "cpu:eager, xla"], ["cpu:eager", "xla"])]
)
def test_a_test_runs_once_for_each_backend_that_is_named(tmp_path, plugin, options, runs):
    (tmp_path / "test_mine.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", *plugin, *options, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert f"{len(runs)} passed" in done.stdout
    assert all(f"test_double[{name}]" in done.stdout for name in runs)


def test_importing_the_plugin_imports_neither_torch_nor_jax():
    code = "import portable.testing, sys; assert not {'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_it_needs_no_pytest():
    code = "import sys; sys.modules['pytest'] = None; from portable.testing import lowered"
    subprocess.run([sys.executable, "-c", code], check=True)


TIERS = """
import time
import pytest

def test_here():
    pass

@pytest.mark.compiles_for("tpu:v5e:2x2")
def test_compiles():
    pass

@pytest.mark.hardware("cpu:eager")
def test_on_hardware():
    pass

@pytest.mark.hardware("trainium")
def test_on_absent_hardware():
    raise AssertionError("it ran")

@pytest.mark.slo("p50_ms", 500.0)
def test_objective(slo):
    slo(lambda: time.sleep(1e-3))

@pytest.mark.slo("p50_ms", 0.5)
def test_missed_objective(slo):
    slo(lambda: time.sleep(2e-3))

@pytest.mark.slo(metric="ratio", limit=2.0)
def test_ratio(slo):
    slo(lambda: time.sleep(1e-3), baseline=lambda: time.sleep(1e-3))
"""


@pytest.fixture
def session(tmp_path, plugin):
    """Run the tests of a text; (pytest's output, the report)."""

    def run(text, *options):
        (tmp_path / "test_mine.py").write_text(text)
        report = tmp_path / "report.json"
        command = [sys.executable, "-m", "pytest", "-q", "-rA", *plugin, "--strict-markers", *options]
        command += ["--portable-report", str(report), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert report.exists(), done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout, json.loads(report.read_text())

    return run


@pytest.mark.parametrize(
    ("options", "runs", "left_out"),
    [
        ([], ["test_here"], ["test_compiles", "test_on_hardware", "test_objective"]),
        (["--portable-tier", "1"], ["test_here", "test_compiles"], ["test_on_hardware", "test_objective"]),
        (["--portable-tier", "2"], ["test_here", "test_compiles", "test_on_hardware"], ["test_objective"]),
    ],
)
def test_a_tier_runs_with_those_below_it(session, options, runs, left_out):
    output, _ = session(TIERS, *options)
    assert [name for name in runs if f"PASSED test_mine.py::{name}\n" not in output] == []
    assert [name for name in left_out if f"::{name}" in output] == []


def test_hardware_that_is_not_ready_is_skipped_with_the_reason_and_reported_as_not_run(session):
    output, report = session(TIERS, "--portable-tier", "2")
    assert "1 skipped" in output
    assert "torch_neuronx is not installed" in output
    assert report["backends"]["trainium"]["runs"] == {"passed": 0, "failed": 0, "not_run": 1, "failures": []}
    assert report["backends"]["tpu:v5e:2x2"]["compiles"]["passed"] == 1
    assert report["backends"]["cpu:eager"]["runs"]["passed"] == 1
    assert report["backends"]["cpu:eager"]["hardware"]["architecture"]
    assert report["versions"]["torch"]


def test_an_objective_is_measured_and_judged_where_it_is_asked_for(session):
    output, _ = session(TIERS, "--slo")
    passed = ["test_objective", "test_ratio"]
    assert [name for name in passed if f"PASSED test_mine.py::{name}\n" not in output] == []
    assert "misses p50 ≤ 0.5 ms: 2." in output
    assert "1 failed" in output


REPORTED = """
import pytest

def test_passes(portable_backend):
    pass

def test_fails(portable_backend):
    assert portable_backend == "cpu"

@pytest.fixture
def torn():
    yield
    raise OSError("gone")

def test_fails_afterwards(portable_backend, torn):
    pass

@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail(portable_backend):
    assert False

def test_of_no_backend():
    assert False
"""


@pytest.mark.parametrize("processes", [(), ("-n", "2")])
def test_the_report_counts_by_backend(session, processes):
    _, report = session(REPORTED, "--portable-backends", "cpu,xla", *processes)
    assert set(report["backends"]) == {"cpu", "xla"}
    assert report["complete"]
    counts = report["backends"]["cpu"]["runs"]
    assert [counts[key] for key in ("passed", "failed", "not_run")] == [2, 1, 1]
    assert counts["failures"] == ["test_mine.py::test_fails_afterwards[cpu]"]
    assert report["backends"]["xla"]["runs"]["failed"] == 2


def test_a_session_that_was_interrupted_says_so(session):
    _, report = session("def test_a(portable_backend): pass\ndef test_b(portable_backend): raise KeyboardInterrupt\n")
    assert not report["complete"]
    assert report["backends"]["xla"]["runs"]["passed"] == 1


KIT = """
class TestMine:
    backend = "cpu"
    slow = ("test_takes*",)
    limitations = {"test_is_wrong": "a bug", "test_was_wrong": "an old bug"}

    def test_takes_long(self):
        pass

    def test_is_wrong(self):
        assert False

    def test_was_wrong(self):
        pass
"""


def test_a_kit_says_what_is_slow_and_what_is_known_to_fail(session):
    output, report = session(KIT, "-m", "not slow")
    assert "1 deselected" in output
    assert "1 xfailed" in output
    assert report["backends"]["cpu"]["runs"]["failures"] == ["test_mine.py::TestMine::test_was_wrong"]
