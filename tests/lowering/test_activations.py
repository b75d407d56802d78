"""Activations and their gradients agree with eager, at the edges too."""

import math

import pytest
import torch
import torch.nn.functional as F

inf, nan = math.inf, math.nan
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
# eager's vectorised exact GELU gives NaN for inf, and inf for 3e38: those two are left out of its edges
EDGES = [0.0, -0.0, 1, -1, 0.5, -0.5, 3, -3, 6, -6, 2, -2, 20.5, -20.5, 100, -100, -inf, nan]
ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "hardtanh wide": lambda x: F.hardtanh(x, -2, 3),
    "leaky_relu": F.leaky_relu,
    "leaky_relu steep": lambda x: F.leaky_relu(x, 2.0),
    "elu": F.elu,
    "elu alpha": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 2.0),
    "softplus": F.softplus,
    "softplus beta": lambda x: F.softplus(x, 2.0, 5.0),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "logsigmoid": F.logsigmoid,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "rrelu": F.rrelu,
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.3, dtype=x.dtype)),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_at_the_edges(agrees, dtype):
    agrees(ACTIVATIONS, torch.tensor(EDGES, dtype=dtype))


def gradient(function):
    def run(x):
        x = x.detach().requires_grad_(True)
        y = function(x)
        return torch.autograd.grad(y, x, torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape))[0]

    return run


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_at_the_edges(agrees, dtype):
    # eager's derivatives of hardswish and of infinite arguments differ between its own kernels
    functions = {name: gradient(f) for name, f in ACTIVATIONS.items()}
    agrees(functions, torch.tensor([v for v in EDGES if abs(v) <= 100], dtype=dtype))


def test_gated_linear_unit_and_its_gradient(agrees):
    x = torch.linspace(-3, 3, 24).reshape(4, 6)
    functions = {"last": F.glu, "first": lambda x: F.glu(x, 0), "negative": lambda x: F.glu(x, -2)}
    agrees({**functions, **{f"d {k}": gradient(f) for k, f in functions.items()}}, x)


def test_prelu_with_a_slope_for_each_channel(agrees):
    def slopes(x, w):
        x, w = x.detach().requires_grad_(True), w.detach().requires_grad_(True)
        y = F.prelu(x, w)
        return (y, *torch.autograd.grad(y.square().sum(), (x, w)))

    agrees({"prelu": slopes}, torch.linspace(-3, 3, 24).reshape(2, 3, 4), torch.tensor([0.1, 0.2, -1.0]))


def test_clamped_integers(agrees):
    agrees({"relu": F.relu, "hardtanh": F.hardtanh, "relu6": F.relu6}, torch.tensor([-7, 0, 3, 9]))
