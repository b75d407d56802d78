"""What a user installs: the versions resolve against the public index alone, and the wheel is whole.

The slow tests reach the package index; `.ci/nightly` runs them.
"""

import json
import os
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """Without what this machine tells pip or Python: other indexes, local wheels, constraints."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PIP_", "PYTHON")) or k in ("PIP_CERT", "PIP_INDEX_URL")
    }
    return {**kept, "PIP_CONFIG_FILE": os.devnull, **more}


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "portable" / "py.typed").exists()
    setup = (ROOT / "setup.py").read_text()
    assert '"py.typed"' in setup


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "[test]", "[demo]"])
def test_constraints_resolve_against_the_public_index_alone(extra, tmp_path):
    report = tmp_path / "report.json"
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q", "--report", report]
    run(*pip, "-c", "constraints.txt", f".{extra}", cwd=ROOT, env=environment(PIP_FIND_LINKS=""))
    chosen = {i["metadata"]["name"]: i["metadata"]["version"] for i in json.loads(report.read_text())["install"]}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert {name: chosen[name] for name in pinned if name in chosen} == {n: v for n, v in pinned.items() if n in chosen}
    assert chosen["torch"] == pinned["torch"]


USER = """
import torch
import portable as pt

model: torch.nn.Linear = pt.compile(torch.nn.Linear(4, 2), backend="xla", fallback="error")


@pt.compile(backend="xla")
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


result: torch.Tensor = double(torch.ones(3))
device: torch.device = pt.device("xla")
assert result.tolist() == [2, 2, 2], result
assert model(torch.ones(1, 4)).shape == (1, 2)
"""


@pytest.mark.slow
def test_the_wheel_in_a_fresh_environment_outside_the_checkout(tmp_path):
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ".", cwd=ROOT)
    (wheel,) = tmp_path.glob("portable-*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python, portable = tmp_path / "env/bin/python", tmp_path / "env/bin/portable"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, "mypy", cwd=tmp_path)
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    own |= {"PORTABLE_LEDGER": str(tmp_path / "ledger"), "PORTABLE_CACHE_DIR": str(tmp_path / "cache")}
    rows = {
        row["name"]: row for row in json.loads(run(portable, "doctor", "--json", cwd=tmp_path, env=own))["backends"]
    }
    assert rows["xla"]["ready"] and rows["cpu"]["ready"], rows
    script = tmp_path / "user.py"
    script.write_text(textwrap.dedent(USER))
    run(python, script, cwd=tmp_path, env=own)
    run(python, "-m", "mypy", "--strict", script, cwd=tmp_path, env=own)
    run(portable, "env", cwd=tmp_path, env=own)
    run(portable, "ledger", "show", cwd=tmp_path, env=own)
    bench = [portable, "bench", "--backend", "xla", "--op", "rms_norm", "--budget", "60", "--out", tmp_path / "bench"]
    done = subprocess.run(list(map(str, bench)), cwd=tmp_path, env=own, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: an SLO is missed
    assert (tmp_path / "bench" / "report.html").exists() and (tmp_path / "bench" / "results.json").exists()
