"""A bench that is killed, or runs beside others, loses and damages nothing that the ledger was told to keep."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from portable.kernels.ledger import Ledger
from tests.kernels.test_ledger import intact

ROOT = Path(__file__).parents[2]

# One process imports everything, and forks one that benches for each line "<ledger> <folder>": a start costs a second.
NURSERY = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import jax, torch, typer
import portable as pt
from benchmarks import command
from portable.kernels import registry
from portable.kernels.ledger import Ledger
from pathlib import Path

registry.load()
command.peak_of = lambda name: None  # takes seconds, in which there is nothing to lose
signal.signal(signal.SIGCHLD, signal.SIG_IGN)

def bench(ledger, folder):
    os.environ["PORTABLE_LEDGER"] = ledger
    told = open(f"{folder}/told", "a")
    add = Ledger.add
    def noting(self, verdict):
        told.write(add(self, verdict) + "\\n")
        told.flush()
        return verdict.id
    Ledger.add = noting
    while True:
        try:
            command.bench("xla", "quick", "cumsum/mamba2-chunks", Path(sys.argv[2]), "eager", Path(folder), None, 1.0)
        except typer.Exit:
            torch._dynamo.reset()

print("ready", flush=True)
for line in sys.stdin:
    if not (child := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        bench(*line.split())
    print(child, flush=True)
"""


@pytest.fixture
def nursery(tmp_path):
    slos = tmp_path / "slos.toml"
    slos.write_text('"cumsum/*" = { metric = "ratio", limit = 0.01, baseline = "eager" }\n')  # every kernel is tried
    command = [sys.executable, "-W", "ignore", "-c", NURSERY, str(ROOT), str(slos)]
    with open(tmp_path / "errors", "w") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout.readline() == "ready\n"

    def start(ledger: Path, folder: Path) -> int:
        folder.mkdir()
        process.stdin.write(f"{ledger} {folder}\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    yield start
    process.kill()
    process.wait()


def wait_for(path: Path) -> None:
    """Until something was stored."""
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_a_bench_that_is_killed_at_any_moment_loses_nothing_that_it_stored(tmp_path, nursery, kills):
    dice = random.Random(kills)
    ledger, folders = tmp_path / "ledger.sqlite", []
    while len(folders) < kills:
        running = []
        for _ in range(2):
            folders.append(tmp_path / f"bench-{len(folders)}")
            running.append(nursery(ledger, folders[-1]))
        for pid, folder in zip(running, folders[-2:], strict=True):
            if dice.random() < 0.75:
                wait_for(folder / "told")
            time.sleep(dice.uniform(0, 3))
            os.kill(pid, signal.SIGKILL)
        assert not ledger.exists() or intact(ledger)
    told = [line for f in folders if (f / "told").exists() for line in (f / "told").read_text().split()]
    assert told, (tmp_path / "errors").read_text()
    stored = {v.id for v in Ledger(ledger, timeout_s=60).verdicts()}
    assert set(told) <= stored
    assert len(stored) <= len(told) + len(folders)  # at most the one that each was writing
    assert all(d.verdict is not None for d in Ledger(ledger).decisions(history=True))
    assert list(tmp_path.glob("*damaged*")) == []
    for results in tmp_path.glob("*/results.json"):
        json.loads(results.read_text())


@pytest.mark.slow
def test_eight_benches_at_once_share_one_ledger(tmp_path):
    ledger = tmp_path / "ledger.sqlite"
    environment = {**os.environ, "PORTABLE_LEDGER": str(ledger), "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "portable.cli", "bench", "--backend", "xla", "--op", "cumsum/mamba2-chunks"]
            + ["--compare", "eager", "--budget", "5", "--out", str(tmp_path / f"bench-{i}")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        for i in range(8)
    ]
    ended = [process.communicate(timeout=600) for process in running]
    assert all(process.returncode in (0, 1) for process in running), ended
    assert intact(ledger)
    rows = [json.loads((tmp_path / f"bench-{i}" / "results.json").read_text())["rows"] for i in range(8)]
    assert all(row["state"] in ("met", "unmet", "kernel") for (row,) in rows), rows
    verdicts = Ledger(ledger).verdicts("aten.cumsum.default", provider="portable")
    assert len(verdicts) == 8
    assert len(Ledger(ledger).decisions("aten.cumsum.default")) == 1
