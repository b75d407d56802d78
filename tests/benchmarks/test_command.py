"""`portable bench`, with stubbed measurements: what it writes, shows and ends with."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks import command, measurement, runner, workloads
from benchmarks.command import gate_of
from benchmarks.gating import Gating
from benchmarks.workloads.workload import Workload
from portable.errors import ConfigError, LedgerError
from tests.benchmarks.stubs import PEAK, measured

FAST, SLOW = measured(0.01, 0.01), measured(0.02, 0.01)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run the command with {workload: Measurement or exception}; (status, output, folder)."""
    monkeypatch.setattr(command, "peak_of", lambda backend: PEAK)
    monkeypatch.setattr(command, "gate_of", lambda backend, slos: None)

    def run(results, *args, folder="out"):
        table = {n: Workload(n, "aten.cumsum.default", "Mamba", lambda: (abs, ()), quick=True) for n in results}

        def measurer(found, backend, **_):
            if isinstance(results[found.name], BaseException):
                raise results[found.name]
            return results[found.name]

        monkeypatch.setattr(workloads, "WORKLOADS", table)
        monkeypatch.setattr(runner.run, "__kwdefaults__", {**runner.run.__kwdefaults__, "measurer": measurer})
        slo = tmp_path / "slo.toml"
        slo.write_text('"*" = { metric = "ratio", limit = 1.25 }')
        given = ["--backend", "xla", "--slo", str(slo), "--out", str(tmp_path / folder), *args]
        result = CliRunner().invoke(command.app, given)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output, tmp_path / folder

    return run


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ({"cumsum/a": FAST}, 0),
        ({"cumsum/a": FAST, "cumsum/b": SLOW}, 1),
        ({"cumsum/a": FAST, "cumsum/b": measured(0.01, 0.01, wrong="off")}, 1),
        ({"cumsum/a": FAST, "cumsum/b": RuntimeError("x")}, 1),
        ({"cumsum/a": RuntimeError("x")}, 2),
    ],
)
def test_the_exit_status_says_met_unmet_or_could_not_run(bench, results, status):
    assert bench(results)[0] == status


def test_it_writes_a_report_and_results_and_says_where(bench):
    _, output, out = bench({"cumsum/a": FAST, "cumsum/b": SLOW})
    content = json.loads((out / "results.json").read_text())
    assert [row["workload"] for row in content["rows"]] == ["cumsum/a", "cumsum/b"]
    assert {"device", "torch", "jax", "portable"} <= content["fingerprint"].keys()
    assert content["peak"]["bandwidth"]
    assert "cumsum/b" in (out / "report.html").read_text()
    assert sorted(p.name for p in out.iterdir()) == ["report.html", "results.json"]
    assert "1 met · 1 UNMET" in output
    assert output.index("cumsum/b") < output.index("cumsum/a")  # worst first
    assert "report.html" in "".join(output.split())


def test_a_row_whose_median_meets_its_slo_is_unmet_where_its_interval_does_not_and_a_line_says_so(bench):
    noisy = measured(0.012, 0.01, jitter=0.5)
    apart = {"portable": noisy.samples_s["portable"], "eager": noisy.samples_s["eager"][::-1]}
    status, output, _ = bench({"cumsum/a": replace(noisy, samples_s=apart)})
    shown = " ".join(output.split())
    assert status == 1
    assert "UNMET: 1.2 × eager [" in shown
    assert "An SLO is met only if the whole interval meets it" in shown


def test_against_a_baseline_a_regression_a_win_and_a_missing_row_end_with_1(bench):
    _, _, out = bench({"cumsum/a": FAST})
    baseline = ("--baseline", str(out / "results.json"))
    assert bench({"cumsum/a": FAST}, *baseline, folder="same")[0] == 0
    status, output, _ = bench({"cumsum/a": measured(0.012, 0.01)}, *baseline, folder="slower")
    assert (status, "regressed cumsum/a" in output) == (1, True)
    status, output, _ = bench({"cumsum/a": measured(0.001, 0.01)}, *baseline, folder="faster")
    assert (status, "unexplained win cumsum/a" in output) == (1, True)
    status, output, _ = bench({"cumsum/b": FAST}, *baseline, folder="missing")
    assert (status, "missing cumsum/a" in output) == (1, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--suite", "fast"), "--suite 'fast' does not exist"),
        (("--op", "abacus"), "--op 'abacus': no workload measures it"),
        (("--compare", "eager,jit"), "--compare 'jit' does not exist"),
        (("--baseline", "nowhere.json"), "nowhere.json: cannot be read"),
        (("--backend", "abacus"), "unknown backend 'abacus'"),
        (("--out", "/dev/null/x"), "--out /dev/null/x: Not a directory"),
    ],
)
def test_a_mistake_is_named(bench, args, message):
    with pytest.raises(Exception, match=message.replace("(", r"\(")):
        bench({"cumsum/a": FAST}, *args)


@pytest.mark.parametrize("name", ["", "notes.txt"], ids=["a folder", "another file"])
def test_a_ledger_that_cannot_be_written_is_refused_before_anything_is_measured(bench, monkeypatch, tmp_path, name):
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setenv("PORTABLE_LEDGER", str(tmp_path / name))
    monkeypatch.setattr(command, "gate_of", gate_of)
    monkeypatch.setattr(command, "peak_of", lambda backend: pytest.fail("it measured"))
    with pytest.raises(LedgerError, match="PORTABLE_LEDGER"):
        bench({"cumsum/a": FAST})


def test_the_last_line_says_how_many_verdicts_were_written_and_where(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("PORTABLE_LEDGER", str(tmp_path / "l.sqlite"))
    gating = gate_of("xla", {})
    monkeypatch.setattr(Gating, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(command, "gate_of", lambda backend, slos: gating)
    for written, said in ((0, "no verdicts written"), (1, "1 verdict written"), (2, "2 verdicts written")):
        gating.gate.written = written
        output = "".join(bench({"cumsum/a": FAST})[1].split())  # a narrow terminal breaks it anywhere
        assert f"{said} to the ledger {tmp_path / 'l.sqlite'}".replace(" ", "") in output


def test_a_pattern_that_fits_no_workload_is_a_mistake(tmp_path):
    path = tmp_path / "slo.toml"
    path.write_text('"*" = { metric = "ratio", limit = 1.25 }\n"cumsun/*" = { metric = "ratio", limit = 1 }\n')
    with pytest.raises(ConfigError, match=r"slo\.toml:2: cumsun/\*: fits no workload"):
        command.slos_of("xla", path)


@pytest.mark.parametrize("path", sorted(command.SLO_FILES.glob("*.toml")), ids=lambda p: p.stem)
def test_the_slo_files_that_are_shipped_are_legal(path):
    assert command.slos_of(path.stem, None)


def test_a_backend_without_slos_is_measured_only(capsys):
    assert command.slos_of("acme", None) == {}


def test_portable_bench_is_a_command_and_a_mistake_ends_with_2():
    done = subprocess.run(
        [sys.executable, "-m", "portable.cli", "bench", "--suite", "fast"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--suite 'fast' does not exist" in " ".join(done.stderr.split())
    assert "Remedy:" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_line_loads_no_torch_before_threads_are_bound():
    code = "import portable.cli, sys, typer; typer.main.get_command(portable.cli.app).get_command(None, 'bench'); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_measuring_stands_behind_the_stub():
    assert runner.measure is measurement.measure
