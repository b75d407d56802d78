"""The example of a vendor's package: installed by pip into a fresh environment, found, chosen, and conformant."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import portable

PLUGIN = Path(__file__).resolve().parents[2] / "examples" / "plugin_backend"
CHECKOUT = Path(portable.__file__).resolve().parents[1]
BROKEN = """
from setuptools import setup
setup(name="portable-broken", version="0.3", py_modules=["portable_broken"],
      entry_points={"portable.backends": ["broken = portable_broken:Broken"]})
"""


class Environment:
    """A fresh virtual environment that sees this one's packages, so that nothing is fetched."""

    def __init__(self, folder):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = folder / "bin" / "python"
        self.packages = next(folder.glob("lib/python*/site-packages"))
        folders = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
        lines = [f"import site; site.addsitedir({p!r})" for p in folders]
        (self.packages / "parent.pth").write_text("\n".join([*lines, str(CHECKOUT)]) + "\n")

    def run(self, *command, check=True, **env):
        """Run ``python command``."""
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PORTABLE_BACKEND")}
        done = subprocess.run(
            [str(self.python), *map(str, command)],
            env={**clean, "OMP_NUM_THREADS": "1", **env},
            cwd=self.packages,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if check:
            assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    def install(self, folder):
        options = ("-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index")
        self.run("-m", "pip", "install", *options, folder)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    copied = shutil.copytree(PLUGIN, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    broken = folder / "broken"
    broken.mkdir()
    (broken / "setup.py").write_text(BROKEN)
    (broken / "portable_broken.py").write_text("def load():\n    raise ImportError('libbroken.so.3')\n\nload()\n")
    found = Environment(folder / "venv")
    found.install(copied)
    found.install(broken)
    return found


@pytest.fixture(scope="module")
def doctor(environment):
    done = environment.run("-m", "portable.cli", "doctor", "--json", PORTABLE_BACKEND="acme")
    report = json.loads(done.stdout)
    return report, {row["name"]: row for row in report["backends"]}


def test_doctor_lists_it_as_ready(doctor):
    _, rows = doctor
    assert rows["acme"]["ready"]
    assert rows["acme"]["path"] == "native"
    assert "Acme A1" in rows["acme"]["reason"]


def test_the_environment_chooses_it(doctor):
    report, _ = doctor
    assert report["choice"] == "PORTABLE_BACKEND=acme: acme is used."


def test_a_broken_package_beside_it_is_reported_with_its_traceback(doctor):
    _, rows = doctor
    assert rows["broken"]["reason"] == "plugin portable-broken 0.3 failed: ImportError: libbroken.so.3"
    assert "in load" in rows["broken"]["traceback"]
    assert rows["cpu"]["ready"] and rows["xla"]["ready"]


def test_doctor_prints_the_traceback_where_it_is_asked_for(environment):
    shown = environment.run("-m", "portable.cli", "doctor", "--verbose").stdout
    assert "portable_broken.py" in shown
    assert "ImportError: libbroken.so.3" in shown


SCRIPT = """
import torch, portable as pt
from portable import backends
assert torch._C._get_privateuse1_backend_name() == "privateuseone", "listing a backend started its device"
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8)).to(pt.device())
compiled = pt.compile(model)
x = torch.randn(4, 8, device=pt.device())
compiled(x).sum().backward()
print(pt.explain(compiled, show=False).backend, model[0].weight.grad.device)
normed = pt.compile(lambda x, w: pt.ops.rms_norm(x, w), kernels="acme")
w = torch.ones(8, device="acme")
expected = torch.nn.functional.rms_norm(x.cpu(), (8,), w.cpu())
assert torch.allclose(normed(x, w).cpu(), expected, atol=1e-5)
print(pt.explain(normed, show=False).ops)
try:
    pt.compile(torch.neg)(torch.ones(3))
except pt.errors.UnsupportedInputError as refused:
    print("refused:", refused.message)
try:
    torch.empty(1 << 31, dtype=torch.uint8, device="acme")
except torch.OutOfMemoryError as full:
    print("full:", full)
"""


@pytest.fixture(scope="module")
def said(environment):
    return environment.run("-c", SCRIPT, PORTABLE_BACKEND="acme").stdout


def test_a_script_trains_on_it_without_naming_it(said):
    assert said.startswith("acme acme:0\n")


def test_its_kernel_runs_where_it_is_named(said):
    assert "{'rms_norm': {'kernel acme': 1}}" in said


def test_a_tensor_that_was_left_on_the_host_is_refused(said):
    assert re.search("refused: .* is on the host", said)


def test_its_memory_is_limited(said):
    assert "full: acme is out of memory: 2147483648 bytes asked for" in said


def test_a_quick_part_of_the_kit_passes(environment, tmp_path):
    kit = shutil.copy(PLUGIN / "tests" / "test_conformance.py", tmp_path)
    left_out = "gradients training float64 bfloat16 indexing int reduction normalisation product"
    quick = " and ".join(f"not {word}" for word in left_out.split())
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, kit, "-k", quick)
    assert re.search(r"\n\d\d\d? passed", done.stdout)


@pytest.mark.slow
def test_the_whole_kit_passes(environment, tmp_path):
    kit = shutil.copy(PLUGIN / "tests" / "test_conformance.py", tmp_path)
    report = tmp_path / "report.json"
    environment.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, kit, "--portable-report", report
    )
    shown = json.loads(report.read_text())["backends"]["acme"]
    assert shown["hardware"]["device"] == "Acme A1"
    assert shown["runs"]["passed"] > 350
    assert (shown["runs"]["failed"], shown["runs"]["not_run"]) == (0, 0)


FAULTY = """
from portable.testing import BackendConformance
from portable_acme import Acme, device

class TestAcme(BackendConformance):
    backend = "acme"

Acme.synchronize = lambda self: None
device._freed = lambda size: None  # what is freed stays counted
used, peak, total = device.memory()
device.memory = lambda: (device.start().used, peak, total)
"""
FOUND = (
    "test_after_synchronize_no_work_is_left",
    "test_seconds_wait_for_the_device",
    "test_memory_figures_are_consistent",
)


def test_the_kit_finds_what_only_a_device_with_a_queue_and_a_memory_can_do_wrong(environment, tmp_path):
    (tmp_path / "test_faulty.py").write_text(FAULTY)
    command = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
        tmp_path,
        "-k",
        " or ".join(FOUND),
    )
    done = environment.run(*command, check=False)
    # Whether pytest ends these lines with the error depends on the width of the terminal, and on CI's own variables.
    assert sorted(re.findall(r"^FAILED \S+::TestAcme::(\w+)", done.stdout, re.MULTILINE)) == sorted(FOUND)
    assert f"{len(FOUND)} failed" in done.stdout
