"""The gate of Llama's and Mixtral's feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from portable.ops._op import Samples, refuse, wide
from portable.ops._samples import Draw

SCHEMA = "(Tensor gate, Tensor up) -> Tensor"


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up`` (Shazeer 2020, equation 6), elementwise.

    In half precision the whole product is float32 and is rounded once.

    Args:
        gate, up: of one shape and floating-point dtype.

    Returns:
        A tensor of that shape and dtype.

    Raises:
        OpArgumentError: the shapes or dtypes differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        refuse("swiglu", f"gate is {gate.dtype}{list(gate.shape)}, up {up.dtype}{list(up.shape)}", "make them alike")
    return (F.silu(wide(gate)) * wide(up)).to(gate.dtype)


def samples() -> Samples:
    yield from gated(Draw())


def gated(draw: Draw) -> Samples:
    """Pairs of tensors for an op of a gate and a value."""
    yield (draw.normal(3, 8), draw.normal(3, 8)), {}
    yield (draw.normal(2, 3, 7), draw.normal(2, 3, 7)), {}
    yield (draw.normal(), draw.normal()), {}
    yield (draw.normal(0, 4), draw.normal(0, 4)), {}
    yield (draw.strided(4, 9), draw.normal(4, 9)), {}
    yield (100 * draw.normal(5, 5), draw.normal(5, 5)), {}  # both ends of the sigmoid
    yield (draw.special(6, 5), draw.special(6, 5)), {}
    for dtype in (torch.float16, torch.bfloat16):
        yield (draw.normal(3, 33, dtype=dtype), draw.normal(3, 33, dtype=dtype)), {}
