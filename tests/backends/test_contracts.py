"""Each vendor's adapter against its recorded contract: a call of a name that the vendor does not have fails."""

import contextlib
import inspect
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import compile_fx

from portable import backends
from portable.backends import base, gpu, xpu
from portable.errors import BackendUnavailableError, ConfigError
from portable.explain import Record

CONTRACTS = Path(__file__).parent / "contracts"
sys.path.insert(0, str(CONTRACTS))
import torch_gpu  # noqa: E402

sys.path.pop(0)


def drive(name: str, package: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(CONTRACTS / "drive.py"), name, package],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CONTRACTS), *sys.path]), "PORTABLE_BACKEND": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


VENDORS = {
    "trainium": ("torch_neuronx", "neuron", "4 NeuronCores", "trn2"),
    "tpu:torch_tpu": ("torch_tpu", "tpu", "TPU v6 lite", "TPU v6 lite"),
    "tpu:torch_xla": ("torch_xla", "xla", "TPU:0, TPU:1", "TPU"),
}


@pytest.fixture(scope="module", params=VENDORS)
def driven(request):
    return request.param, drive(request.param, VENDORS[request.param][0])


def test_the_probe_names_the_device(driven):
    name, found = driven
    _, device, probed, hardware = VENDORS[name]
    assert found["probe"] == [True, f"ready, {probed}"]
    assert found["device"] == device
    assert found["hardware"]["device"] == hardware
    assert set(found["hardware"]) == {"device", "architecture", "driver", "runtime"}


MEMORY = {
    "trainium": [1 << 20, 2 << 20, 24 << 30],
    "tpu:torch_tpu": [None, None, 32 << 30],
    "tpu:torch_xla": [290816, 500816, 34088157184],
}


def test_memory_is_the_vendors_figure(driven):
    name, found = driven
    assert found["memory"] == MEMORY[name]


CALLS = {  # synchronize; seconds(work); manual_seed(3)
    "trainium": [
        "synchronize", "synchronize", "record", "work", "record", "event.synchronize", ["manual_seed_all", 3],
    ],
    "tpu:torch_tpu": ["synchronize", "synchronize", "work", "synchronize", ["manual_seed_all", 3]],
    "tpu:torch_xla": [
        *[["sync", True], "wait_device_ops"] * 2, "work", ["sync", True], "wait_device_ops", ["manual_seed", 3],
    ],
}  # fmt: skip


def test_it_waits_times_and_seeds_by_the_vendors_calls(driven):
    name, found = driven
    assert found["calls"] == CALLS[name]
    assert found["seconds"] == 0.002 if name == "trainium" else 0 <= found["seconds"] < 1


def test_each_size_is_compiled_once_exactly_as_it_is_and_runs_compiled(driven):
    _, found = driven
    assert found["same"] == [True] * 10
    compiled = [call[1] for call in found["compiles"] if call[0] == "compile"]
    assert [shapes[-1] for shapes in compiled] == [[n, 4] for n in range(2, 12)]
    assert found["fallbacks"] == []
    assert {how for ways in found["ops"].values() for how in ways} == {"vendor"}


def test_the_record_says_why_sizes_are_compiled_apart(driven):
    (note,) = driven[1]["notes"]
    assert note.startswith("shapes: one executable for each distinct set of sizes: ")


def test_recorded_launches_and_symbolic_sizes_are_refused_with_the_reason(driven):
    graphs, dynamic = driven[1]["refusals"]
    assert "records none: " in graphs and "there are no launches to record" in graphs
    assert "compiles each set of sizes apart" in dynamic


def test_a_vendor_package_that_does_not_load_is_unavailable_with_what_it_says(tmp_path, monkeypatch):
    (tmp_path / "torch_tpu.py").write_text("raise ImportError('built for torch 2.9')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    base._probed.cache_clear()
    try:
        with pytest.raises(
            BackendUnavailableError, match="backend tpu:torch_tpu cannot run here: .*built for torch 2.9"
        ):
            backends.get("tpu:torch_tpu")
    finally:
        base._probed.cache_clear()


def test_a_contract_holds_no_name_and_no_signature_that_torch_does_not_have():
    with pytest.raises(TypeError, match="declares no .'serial'. in _CudaDeviceProperties"):
        torch_gpu.Properties("_CudaDeviceProperties", name="H200", serial=1)
    with pytest.raises(TypeError, match="its stand-in"):
        torch_gpu.same_signature(torch.cuda.synchronize, lambda: None)


def asked_here(code: str, timeout: float = 60.0) -> tuple[bool, str]:
    """What `base.ask` does, in this process: that is where the stand-ins are."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, {})
    except Exception as failure:
        return False, str(failure)
    return True, printed.getvalue().strip()


@pytest.fixture(params=["cuda", "rocm", "xpu"])
def on_gpu(request, monkeypatch):
    name = request.param
    monkeypatch.setattr(gpu, "ask", asked_here)
    if name == "xpu":
        monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: True)
        torch_gpu.install(monkeypatch, torch.xpu, torch_gpu.max1550(), torch_gpu.xpu_event)
    else:
        monkeypatch.setattr(torch.version, "cuda", "13.0" if name == "cuda" else None)
        monkeypatch.setattr(torch.version, "hip", "7.0.2" if name == "rocm" else None)
        properties = torch_gpu.h200() if name == "cuda" else torch_gpu.mi300x()
        torch_gpu.install(
            monkeypatch, torch.cuda, properties, torch_gpu.cuda_event, (properties.major, properties.minor)
        )
    base._probed.cache_clear()
    yield name
    base._probed.cache_clear()


GPUS = {
    "cuda": ("NVIDIA H200", "sm_90", "CUDA 13.0"),
    "rocm": ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", "HIP 7.0.2"),
    "xpu": ("Intel(R) Data Center GPU Max 1550", "13136561920", "XPU"),
}


def test_a_gpu_backend_is_found_and_described(on_gpu):
    device, architecture, runtime = GPUS[on_gpu]
    backend = backends.get(on_gpu)
    assert backends.backend_class(on_gpu).probe().reason == f"ready, {device}"
    assert backend.device().type == ("xpu" if on_gpu == "xpu" else "cuda")
    about = backend.hardware()
    assert (about["device"], about["architecture"]) == (device, architecture)
    assert about["runtime"].startswith(runtime)


def test_a_gpu_backend_counts_memory_in_the_allocator(on_gpu):
    stats = backends.get(on_gpu).memory_stats()
    assert (stats.used, stats.peak) == (1 << 20, 3 << 20)
    assert stats.total > 60 << 30


def test_a_gpu_backend_times_between_events_after_all_that_came_before(on_gpu):
    backend = backends.get(on_gpu)
    torch_gpu.CALLS.clear()
    assert backend.seconds(lambda: torch_gpu.CALLS.append("work")) == 0.004
    assert torch_gpu.CALLS == ["synchronize", "record", "work", "record", "event.synchronize"]
    backend.synchronize()
    assert torch_gpu.CALLS[-1] == "synchronize"


def test_a_gpu_backend_seeds_the_device(on_gpu, monkeypatch):
    module = torch.xpu if on_gpu == "xpu" else torch.cuda
    monkeypatch.setattr(module, "_is_in_bad_fork", lambda: False)
    backends.get(on_gpu).manual_seed(7)
    assert ("manual_seed_all", 7) in torch_gpu.CALLS


def test_what_a_gpu_backend_is_good_at(on_gpu):
    able = backends.get(on_gpu).capabilities()
    assert able.graphs == (on_gpu != "xpu")
    assert able.collectives == {"cuda": "nccl", "rocm": "nccl", "xpu": "xccl"}[on_gpu]
    assert torch.bfloat16 in able.dtypes and able.multiples["matmul"] > 1
    narrow = {"cuda": torch.float8_e4m3fn, "rocm": torch.float8_e4m3fnuz}.get(on_gpu)
    assert narrow is None or narrow in able.dtypes
    assert not backends.get(f"{on_gpu}:eager").capabilities().graphs


def test_float32_may_be_as_coarse_as_tf32_where_torch_uses_it(on_gpu):
    def tolerance(tf32):
        with torch.backends.cudnn.flags(allow_tf32=tf32):
            return backends.get(on_gpu).tolerances()[torch.float32]

    assert (tolerance(True) > tolerance(False)) == (on_gpu == "cuda")


@pytest.mark.parametrize("policy", ["auto", "require", "off"])
def test_inductor_is_told_to_record_launches_where_the_device_can(on_gpu, policy, monkeypatch):
    """As far as compilation goes without a GPU: up to the call of Inductor, with its real signature."""
    patches = []
    signature = inspect.signature(compile_fx.compile_fx)

    def stand_in(*args, **kwargs):
        bound = signature.bind(*args, **kwargs).arguments
        patches.append(bound["config_patches"])
        return bound["model_"].forward

    monkeypatch.setattr(compile_fx, "compile_fx", stand_in)
    backend, record = backends.get(on_gpu), Record("f", on_gpu, "native", graphs=policy)
    if policy == "require" and on_gpu == "xpu":
        with pytest.raises(ConfigError, match="Inductor records launches on CUDA and HIP devices alone"):
            backend.records_graphs(policy)
        return
    graph_module, x = torch.fx.symbolic_trace(lambda x: x + 1), torch.ones(2)
    compiled = backend.compile(graph_module, [x], record.add_graph(graph_module, [x]), record)
    assert torch.equal(compiled(x), torch.full((2,), 2.0))
    (config,) = patches
    assert config.get("triton.cudagraphs", False) == (policy != "off" and on_gpu != "xpu")
    assert config.get("graph_partition") == (False if policy == "require" else None)


def test_intels_extension_is_imported_only_where_it_is_installed(on_gpu, tmp_path, monkeypatch, caplog):
    xpu._extended.cache_clear()
    (tmp_path / "intel_extension_for_pytorch.py").write_text("__version__ = '2.8.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        backends.get(on_gpu)
        assert ("intel_extension_for_pytorch" in sys.modules) == (on_gpu == "xpu")
        assert ("2.8.0 is installed and was imported" in caplog.text) == (on_gpu == "xpu")
    finally:
        sys.modules.pop("intel_extension_for_pytorch", None)
        xpu._extended.cache_clear()
