"""The pytest plugin, as another package's tests use it."""

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
