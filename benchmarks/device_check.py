"""The steps of device_check.sh: each a process with a time limit, all results in one JSON file.

Only the standard library is needed to run it; what a step needs beyond that is looked for first and named if missing.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 350.0
FORMAT = 1
MEASURING = 0.6  # of a benchmark's limit; in the rest it starts, compiles and writes its report
GRACE_S = 8.0  # in which a step that was interrupted writes what it has
TAIL = 4000  # characters
PACKAGES = ("torch", "portable", "jax", "jaxlib", "triton", "numpy", "scipy", "matplotlib", "rich", "typer", "pytest")

DOCTOR = """
import json
from dataclasses import asdict
from portable import backends
rows = {}
for name in backends.names():
    state, failure = backends.diagnosed(name)
    rows[name] = {**asdict(state), "traceback": failure}
print(json.dumps({"backends": rows, "auto": backends.autodetected()}))
"""

SMOKE = """
import json, sys, time
import torch
import portable as pt
from portable import backends
name = sys.argv[1]
backend = backends.get(name)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
x = torch.randn(8, 16)
expected = model(x)
model, there = model.to(backend.device()), x.to(backend.device())
compiled = pt.compile(model, backend=name)
began = time.perf_counter()
result = compiled(there)
result.square().mean().backward()
backend.synchronize()
first_s = time.perf_counter() - began
error = float((result.cpu() - expected).detach().abs().max())
gradients = [p.grad for p in model.parameters()]
if error > 1e-2 or any(g is None or not bool(g.isfinite().all()) for g in gradients):
    sys.exit(f"wrong: error {error}, gradients {gradients}")
found = pt.explain(compiled, show=False)
print(json.dumps({"backend": str(backend), "path": backend.path, "device": str(backend.device()),
                  "hardware": backend.hardware(), "error": error, "first_call_s": first_s, "ops": found.ops}))
"""

KIT = """
from portable.testing import BackendConformance


class TestDevice(BackendConformance):
    backend = {backend!r}
"""


@dataclass(frozen=True)
class Step:
    """One step: its share of the budget, and the packages that it needs beside torch."""

    name: str
    share: float
    needs: tuple[str, ...] = ()


STEPS = (
    Step("doctor", 0.10),
    Step("smoke", 0.10),
    Step("conformance", 0.38, ("pytest", "numpy")),
    Step("bench", 0.36, ("jax", "numpy", "scipy", "matplotlib", "rich", "typer")),
    Step("gate", 0.06, ("jax", "rich", "typer")),
)


class Check:
    """One run: what it found so far is in the file at any time."""

    def __init__(self, backend: str, out: Path, budget_s: float, folder: Path) -> None:
        self.backend, self.out, self.budget_s, self.folder = backend, out, budget_s, folder
        self.began = time.monotonic()
        self.results: dict[str, Any] = {
            "format": FORMAT,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "backend": backend or None,
            "budget_s": budget_s,
            "python": platform.python_version(),
            "machine": f"{os.cpu_count()} cores {platform.machine()}",
            "packages": {name: _version(name) for name in PACKAGES},
            "missing": [name for name in PACKAGES if not _installed(name)],
            "steps": [],
        }
        self.environment = {**os.environ, "PORTABLE_LEDGER": str(folder / "ledger.sqlite"), "COLUMNS": "160"}
        self.environment.pop("PORTABLE_BACKEND", None)
        if not _installed("portable"):
            path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
            self.environment["PYTHONPATH"] = os.pathsep.join(path)

    def run(self) -> int:
        """Every step in turn; the exit status."""
        for i, step in enumerate(STEPS):
            kept = sum(later.share for later in STEPS[i + 1 :]) * self.budget_s
            limit_s = max(1.0, self.budget_s - kept - (time.monotonic() - self.began))
            self.results["steps"].append(self._step(step, limit_s))
            self.results["seconds"] = round(time.monotonic() - self.began, 1)
            self._write()
        states = {step["name"]: step["status"] for step in self.results["steps"]}
        if "passed" not in states.values():
            return 2
        return 0 if set(states.values()) == {"passed"} else 1

    def _step(self, step: Step, limit_s: float) -> dict[str, Any]:
        about: dict[str, Any] = {"name": step.name, "limit_s": round(limit_s, 1)}
        needs = (*step.needs, "jax") if self.backend.partition(":")[0] in ("xla", "tpu") else step.needs
        missing = sorted({name for name in needs if not _installed(name)})
        if missing:
            return {**about, "status": "missing", "reason": f"not installed: {', '.join(missing)}", "seconds": 0.0}
        if not self.backend and step.name != "doctor":
            return {**about, "status": "not run", "reason": "no backend is known", "seconds": 0.0}
        done = _run(self._command(step.name, limit_s), limit_s, self.environment)
        status, reason = done.status, done.reason
        if step.name == "bench" and done.code == 1:
            status, reason = "passed", "some objectives are missed"
        problem = self._collect(step.name, done.output)
        if problem and status == "passed":
            status, reason = "failed", problem
        return {**about, "status": status, "reason": reason, "seconds": round(done.seconds, 1), "tail": done.tail}

    def _command(self, step: str, limit_s: float) -> list[str]:
        python, backend = sys.executable, self.backend
        if step in ("doctor", "smoke"):
            return [python, "-c", DOCTOR if step == "doctor" else SMOKE, backend]
        if step == "bench":
            command = [python, "-m", "portable.cli", "bench", "--backend", backend, "--suite", "quick"]
            budget = str(max(5.0, MEASURING * limit_s))
            return [*command, "--out", str(self.folder / "bench"), "--budget", budget]
        if step == "gate":
            return [python, "-m", "portable.cli", "ledger", "show", "--json"]
        kit = self.folder / "test_device.py"
        kit.write_text(KIT.format(backend=backend), encoding="utf-8")
        options = ["-q", "--tb=line", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(self.folder)]
        plugin = [] if _is_plugin() else ["-p", "portable.testing"]
        report = ["--portable-report", str(self.folder / "report.json")]
        return [python, "-m", "pytest", *options, *plugin, *report, str(kit)]

    def _collect(self, step: str, output: str) -> str:
        """Keep what a step found; what is wrong with it, or ''."""
        files = {"conformance": "report.json", "bench": "bench/results.json"}
        try:
            if step in files:
                text = (self.folder / files[step]).read_text(encoding="utf-8")
            else:
                text = output[output.index("{") :] if step == "gate" else output.strip().splitlines()[-1]
            found = json.loads(text)
        except (OSError, ValueError, IndexError) as failure:
            self.results[step] = None
            return f"it left no results: {failure}"
        self.results[step] = found
        if step == "doctor":
            self.backend = self.backend or found["auto"]
            self.results["backend"] = self.backend
        return ""

    def _write(self) -> None:
        partial = self.out.with_name(self.out.name + ".partial")
        partial.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.out)


@dataclass
class Done:
    """How a process ended."""

    status: str
    reason: str
    code: int | None
    seconds: float
    output: str
    errors: str

    @property
    def tail(self) -> str:
        """The end of what it wrote."""
        return (self.errors[-TAIL // 2 :] + self.output[-TAIL // 2 :]).strip()


def _run(command: Sequence[str], limit_s: float, environment: Mapping[str, str]) -> Done:
    """Run a process; one that is too slow is interrupted, so that it can write what it has, and then killed."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=err,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=_interruptible,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            _end(process)
        seconds = time.monotonic() - began
        out.seek(0)
        err.seek(0)
        output, errors = out.read(), err.read()
    if code is None:
        return Done("timeout", f"not done in {limit_s:.0f} s", None, seconds, output, errors)
    if code:
        last = (errors.strip() or output.strip() or "no output").splitlines()[-1]
        return Done("failed", f"exit status {code}: {last[:300]}", code, seconds, output, errors)
    return Done("passed", "", 0, seconds, output, errors)


def _interruptible() -> None:
    """In the new process: what a shell runs in the background ignores SIGINT, and so would this."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
        process.wait()


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_plugin() -> bool:
    return any(e.value == "portable.testing" for e in importlib.metadata.entry_points(group="pytest11"))


def main(arguments: Sequence[str]) -> int:
    """Run the check; the exit status."""
    given = dict(zip(("backend", "out", "budget"), arguments, strict=False))
    backend = "" if given.get("backend", "auto") == "auto" else given["backend"]
    out = Path(given.get("out", "device_check.json")).resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="device_check.") as folder:
        check = Check(backend, out, float(given.get("budget", BUDGET_S)), Path(folder))
        status = check.run()
    for step in check.results["steps"]:
        sys.stdout.write(f"{step['name']:12} {step['status']:8} {step['seconds']:6.1f} s  {step['reason']}\n")
    sys.stdout.write(f"{out}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
