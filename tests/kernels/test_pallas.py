"""The Pallas kernels without a TPU: interpreted against their references, compiled for v5e and v6e."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from portable import ops
from portable.kernels import registry
from portable.kernels.attention.pallas import flash
from portable.kernels.rms_norm.pallas import normalised
from portable.lowering.context import Spec
from portable.slo.correctness import difference, exactly

HERE = Path(__file__).parent
TARGETS = ("v5e:2x2", "v6e:2x2")
INF, NAN = float("inf"), float("nan")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def to_jax(x: torch.Tensor | None) -> jax.Array | None:
    if x is None:
        return None
    values = x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()
    return jax.numpy.asarray(values).astype(str(x.dtype).removeprefix("torch."))


def to_torch(x: jax.Array) -> torch.Tensor:
    kind = getattr(torch, str(x.dtype))
    return torch.from_numpy(np.array(x.astype("float32") if kind == torch.bfloat16 else x)).to(kind)


def why_not(op: str, args, kwargs) -> str:
    registry.load()
    types = [Spec(tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
    return registry.KERNELS[op, "pallas"].why_not(types, kwargs)


def qkv(b, h, g, rows, keys, width, width_out=None, dtype=torch.float32):
    shapes = ((b, h, rows, width), (b, g, keys, width), (b, g, keys, width_out or width))
    return tuple(normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))


def attention_cases():
    """What the op's samples have, and several blocks: whole ones, ragged ones, more queries than keys and fewer."""
    yield from ops.attention.samples()
    for causal in (False, True):
        yield qkv(1, 4, 2, 32, 32, 16), {"is_causal": causal}
        yield qkv(1, 2, 1, 37, 50, 7, 9, dtype=torch.bfloat16), {"is_causal": causal, "scale": 0.7}
        yield qkv(2, 3, 3, 50, 19, 64), {"is_causal": causal}
    yield qkv(1, 6, 2, 1, 40, 16), {}
    q, k, v = qkv(1, 1, 1, 40, 40, 8)
    q[0, 0, 3, 1], v[0, 0, 39, 2] = NAN, INF
    yield (q, k, v), {}
    yield (q * 1e3, k, v.nan_to_num(0, 1, 1)), {"is_causal": True}


@pytest.mark.parametrize(("args", "kwargs"), list(attention_cases()))
def test_attention_interpreted_is_its_reference(args, kwargs):
    if why := why_not("attention", args, kwargs):
        masked = len(args) > 3 or "mask" in kwargs
        assert masked or args[0].dtype == torch.float16 or not all(x.numel() for x in args), why
        return
    reference = ops.attention.reference
    q, k, v = map(to_jax, args)
    options = {"is_causal": kwargs.get("is_causal", False), "scale": kwargs.get("scale"), "interpret": True}
    result = to_torch(jax.jit(functools.partial(flash, block=(16, 16), **options))(q, k, v))
    assert not difference(result, reference(*args, **kwargs), exactly(reference, args, kwargs))


def test_attention_leaves_out_keys_whose_scores_are_minus_infinity_even_if_they_fill_a_block():
    q, k, v = qkv(1, 1, 1, 20, 40, 4)
    q, k = q.abs() + 0.1, k.abs()
    k[0, 0, :17] = -INF  # more than the first block
    want = flash(*map(to_jax, (q, k[:, :, 17:], v[:, :, 17:])), False, None, interpret=True)
    got = flash(*map(to_jax, (q, k, v)), False, None, block=(16, 16), interpret=True)
    torch.testing.assert_close(to_torch(got), to_torch(want))


def rms_norm_cases():
    yield from ops.rms_norm.samples()
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((50, 24), (3, 5, 130), (33, 1), (1, 5000)):
            yield (normal(*shape, dtype=dtype), normal(shape[-1], dtype=torch.float32, seed=1), 1e-5), {}
    yield (3e38 * normal(2, 8), None), {}


@pytest.mark.parametrize(("args", "kwargs"), list(rms_norm_cases()))
def test_rms_norm_interpreted_is_its_reference(args, kwargs):
    x, weight, eps = (*args, *(None, 1e-6)[len(args) - 1 :])
    eps = kwargs.get("eps", eps)
    if why := why_not("rms_norm", args, kwargs):
        assert x.dtype == torch.float16 or not x.numel(), why
        return
    reference = ops.rms_norm.reference
    result = to_torch(normalised(to_jax(x), to_jax(weight), eps, values=64, interpret=True))  # 16 rows a block
    assert not difference(result, reference(*args, **kwargs), exactly(reference, args, kwargs))


SINGLE = torch.float32
QUERY = Spec((1, 2, 4, 8), SINGLE)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("attention", (QUERY, QUERY, QUERY, Spec((4, 4), torch.bool))),
        ("attention", (Spec((1, 2, 0, 8), SINGLE), QUERY, QUERY)),
        ("attention", (QUERY, Spec((1, 2, 0, 8), SINGLE), Spec((1, 2, 0, 8), SINGLE))),
        ("attention", (QUERY, QUERY, Spec((1, 2, 4, 8), torch.bfloat16))),
        ("attention", (Spec((1, 2, 4, 1024), SINGLE), Spec((1, 2, 4, 1024), SINGLE), QUERY)),
        ("attention", tuple(Spec((1, 2, 4, 8), torch.float16) for _ in range(3))),
        ("attention", tuple(Spec((1, 2, 4, 8), torch.float64) for _ in range(3))),
        ("rms_norm", (Spec((2, 8), torch.float64), None)),
        ("rms_norm", (Spec((0, 8), SINGLE), None)),
        ("rms_norm", (Spec((2, 8), SINGLE), Spec((8,), torch.float64))),
        ("rms_norm", (Spec((2, 40_000), SINGLE), None)),
    ],
)
def test_what_a_kernel_does_not_take_is_refused_by_its_metadata(op, args):
    registry.load()
    assert registry.KERNELS[op, "pallas"].why_not(args, {})


@pytest.mark.parametrize("op", ["attention", "rms_norm"])
def test_a_kernel_is_a_candidate_for_tpus_alone(op):
    (kernel,) = (k for k in registry.kernels_for(op, "tpu") if k.provider == "pallas")
    assert kernel in registry.kernels_for(op, "xla:tpu")
    assert not any(kernel in registry.kernels_for(op, b) for b in ("xla:cpu", "xla:cuda", "cuda", "cpu"))
    assert kernel.not_on("stablehlo") == ""


def compiled(*dtypes: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "pallas_compiled.py"), ",".join(TARGETS), *dtypes],
        env={
            **os.environ,
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_SKIP_MDS_QUERY": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(HERE.parents[1]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def in_bfloat16():
    return compiled("bfloat16")


def each_compiled(found: dict, target: str, op: str) -> None:
    calls = {name: calls for name, calls in found.items() if name.startswith(f"{target} {op} ")}
    assert len(calls) == {"attention": 5, "rms_norm": 6}[op]
    assert {name: n for name, n in calls.items() if n != 1} == {}  # one call of Mosaic's each


def each(target: str):
    """A target as a parameter, with what the test is evidence for."""
    return pytest.param(target, marks=pytest.mark.compiles_for(f"tpu:{target}"))


@pytest.mark.parametrize("target", [each(t) for t in TARGETS])
@pytest.mark.parametrize("op", ["attention", "rms_norm"])
def test_a_kernel_compiles_for_a_tpu_that_is_not_here(in_bfloat16, op, target):
    each_compiled(in_bfloat16, target, op)


@pytest.mark.slow
@pytest.mark.compiles_for("tpu:v5e:2x2")
@pytest.mark.parametrize("op", ["attention", "rms_norm"])
def test_a_kernel_compiles_in_single_precision_too(op):
    found = compiled("float32")
    for target in TARGETS:
        each_compiled(found, target, op)


@pytest.mark.parametrize("target", [each(t) for t in TARGETS])
def test_a_program_that_calls_them_compiles(in_bfloat16, target):
    """In float32."""
    assert in_bfloat16[f"{target} program"] == ["attention: kernel pallas", "rms_norm: kernel pallas"]
