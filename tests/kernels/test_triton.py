"""The Triton kernels without a GPU: interpreted against their references, compiled for every target."""

import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from portable import ops
from portable.kernels import registry, triton_code
from portable.lowering.context import Spec

OPS = (
    "rms_norm",
    "layer_norm",
    "swiglu",
    "rotary_embedding",
    "softmax_cross_entropy",
    "fused_linear_cross_entropy",
    "moe_dispatch",
)
HERE = Path(__file__).parent
# shared memory of a block, at most: CUDA C++ Programming Guide, table of compute capabilities; AMD CDNA3 and CDNA4 ISA
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
REGISTERS = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512, "gfx950": 512}
SPILLED_BYTES = 256  # of a thread: more, and rows this wide are not for the kernel


@pytest.fixture(scope="session")
def interpreted():
    """(case, direction, what is wrong) by op: Triton reads TRITON_INTERPRET when it is imported, hence a process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "triton_interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = defaultdict(list)
    for case, direction, problem in json.loads(done.stdout.splitlines()[-1]):
        found[case.partition("[")[0]].append((case, direction, problem))
    return found


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_interpreted_is_its_reference_forward_and_backward(interpreted, op):
    rows = interpreted[op]
    assert [row for row in rows if row[2]] == []
    samples = len(list(getattr(ops, op).samples()))
    for direction in ("forward", "backward", "arguments"):
        assert sum(d == direction for _, d, _ in rows) > samples


def test_what_only_the_kernels_promise_was_looked_at(interpreted):
    claims = {d for _, d, _ in interpreted["softmax_cross_entropy"]} - {"forward", "backward", "arguments"}
    assert claims == {
        "unused_rows_stay_out",
        "a_target_out_of_range_gives_nan",
        "compiled_it_trains_as_eager_does",
    }


def compiles(launch, target):
    done = triton_code.compile_for(launch, target)
    assert done.code_bytes > 1000
    assert 0 < done.registers <= REGISTERS[target]
    assert done.shared_bytes <= SHARED_BYTES[target]
    assert done.spilled_bytes <= SPILLED_BYTES, done


def one_of_each(launches):
    """The first launch of every function and way of it, bfloat16 if there is one."""
    found = {}
    for launch in sorted(launches, key=lambda launch: "bf16" not in str(launch)):
        ways = tuple(value for _, value in launch.constants if isinstance(value, bool))
        found.setdefault((launch.function, ways), launch)
    return list(found.values())


def each(target):
    """A target as a parameter, with what the test is evidence for."""
    backend = "cuda" if target.startswith("sm_") else "rocm"
    return pytest.param(target, marks=pytest.mark.compiles_for(f"{backend}:{target} (kernels)"))


@pytest.mark.parametrize("target", [each(t) for t in triton_code.TARGETS])
@pytest.mark.parametrize("op", OPS)
def test_a_kernel_compiles_for_a_gpu_that_is_not_here(op, target):
    launches = one_of_each(triton_code.launches(op))
    assert launches
    for launch in launches:
        compiles(launch, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", [each(t) for t in triton_code.TARGETS])
@pytest.mark.parametrize("op", OPS)
def test_everything_that_a_kernel_launches_compiles(op, target):
    launches = triton_code.launches(op)
    assert {kind for launch in launches for _, kind in launch.types} >= {"*fp16", "*bf16", "*fp32"}
    for launch in launches:
        compiles(launch, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", [each(t) for t in ("sm_90", "gfx942")])
@pytest.mark.parametrize("op", OPS)
def test_what_the_op_s_boundary_cases_launch_compiles(op, target):
    """Sizes of 1, which Triton makes constants, and of 0."""
    for launch in triton_code.launches(op, boundary_cases(op)):
        compiles(launch, target)


def boundary_cases(op):
    registry.load()
    for args, kwargs in getattr(ops, op).samples():
        given = inspect.signature(getattr(ops, op).reference).bind(*args, **kwargs)
        given.apply_defaults()
        if not registry.KERNELS[op, "triton"].why_not(given.args, {}):
            yield tuple(a.to("meta") if isinstance(a, torch.Tensor) else a for a in given.args)


def test_what_is_compiled_is_what_is_launched():
    """The launches are noted from the kernel's own code, not listed beside it."""
    launches = triton_code.launches("rms_norm")
    assert {launch.function.__name__ for launch in launches} == {"normalise", "gradients"}
    llama = next(launch for launch in launches if dict(launch.constants).get("BLOCK") == 4096)
    assert dict(llama.types)["x"] == "*fp16" and dict(llama.types)["width"] == "i32"
    assert 3 in llama.aligned  # the width, which is a multiple of 16
    odd = next(launch for launch in launches if dict(launch.constants).get("BLOCK") == 8192)
    assert 3 not in odd.aligned


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_is_a_candidate_for_both_kinds_of_gpu_and_for_nothing_else(op):
    registry.load()
    kernel = registry.KERNELS[op, "triton"]
    assert kernel.backends == ("cuda", "rocm") and kernel.abi == "torch" and kernel.backward is not None
    assert kernel.not_on("native") == ""
    assert all(kernel not in registry.kernels_for(op, b) for b in ("cpu", "xla:cpu", "xla:cuda", "tpu"))


SINGLE, DOUBLE, WHOLE = torch.float32, torch.float64, torch.int64


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("rms_norm", (Spec((2, 8), DOUBLE), None, 1e-6)),
        ("rms_norm", (Spec((2, 16385), SINGLE), None, 1e-6)),
        ("layer_norm", (Spec((2, 8193), SINGLE), None, None, 1e-6)),
        ("rotary_embedding", (Spec((2, 4), SINGLE), Spec((2, 0), SINGLE), Spec((2, 0), SINGLE), False)),
        ("rotary_embedding", (Spec((2, 2, 2, 2, 4), SINGLE), *[Spec((2, 2, 2, 2), SINGLE)] * 2, False)),
        ("softmax_cross_entropy", (Spec((2, 4), SINGLE), Spec((2,), torch.uint8), -100, 0.0, "mean")),
        ("softmax_cross_entropy", (Spec((2, 0), SINGLE), Spec((2,), WHOLE), -100, 0.0, "sum")),
        ("fused_linear_cross_entropy", (Spec((2, 4), SINGLE), Spec((3, 4), DOUBLE), Spec((2,), WHOLE))),
        ("moe_dispatch", (Spec((2, 4), SINGLE), Spec((2, 2), WHOLE), 1024)),
        ("moe_dispatch", (Spec((2, 4), WHOLE), Spec((2, 2), WHOLE), 4)),
    ],
)
def test_what_a_kernel_does_not_take_is_refused_by_its_metadata(op, args):
    registry.load()
    assert registry.KERNELS[op, "triton"].why_not(args, {})


def test_where_triton_is_absent_its_kernels_are_registered_all_the_same():
    code = """
        import sys
        sys.modules["triton"] = None  # an import of it raises
        from portable.kernels import registry
        registry.load()
        print(len([k for k in registry.KERNELS.values() if k.provider == "triton"]))
        import torch
        from portable.errors import BackendUnavailableError
        try:
            registry.KERNELS["swiglu", "triton"].implementation(torch.ones(2), torch.ones(2))
        except BackendUnavailableError as failure:
            print(failure)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    count, message = done.stdout.split("\n", 1)
    assert int(count) == len(OPS)
    assert "pip install triton" in message and "swiglu" in message
