"""Importing portable does nothing: a subprocess sees the same torch, JAX, environment and modules before and after."""

import json
import subprocess
import sys
import textwrap

import pytest

SNAPSHOT = """
    import json, os, sys, time
    import torch, torch._dynamo, logging
    def state():
        from torch._dynamo.backends import registry
        return {
            "environment": dict(os.environ),
            "torch": sorted(vars(torch)),
            "dynamo backends": sorted(registry._COMPILER_FNS),
            "default dtype": str(torch.get_default_dtype()),
            "threads": torch.get_num_threads(),
            "rng": torch.random.get_rng_state().sum().item(),
            "matmul precision": torch.get_float32_matmul_precision(),
            "privateuse": torch._C._get_privateuse1_backend_name(),
            "path": list(sys.path),
            "signal": str(__import__("signal").getsignal(2)),
        }
    before = state()
    modules = set(sys.modules)
    began = time.perf_counter()
    import portable
    elapsed = time.perf_counter() - began
    print(json.dumps({
        "changed": [k for k, v in state().items() if v != before[k]],
        "ms": 1000 * elapsed,
        "loaded": sorted(set(sys.modules) - modules),
    }))
"""


def run(code: str) -> dict:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def imported() -> dict:
    return run(SNAPSHOT)


def test_import_changes_nothing(imported):
    assert imported["changed"] == []


def test_import_loads_only_the_package_itself(imported):
    assert imported["loaded"] == ["portable"]


def test_import_takes_under_50_ms_beyond_torch(imported):
    assert imported["ms"] < 50


def test_compiling_for_xla_leaves_jax_and_torch_settings_alone():
    result = run("""
        import json, torch, jax, os
        torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2))  # what torch.compile itself sets
        def settings():
            dynamo = torch._dynamo.config
            return (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision, torch.get_num_threads(),
                    dict(os.environ), dynamo.recompile_limit, dynamo.suppress_errors)
        before = settings()
        import portable as pt
        out = pt.compile(lambda x: x + 1, backend="xla")(torch.arange(3))
        after = settings()
        print(json.dumps({"same": before == after, "out": out.tolist(), "int32": str(jax.numpy.arange(3).dtype)}))
    """)
    assert result == {"same": True, "out": [1, 2, 3], "int32": "int32"}


def test_every_public_name_resolves_and_the_unknown_one_does_not():
    import portable as pt

    for name in pt.__all__:
        assert getattr(pt, name) is not None
    assert set(pt.__all__) <= set(dir(pt))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        pt.nonsense  # noqa: B018
