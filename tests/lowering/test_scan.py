"""Scans and softmax agree with eager."""

import math

import pytest
import torch
import torch.nn.functional as F

inf, nan = math.inf, math.nan
HARD = torch.tensor([[1.0, 2.0, 2.0, -1.0], [3.0, nan, 0.0, 5.0], [-inf, 5.0, inf, 5.0], [2.0, 2.0, 1.0, 2.0]])


def scans(names, dims=(0, -1)):
    return {f"{n} {d}": lambda x, n=n, d=d: getattr(torch, n)(x, d) for n in names for d in dims}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scans_of_floats_with_ties_nan_and_infinities(agrees, dtype):
    agrees(scans("cumsum cumprod cummax cummin logcumsumexp".split()), HARD.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool])
def test_scans_of_integers_accumulate_in_int64(agrees, dtype):
    x = torch.tensor([[1, 100, 100, 0], [3, 3, 120, 1]]).to(dtype)
    agrees(scans("cumsum cumprod cummax cummin".split()), x)


def test_a_scan_may_name_its_dtype(agrees):
    functions = {
        "narrow": lambda x: x.cumsum(0, dtype=torch.int8),
        "float": lambda x: x.cumprod(0, dtype=torch.float32),
    }
    agrees(functions, torch.tensor([100, 100, 3]))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_scans_of_empty_and_0d_tensors(agrees, shape):
    agrees(scans(["cumsum", "cumprod", "logcumsumexp"]), torch.full(shape, 1.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_softmax_of_rows_with_infinities(agrees, dtype):
    x = torch.tensor([[1.0, 2.0, 3.0], [-inf, 0.0, 1.0], [-inf, -inf, -inf], [inf, 1.0, 2.0], [1e4, -1e4, 0.0]])
    functions = {
        "softmax": lambda x: F.softmax(x, 1),
        "log_softmax": lambda x: F.log_softmax(x, -1),
        "softmin": lambda x: F.softmin(x, 0),
        "float32": lambda x: F.softmax(x, 1, dtype=torch.float32),
        "logsumexp": lambda x: torch.logsumexp(x, 1, keepdim=True),
        "safe": lambda x: torch.ops.aten._safe_softmax(x, 1),
    }
    agrees(functions, x.to(dtype))


def test_softmax_of_0d_and_of_an_inner_dim(agrees):
    agrees({"0-d": lambda x: F.softmax(x[0, 0, 0], 0), "inner": lambda x: F.log_softmax(x, 1)}, torch.ones(2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_logsumexp_and_its_running_form(agrees, dtype):
    torch.manual_seed(0)
    x = torch.randn(4, 30, dtype=dtype) * 3  # angles add up beyond π
    x[0, 3], x[1, 5], x[2, 7] = complex("-inf+1j"), complex("inf+0.5j"), complex("nan")
    x[3, 0], x[3, 1] = complex("-inf"), complex("-inf+2j")
    functions = {f"logcumsumexp({d})": lambda x, d=d: torch.logcumsumexp(x, d) for d in (0, 1)}
    functions |= {f"logsumexp({d})": lambda x, d=d: torch.logsumexp(x, d) for d in (1, (0, 1))}
    functions |= {"empty": lambda x: torch.logsumexp(x[:0], 0), "none": lambda x: torch.logcumsumexp(x[:0], 0)}
    agrees(functions, x)
