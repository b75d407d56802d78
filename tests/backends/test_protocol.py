"""What every backend answers: capabilities, hardware, synchronisation, timing, memory, seeds, tolerances."""

import subprocess
import sys
import time
from dataclasses import fields

import pytest
import torch

import portable as pt
from portable import backends
from portable.backends import base, xla
from portable.backends.base import Capabilities, MemoryStats
from portable.errors import BackendUnavailableError, UnknownBackendError
from portable.kernels.fingerprint import ABSENT, fingerprint

HERE = ["cpu", "cpu:eager", "xla", "xla:cpu"]


@pytest.fixture(params=HERE)
def backend(request):
    return backends.get(request.param)


def test_capabilities_name_dtypes_and_why_some_are_slow(backend):
    able = backend.capabilities()
    assert torch.float32 in able.dtypes
    assert set(able.emulated) <= able.dtypes
    assert all(able.emulated.values())
    assert not able.graphs
    assert able.collectives == ("XLA" if backend.name == "xla" else "gloo")


def test_hardware_is_the_backends_part_of_the_fingerprint(backend):
    about = backend.hardware()
    assert set(about) == {"device", "architecture", "driver", "runtime"}
    parts = fingerprint(str(backend)).parts
    assert all(parts[key] == (" ".join(value.split()) or ABSENT) for key, value in about.items())


def test_a_plugins_own_hardware_is_in_its_fingerprint(monkeypatch):
    from portable.backends.cpu import Cpu

    class Acme(Cpu):
        name = "acme"

        def hardware(self):
            return {"device": "Acme 1", "architecture": "a1", "driver": "7", "runtime": "acme 2"}

    monkeypatch.setattr(backends, "plugins", lambda: {"acme": backends.Plugin("acme", "acme 1", Acme)})
    parts = fingerprint("acme").parts
    assert (parts["device"], parts["driver"]) == ("Acme 1", "7")


def test_memory_of_a_host_backend_is_this_processs(backend):
    before = backend.memory_stats()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    after = backend.memory_stats()
    assert before.used + (48 << 20) < after.used <= after.peak < after.total
    assert held.sum() == 64 << 20


def test_memory_that_a_device_does_not_count_is_none():
    from portable.backends.cpu import Cpu

    assert base.Backend.memory_stats(Cpu()) == MemoryStats(None, None, None)


def test_memory_of_a_pjrt_device_is_what_it_counts(monkeypatch):
    from types import SimpleNamespace

    device = SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 3, "peak_bytes_in_use": 5, "bytes_limit": 9})
    monkeypatch.setattr(xla.pjrt, "client", lambda platform: SimpleNamespace(on_host=False, device=device))
    assert backends.backend_class("xla")().memory_stats() == MemoryStats(3, 5, 9)
    device.memory_stats = lambda: None
    assert backends.backend_class("xla")().memory_stats() == MemoryStats(None, None, None)


def test_seconds_cover_the_call(backend):
    assert 0.02 <= backend.seconds(lambda: time.sleep(0.02)) < 2


def test_the_same_seed_gives_the_same_random_numbers(backend):
    compiled = pt.compile(lambda x: torch.rand_like(x), backend=str(backend))
    x = torch.ones(16)
    results = []
    for seed in (1, 1, 2):
        backend.manual_seed(seed)
        results.append(compiled(x))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_tolerances_grow_as_precision_falls(backend):
    allowed = backend.tolerances()
    ranked = [allowed[d] for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
    assert ranked == sorted(ranked)


@pytest.mark.parametrize("name", backends.BUILTIN)
def test_probing_and_what_follows_from_it_start_no_device_in_this_process(name):
    code = f"""
import sys, torch
from portable import backends
kind = backends.backend_class({name!r})
kind.probe(), kind.diagnose(), kind.deviceless(), [kind.of(v) for v in kind.variants]
jax = sys.modules.get("jax._src.xla_bridge")
sys.exit(torch.cuda.is_initialized() or torch.xpu.is_initialized() or bool(jax and jax._backends))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_platforms_of_xla_come_from_jax_and_its_plugins(tmp_path, monkeypatch):
    package = tmp_path / "jax_plugins" / "abacus"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import jax._src.xla_bridge as bridge\n"
        "def initialize():\n"
        "    def make():\n"
        "        raise RuntimeError('no abacus here')\n"
        "    bridge.register_backend_factory('abacus', make, priority=-1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    xla.platforms.cache_clear()
    try:
        assert {"cpu", "tpu", "abacus"} <= set(xla.platforms())
        assert backends.backend_class("xla")("abacus").platform == "abacus"
        with pytest.raises(UnknownBackendError, match="legal: xla, xla:cpu, .*xla:abacus"):
            backends.get("xla:abucas")
    finally:
        xla.platforms.cache_clear()


def test_intel_gpus_are_called_as_the_installed_plugin_calls_them(monkeypatch):
    asked = []
    monkeypatch.setattr(xla.pjrt, "client", lambda platform: asked.append(platform))
    for named in (("cpu", "xpu"), ("cpu", "oneapi")):
        monkeypatch.setattr(xla, "platforms", lambda named=named: named)
        backends.get("xla:xpu")
    assert asked == ["xpu", "oneapi"]


@pytest.mark.parametrize("executor", ["torch_tpu", "torch_xla"])
def test_an_executor_that_is_not_installed_says_so(executor):
    with pytest.raises(BackendUnavailableError, match=f"tpu:{executor} cannot run here: {executor} is not installed"):
        backends.get(f"tpu:{executor}")


def test_an_unknown_executor_lists_the_known():
    with pytest.raises(UnknownBackendError, match="legal: tpu, tpu:torch_tpu, tpu:torch_xla"):
        backends.get("tpu:abacus")


def test_what_tpus_are_good_at_depends_on_their_generation():
    from portable.backends.tpu import capabilities

    assert capabilities("TPU v5 lite").multiples["matmul"] == 128
    assert capabilities("TPU v6 lite").multiples["matmul"] == capabilities("TPU7x").multiples["matmul"] == 256
    assert {torch.float64, torch.int64} <= set(capabilities("TPU v4").emulated)


def test_the_protocols_fields_are_these():
    assert [f.name for f in fields(Capabilities)] == ["dtypes", "emulated", "multiples", "graphs", "collectives"]
    assert [f.name for f in fields(MemoryStats)] == ["used", "peak", "total"]
