"""The gate of Gemma's and T5 v1.1's feed-forward layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from portable.ops._op import Samples, refuse, wide
from portable.ops._samples import Draw
from portable.ops.swiglu import gated

_SQRT_HALF = math.sqrt(0.5)
SCHEMA = '(Tensor gate, Tensor up, str approximate="none") -> Tensor'


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(gate) · up`` (Shazeer 2020, equation 6), elementwise.

    In half precision the whole product is float32 and is rounded once.

    Args:
        gate, up: of one shape and floating-point dtype.
        approximate: "none" for the error function, "tanh" for its approximation (Hendrycks and Gimpel 2016).

    Returns:
        A tensor of that shape and dtype.

    Raises:
        OpArgumentError: the shapes or dtypes differ, or ``approximate`` is neither.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        refuse("geglu", f"gate is {gate.dtype}{list(gate.shape)}, up {up.dtype}{list(up.shape)}", "make them alike")
    if approximate not in ("none", "tanh"):
        refuse("geglu", f"approximate={approximate!r}", "one of none, tanh")
    values = wide(gate)
    # torch's own exact gelu is NaN for +inf where oneDNN computes it (torch 2.13, CPU, float32)
    exact = approximate == "none"
    activated = 0.5 * values * (1 + torch.erf(values * _SQRT_HALF)) if exact else F.gelu(values, approximate="tanh")
    return (activated * wide(up)).to(gate.dtype)


def samples() -> Samples:
    for args, _ in gated(Draw()):
        yield args, {}
    for args, _ in gated(Draw(1)):
        yield args, {"approximate": "tanh"}
