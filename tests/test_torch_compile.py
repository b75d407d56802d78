"""`torch.compile(model, backend="portable")` in a process that never imports portable."""

import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    compiled = torch.compile(model, backend="portable")
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True).sin()
    losses = []
    for _ in range(100):
        loss = (compiled(x) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10, losses[::20]
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
"""


def run(script: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning:portable", "-c", textwrap.dedent(script)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("backend", ["xla", "cpu:eager"])
def test_it_trains_and_infers(backend):
    done = run(SCRIPT, PORTABLE_BACKEND=backend)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_backend_can_be_named_in_options():
    done = run("""
        import torch, sys
        f = torch.compile(lambda x: x + 1, backend="portable", options={"backend": "xla"})
        assert f(torch.ones(2)).tolist() == [2, 2]
        assert "portable.lowering.program" in sys.modules
    """)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_wrong_option_is_named():
    done = run("""
        import torch
        for options in {"backend": "abacus"}, {"speed": 11}:
            try:
                torch.compile(lambda x: x + 1, backend="portable", options=options)(torch.ones(2))
            except Exception as refused:
                print(refused)
    """)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "unknown backend 'abacus'" in done.stdout
    assert "unknown options ['speed']" in done.stdout
