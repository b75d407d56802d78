"""The kernels in C++ compute what the references do: against float64, on every kind of shape and value they take."""

import math
import threading

import jax
import numpy as np
import pytest
import torch

import portable as pt
from portable.kernels import registry
from portable.lowering.context import Spec
from portable.slo.correctness import difference, exactly

BACKEND = "xla:cpu"
INF, NAN = math.inf, math.nan


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def kernel(op: str) -> registry.Kernel:
    return next(k for k in registry.kernels_for(op, BACKEND) if k.provider == "cpp")


def compiled(op: str, function):
    """``function`` compiled with the C++ kernel of ``op``, and a check that it is what runs."""
    program = pt.compile(function, backend="xla", dynamic=False, kernels=f"{op}=cpp")

    def call(*args):
        with torch.no_grad():
            result = program(*args)
        ((chosen,),) = [c for o, c in pt.explain(program, show=False).decisions.items() if o == op]
        assert chosen.runs_as == "kernel cpp", chosen
        return result

    return call


def jitted(op: str, *args, **kwargs):
    """The kernel of ``op`` called as a function of JAX values, alone in a program."""
    function = kernel(op).implementation
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

    def call(*arrays):
        values = list(args)
        for place, array in zip(places, arrays, strict=True):
            values[place] = array
        return function(*values, **kwargs)

    def to_jax(x: torch.Tensor) -> jax.Array:
        wide = jax.numpy.asarray(x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy())
        return wide.astype(str(x.dtype).removeprefix("torch."))

    def to_torch(x: jax.Array) -> torch.Tensor:
        kind = getattr(torch, str(x.dtype))
        return torch.from_numpy(np.array(x.astype("float32") if kind == torch.bfloat16 else x)).to(kind)

    return jax.tree.map(to_torch, jax.jit(call)(*[to_jax(args[i]) for i in places]))


SHAPES = (
    ((), 0), ((1,), 0), ((5,), -1), ((0,), 0), ((3, 0), 0), ((0, 3), 1), ((4097,), 0), ((3, 1027), 1), ((1027, 3), 0),
    ((2, 5, 7), 1), ((2, 0, 7), 1), ((5, 3, 259), -2), ((1, 33, 600), 1), ((2, 3, 4, 5), 0), ((64, 8192), 1),
    ((1, 1024, 1536), 1), ((70_000,), 0), ((7, 100_000), 0),
)  # fmt: skip


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_cumsum_rounds_the_float64_sum_once(shape, dim):
    x = normal(*shape)
    result = compiled("aten.cumsum.default", lambda x: torch.cumsum(x, dim))(x)
    exact = torch.cumsum(x.double(), dim)
    torch.testing.assert_close(result, exact.float(), rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("dim", [0, 1])
def test_cumsum_is_eagers_where_values_are_not_finite(dim):
    x = normal(12, 12)
    x[2, 3], x[5, 1], x[1, 7], x[9, 7], x[4, 10] = NAN, INF, INF, -INF, -INF
    result = compiled("aten.cumsum.default", lambda x: torch.cumsum(x, dim))(x)
    torch.testing.assert_close(result, torch.cumsum(x, dim), equal_nan=True)


@pytest.mark.parametrize("shape", [(1_000_000,), (1_000_000, 2)])
def test_cumsum_of_many_small_numbers_does_not_drift(shape):
    x = torch.full(shape, 0.1)
    result = compiled("aten.cumsum.default", lambda x: torch.cumsum(x, 0))(x)
    torch.testing.assert_close(result, torch.cumsum(x.double(), 0).float(), rtol=1e-7, atol=0)


def test_cumsum_keeps_values_beyond_float32_on_the_way():
    x = torch.tensor([3e38, 3e38, -3e38, -3e38, 1.0, 3e38, 3e38, -3e38])
    result = compiled("aten.cumsum.default", lambda x: torch.cumsum(x, 0))(x)
    torch.testing.assert_close(result, torch.cumsum(x, 0))


def test_cumsum_takes_any_strides():
    x = normal(9, 40).t()[::3]
    result = compiled("aten.cumsum.default", lambda x: torch.cumsum(x, 1))(x)
    torch.testing.assert_close(result, torch.cumsum(x, 1))


@pytest.mark.parametrize(
    ("dtype", "kwargs", "takes"),
    [
        (torch.float32, {}, True),
        (torch.float32, {"dtype": torch.float32}, True),
        (torch.float32, {"dtype": torch.float64}, False),
        (torch.float64, {}, False),
        (torch.int64, {}, False),
        (torch.bfloat16, {"dtype": torch.float32}, False),
    ],
)
def test_cumsum_takes_float32_alone(dtype, kwargs, takes):
    why_not = kernel("aten.cumsum.default").why_not((Spec((3, 4), dtype), 0), kwargs)
    assert (why_not == "") is takes, why_not


def _rms_norm_samples():
    yield from pt.ops.rms_norm.samples()
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((1, 1), (7, 31), (3, 2048), (2, 3, 4099), (600, 257), (1, 300_000)):
            yield (normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1), 1e-5), {}
    x = normal(300, 512)
    x[3, 5], x[7, 0], x[8, 511], x[250, 100] = NAN, INF, -INF, 3e38
    yield (x, normal(512)), {}
    yield (x.bfloat16(), normal(512)), {}
    yield (1e-30 * normal(4, 64), None, 0.0), {}
    yield (torch.zeros(2, 8), None, 0.0), {}


@pytest.mark.parametrize(("args", "kwargs"), list(_rms_norm_samples()))
def test_rms_norm_is_its_reference(args, kwargs):
    types = [Spec(tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
    if args[0].dtype == torch.float16:
        assert kernel("rms_norm").why_not(types, kwargs)
        return
    assert not kernel("rms_norm").why_not(types, kwargs)
    reference = pt.ops.rms_norm.reference
    result = jitted("rms_norm", *args, **kwargs)
    assert not difference(result, reference(*args, **kwargs), exactly(reference, args, kwargs))


@pytest.mark.parametrize(
    ("shape", "rank", "weight", "bias"),
    [
        ((1, 1), 1, True, True),
        ((7, 31), 1, True, False),
        ((7, 31), 1, False, True),
        ((5,), 1, False, False),
        ((0, 8), 1, True, True),
        ((4, 0, 8), 1, True, True),
        ((3, 5, 7, 11), 2, True, True),
        ((3, 4099), 2, True, True),
        ((1024, 768), 1, True, True),
        ((2, 200_000), 1, True, True),
    ],
)
def test_layer_norm_is_its_reference(shape, rank, weight, bias):
    kept = shape[len(shape) - rank :]
    args = (normal(*shape) + 20, list(kept), normal(*kept) if weight else None, normal(*kept) if bias else None, 1e-5)

    def function(x, w, b):
        return torch.ops.aten.native_layer_norm.default(x, list(kept), w, b, 1e-5)

    result = compiled("aten.native_layer_norm.default", function)(args[0], args[2], args[3])
    reference = torch.ops.aten.native_layer_norm.default
    assert not difference(result, reference(*args), exactly(reference, args, {}))


def test_layer_norm_is_eagers_where_values_are_not_finite():
    x, w, b = normal(8, 64), normal(64), normal(64)
    x[0, 3], x[2, 0], x[3, 60], x[5] = NAN, INF, -INF, 7.0

    def function(x):
        return torch.ops.aten.native_layer_norm.default(x, [64], w, b, 1e-5)

    result = compiled("aten.native_layer_norm.default", function)(x)
    torch.testing.assert_close(result, function(x), equal_nan=True)


@pytest.mark.parametrize("shape", [[0], [4, 0]])
def test_layer_norm_takes_no_empty_rows(shape):
    x = Spec((3, *shape), torch.float32)
    assert kernel("aten.native_layer_norm.default").why_not((x, shape, None, None, 1e-5), {})


def test_many_calls_at_once_share_the_threads_without_waiting_for_each_other_forever():
    x = normal(64, 8192)
    several = compiled("aten.cumsum.default", lambda x: [torch.cumsum(x + i, 1) for i in range(8)])
    want = [torch.cumsum(x + i, 1) for i in range(8)]
    several(x)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                torch.testing.assert_close(several(x), want)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
    assert not any(t.is_alive() for t in threads), "calls wait for each other"
    assert not failures, failures[0]
