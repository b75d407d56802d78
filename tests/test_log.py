"""PORTABLE_LOG: what the library tells while it works."""

import os
import subprocess
import sys

CODE = "import torch, portable as pt; pt.compile(lambda x: x + 1, backend='xla')(torch.ones(2))"


def run(level: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PORTABLE_LOG": level}
    return subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)


def test_info_tells_of_each_compilation():
    done = run("info")
    assert done.returncode == 0
    assert "compiled graph 0 (inference)" in done.stderr
    assert "first call" in done.stderr


def test_an_illegal_level_names_the_legal_ones():
    done = run("loud")
    assert done.returncode != 0
    assert "PORTABLE_LOG='loud' is not valid" in done.stderr
