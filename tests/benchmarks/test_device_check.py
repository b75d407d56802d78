"""The check of a machine with an accelerator: every step's result, or why there is none, in one file."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import device_check
from benchmarks.device_check import Check, Done, Step

SCRIPT = Path(device_check.__file__).with_suffix(".sh")


SLOW = """
import time
try:
    print("begun", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("told")
"""


def script(*arguments, **environment):
    """Run the script as a user does."""
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def states(results):
    return {step["name"]: step["status"] for step in results["steps"]}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """A check whose processes end as told: {step: (Done, file, text)}."""

    def make(ends, backend="cpu:eager", absent=()):
        installed = device_check._installed
        monkeypatch.setattr(device_check, "_installed", lambda name: name not in absent and installed(name))
        made = Check(backend, tmp_path / "out.json", 100.0, tmp_path)
        commands = made._command

        def command(step, limit_s):
            commands(step, limit_s)
            return [step]

        def run(command, limit_s, environment):
            done, file, text = ends.get(command[0], (Done("passed", "", 0, 1.0, "{}", ""), "", ""))
            if file:
                (tmp_path / file).parent.mkdir(exist_ok=True)
                (tmp_path / file).write_text(text)
            return done

        monkeypatch.setattr(made, "_command", command)
        monkeypatch.setattr(device_check, "_run", run)
        return made.run(), json.loads((tmp_path / "out.json").read_text())

    return make


def ended(code, output="{}", errors="", status="failed"):
    return Done(
        "passed" if code == 0 else status, "" if code == 0 else f"exit status {code}", code, 1.0, output, errors
    )


GOOD = {
    "conformance": (ended(0), "report.json", '{"backends": {}}'),
    "bench": (ended(0), "bench/results.json", '{"rows": []}'),
}


def test_all_is_well_if_every_step_passed(check):
    status, results = check(GOOD)
    assert status == 0
    assert set(states(results).values()) == {"passed"}
    assert results["bench"] == {"rows": []}


def test_missed_objectives_are_a_result_and_no_failure(check):
    status, results = check({**GOOD, "bench": (ended(1), "bench/results.json", '{"rows": [1]}')})
    assert status == 0
    assert results["steps"][3]["reason"] == "some objectives are missed"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ((ended(2), "bench/results.json", "{}"), ("failed", "exit status 2")),
        ((ended(0), "", ""), ("failed", "it left no results")),
        ((ended(1), "", ""), ("failed", "it left no results")),
        ((ended(None, status="timeout"), "", ""), ("timeout", "exit status None")),
    ],
)
def test_a_step_that_fails_costs_itself_alone(check, end, said):
    status, results = check({**GOOD, "bench": end})
    assert status == 1
    assert results["steps"][3]["status"] == said[0]
    assert results["steps"][3]["reason"].startswith(said[1])
    assert states(results) | {"bench": "passed"} == dict.fromkeys(states(results), "passed")


def test_what_was_found_before_a_time_limit_is_kept(check):
    partial = (ended(None, status="timeout"), "report.json", '{"backends": {"cpu": {}}}')
    _, results = check({**GOOD, "conformance": partial})
    assert states(results)["conformance"] == "timeout"
    assert results["conformance"] == {"backends": {"cpu": {}}}


@pytest.mark.parametrize(
    ("backend", "absent", "lost"),
    [
        ("cuda", ("jax",), {"bench": "jax", "gate": "jax"}),
        ("cuda", ("scipy", "typer"), {"bench": "scipy, typer", "gate": "typer"}),
        ("xla:cuda", ("jax",), dict.fromkeys(("doctor", "smoke", "conformance", "bench", "gate"), "jax")),
        ("cuda", ("pytest",), {"conformance": "pytest"}),
    ],
)
def test_a_package_that_is_missing_is_named_where_it_is_needed(check, backend, absent, lost):
    _, results = check(GOOD, backend, absent)
    assert {step["name"]: step["reason"] for step in results["steps"] if step["status"] == "missing"} == {
        name: f"not installed: {names}" for name, names in lost.items()
    }
    assert [name for name in absent if name in results["missing"]] == list(absent)


def test_a_backend_that_is_not_named_is_the_one_that_doctor_would_choose(check):
    _, results = check({**GOOD, "doctor": (ended(0, '{"auto": "cuda"}'), "", "")}, backend="")
    assert results["backend"] == "cuda"
    assert set(states(results).values()) == {"passed"}


def test_without_a_backend_nothing_else_runs(check):
    _, results = check({**GOOD, "doctor": (ended(1, "", "no torch"), "", "")}, backend="")
    assert states(results) == {
        "doctor": "failed",
        **dict.fromkeys(("smoke", "conformance", "bench", "gate"), "not run"),
    }


def test_time_that_a_step_did_not_need_goes_to_those_after_it(check):
    _, results = check(GOOD)
    limits = {step["name"]: step["limit_s"] for step in results["steps"]}
    assert limits["doctor"] == pytest.approx(10, abs=2)
    assert limits["gate"] == pytest.approx(100, abs=2)
    assert sum(step.share for step in device_check.STEPS) == pytest.approx(1)


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, signal.default_int_handler], ids=["background", "foreground"])
def test_a_process_that_is_too_slow_is_interrupted_and_its_output_kept(disposition):
    before = signal.signal(signal.SIGINT, disposition)
    try:
        done = device_check._run([sys.executable, "-c", SLOW], 5, os.environ)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.status, done.output.split()) == ("timeout", ["begun", "told"])
    assert done.seconds < 5 + device_check.GRACE_S


def test_a_process_that_will_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(device_check, "GRACE_S", 0.5)
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    assert device_check._run([sys.executable, "-c", code], 1.0, os.environ).seconds < 20


def test_a_machine_without_torch_is_told_so():
    done = script(PYTHON="/bin/false")
    assert done.returncode == 2
    assert "no Python with torch" in done.stderr


def test_the_model_of_the_smoke_test_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(device_check, "STEPS", (Step("smoke", 1.0),))
    made = Check("cpu:eager", tmp_path / "out.json", 120.0, tmp_path)
    assert made.run() == 0, made.results
    assert made.results["smoke"]["backend"] == "cpu:eager"
    assert made.results["smoke"]["error"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu:eager", "xla"])
def test_the_whole_check_on_this_machine(tmp_path, backend):
    out = tmp_path / "results.json"
    done = script(backend, out)
    results = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout
    assert results["conformance"]["backends"][backend]["runs"]["passed"] > 400
    assert results["bench"]["rows"]
    assert set(results["gate"]) == {"ledger", "decisions", "verdicts", "quarantines"}
