"""A linear layer whose weight is int8, with a scale for each output channel (weight-only quantisation)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from portable.ops._op import Samples, refuse, wide
from portable.ops._samples import Draw

SCHEMA = "(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor"


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``(x weightᵀ) · scale + bias`` (Dettmers et al. 2022, section 2, with the activations left as they are).

    In half precision everything is float32 and is rounded once: unscaled sums of 127·x are beyond float16.

    Args:
        x: (\\*, K), floating point.
        weight: (N, K), int8.
        scale: (N,), floating point; the weight's value is ``weight · scale[:, None]``.
        bias: (N,), floating point, or None.

    Returns:
        (\\*, N) in the dtype of ``x``. Gradients flow to ``x``, ``scale`` and ``bias``.

    Raises:
        OpArgumentError: ``weight`` is not int8, or these shapes do not hold.
    """
    shapes = [tuple(v.shape) for v in (scale, bias) if v is not None]
    if weight.dtype != torch.int8 or weight.ndim != 2 or any(shape != tuple(weight.shape[:1]) for shape in shapes):
        refuse(
            "int8_linear", f"weight is {weight.dtype}{list(weight.shape)}", "weight is int8 (N, K), scale and bias (N,)"
        )
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        refuse("int8_linear", f"x {list(x.shape)} for weight {list(weight.shape)}", "x is (*, K), weight (N, K)")
    values = wide(x)
    out = F.linear(values, weight.to(values.dtype)) * scale.to(values.dtype)
    if bias is not None:
        out = out + bias.to(values.dtype)
    return out.to(x.dtype)


def samples() -> Samples:
    draw = Draw()
    yield (draw.normal(3, 8), _int8(draw, 5, 8), _scale(draw, 5)), {}
    yield (draw.normal(2, 3, 7), _int8(draw, 5, 7), _scale(draw, 5), draw.normal(5)), {}
    yield (draw.normal(7), _int8(draw, 1, 7), _scale(draw, 1)), {"bias": draw.normal(1)}
    yield (draw.normal(0, 8), _int8(draw, 5, 8), _scale(draw, 5)), {}
    yield (draw.normal(3, 0), _int8(draw, 5, 0), _scale(draw, 5), draw.normal(5)), {}
    yield (draw.strided(3, 8), _int8(draw, 8, 5).t(), _scale(draw, 5)), {}
    yield (draw.special(6, 8), _int8(draw, 5, 8), _scale(draw, 5)), {}
    for dtype in (torch.float16, torch.bfloat16):
        yield (draw.normal(3, 33, dtype=dtype), _int8(draw, 9, 33), _scale(draw, 9), draw.normal(9, dtype=dtype)), {}
        yield (40 * draw.normal(2, 64, dtype=dtype), _int8(draw, 4, 64), _scale(draw, 4)), {}


def _int8(draw: Draw, *shape: int) -> Tensor:
    return (draw.integers(*shape, below=256) - 128).to(torch.int8)


def _scale(draw: Draw, n: int) -> Tensor:
    return draw.normal(n).abs() / 64
