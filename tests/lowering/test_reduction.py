"""Reductions agree with eager: dims, kept dims, ties, NaN, infinities, overflow, empty and 0-d tensors."""

import math

import pytest
import torch

import portable as pt
from portable.testing import lowered

inf, nan = math.inf, math.nan
HARD = torch.tensor([[1.0, 2.0, 2.0, -1.0], [3.0, nan, 0.0, -0.0], [-inf, 5.0, inf, 5.0], [2.0, 2.0, 2.0, 2.0]])
torch_of = {name: getattr(torch, name) for name in dir(torch)}
MANY_DIMS = "sum mean amax amin all any nansum logsumexp nanmean".split()
ONE_DIM = "prod argmax argmin max min".split()
WHOLE = "sum mean prod amax amin all any nansum argmax argmin max min aminmax std var var_mean std_mean".split()


def over_dims(names_of_many, names_of_one, dims=(0, -1)):
    functions = {}
    for keep in (False, True):
        for name in names_of_many:
            for d in ((dims[0],), (dims[-1],), dims):
                functions[f"{name} {d} {keep}"] = lambda x, f=torch_of[name], d=d, k=keep: f(x, d, keepdim=k)
        for name in names_of_one:
            for d in dims:
                functions[f"{name} {d} {keep}"] = lambda x, f=torch_of[name], d=d, k=keep: f(x, d, keepdim=k)
    return functions


def moments(dims=((0,), (-1,), (0, 1))):
    return {
        f"{name} {c} {d}": lambda x, f=torch_of[name], d=d, c=c: f(x, d, correction=c, keepdim=c == 0)
        for name in ("var", "std", "var_mean", "std_mean")
        for d in dims
        for c in (0, 1, 2, 2.5, 5)
    }


def norms(orders=(0, 1, 2, 3, inf, -inf, 0.5, -1)):
    return {
        f"norm {p} {d}": lambda x, p=p, d=d: torch.linalg.vector_norm(x, p, d)
        for p in orders
        for d in (None, 0, (0, 1))
    }


def whole(names=WHOLE):
    return {f"{name} of all": torch_of[name] for name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_infinities_and_ties(agrees, dtype):
    agrees({**over_dims(MANY_DIMS, ONE_DIM), **whole(), **moments(), **norms()}, HARD.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_finite_values(agrees, dtype):
    x = torch.linspace(-3, 2, 20).sin().reshape(4, 5).to(dtype)
    functions = {**over_dims(MANY_DIMS, ONE_DIM), **whole(), **moments(), **norms()}
    if dtype is torch.float16:  # eager's own nansum rounds each partial sum to half precision
        functions = {name: f for name, f in functions.items() if not name.startswith("nan")}
    agrees(functions, x.t()[::2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool])
def test_integers_and_booleans(agrees, dtype):
    x = torch.tensor([[0, 1, 2, 2], [5, 5, 3, 200], [120, 121, 122, 1], [0, 0, 0, 0]]).to(dtype)
    ordered = ONE_DIM if dtype is not torch.bool else ["prod", "max", "min"]
    functions = over_dims(["sum", "amax", "amin", "all", "any"], ordered)
    functions |= whole(["sum", "prod", "all", "any", "max", "min"])
    functions |= {"nonzero": lambda x: torch.count_nonzero(x, 1), "nonzero of all": torch.count_nonzero}
    functions |= {"int32": lambda x: x.sum(dtype=torch.int32), "float": lambda x: x.mean(0, dtype=torch.float64)}
    agrees(functions, x)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_empty_tensors(agrees, shape):
    names = "sum mean prod all any nansum std var".split()
    functions = whole(names) | {"sum 0": lambda x: x.sum(0), "mean -1": lambda x: x.mean(-1, keepdim=True)}
    functions |= {"logsumexp": lambda x: torch.logsumexp(x, -1), "norm": torch.linalg.vector_norm}
    functions |= {"count": lambda x: torch.count_nonzero(x), "softmax": lambda x: torch.softmax(x, -1)}
    agrees(functions, torch.zeros(shape))


def test_0d_tensors_reduce_over_dim_0_and_minus_1(agrees):
    functions = over_dims(["sum", "mean", "amax", "all", "logsumexp"], ["argmax", "max", "prod"], dims=(-1,))
    agrees(
        {**functions, **whole(), "cumsum": lambda x: x.cumsum(0), "cummax": lambda x: x.cummax(0)}, torch.tensor(2.5)
    )


def test_an_empty_list_of_dims(agrees):
    functions = {"sum": lambda x: x.sum([]), "mean": lambda x: x.mean([]), "amax": lambda x: torch.amax(x, ())}
    agrees({**functions, "all": lambda x: torch.all(x, ()), "any": lambda x: torch.any(x, ())}, HARD[:1])


def test_a_long_sum_of_float32_does_not_stall():
    assert lowered(lambda x: x.sum(), torch.ones(1 << 25)).item() == 1 << 25


def test_half_precision_accumulates_in_float32(agrees):
    x = torch.full((4096,), 0.1, dtype=torch.bfloat16)
    agrees({"sum": torch.sum, "mean": torch.mean, "cumsum": lambda x: x.cumsum(0)[-1], "norm": torch.norm}, x)


def test_complex_reductions(agrees):
    x = torch.tensor([[1 + 2j, -3j], [2.5, 1j]])
    functions = {"sum": lambda x: x.sum(0), "mean": torch.mean, "prod": torch.prod, "var": torch.var, "all": torch.all}
    agrees({**functions, "norm": torch.linalg.vector_norm, "cumsum": lambda x: x.cumsum(1), "trace": torch.trace}, x)


def test_gradients_of_reductions(agrees):
    def gradient(f):
        def run(x):
            x = x.detach().requires_grad_(True)
            return torch.autograd.grad(f(x).square().sum(), x)[0]

        return run

    x = torch.tensor([[1.0, 3.0, 3.0], [-2.0, 0.5, 3.0]])
    functions = {
        "sum": lambda x: x.sum(0),
        "mean": lambda x: x.mean(),
        "amax ties": lambda x: x.amax(1),
        "max": lambda x: x.max(1).values,
        "max of all": lambda x: x.max(),
        "var": lambda x: x.var(1),
        "prod": lambda x: x.prod(0),
        "logsumexp": lambda x: x.logsumexp(1),
        "norm": lambda x: x.norm(dim=0),
        "cumsum": lambda x: x.cumsum(0),
        "cumprod": lambda x: x.cumprod(1),
        "cummax": lambda x: x.cummax(1).values,
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(0),
    }
    agrees({name: gradient(f) for name, f in functions.items()}, x)


REDUCED_DTYPES = [torch.bool, torch.uint8, torch.int32, torch.float32, torch.complex64]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in ("sum", "nansum", "prod", "cumsum", "cumprod")
        for dtype in REDUCED_DTYPES
        if not (name.startswith("cum") and dtype is torch.bool)  # eager has none
    ],
)
def test_a_reduction_in_another_dtype_casts_first(agrees, name, dtype):
    x = torch.tensor([[0.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    given = [t for t in REDUCED_DTYPES if name != "nansum" or not (t.is_complex or dtype.is_complex)]
    agrees({str(t): lambda x, t=t: getattr(x.to(t), name)(dim=1, dtype=dtype) for t in given}, x)


@pytest.mark.parametrize("out", [torch.int32, torch.float64])
@pytest.mark.parametrize("name", ["sum", "prod", "cumsum", "cumprod"])
def test_a_reduction_into_a_tensor_of_another_dtype_computes_in_it(agrees, name, out):
    x = torch.tensor([[2.5, 1.0, 3.5], [16777216.0, 1.0, 1.0]])

    def reduced(x):
        result = torch.empty(x.shape if name.startswith("cum") else x.shape[:1], dtype=out)
        return getattr(torch, name)(x, 1, out=result)

    agrees({name: reduced}, x)
    assert torch.equal(pt.compile(reduced, backend="xla", fallback="error")(x), reduced(x))
