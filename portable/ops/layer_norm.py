"""Layer normalisation over the last axis (BERT, ViT, GPT-2)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from portable.ops._op import Samples, refuse, wide
from portable.ops._samples import Draw

SCHEMA = "(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor"


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) · weight + bias`` over the last axis (Ba et al. 2016).

    The variance is the biased one. In half precision everything is float32 and is rounded once.

    Args:
        x: (\\*, D), floating point.
        weight, bias: (D,), floating point of any width, or None for ones and zeros.
        eps: added to the variance.

    Returns:
        (\\*, D) in the dtype of ``x``.

    Raises:
        OpArgumentError: ``weight`` or ``bias`` has another shape than (D,).
    """
    given = [v for v in (weight, bias) if v is not None]
    if x.ndim == 0 or any(v.shape != x.shape[-1:] for v in given):
        refuse("layer_norm", "x is (*, D), weight and bias (D,)", "give x a last axis as long as weight and bias")
    if all(v.dtype == x.dtype for v in given):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    values = wide(x)
    weight, bias = (None if v is None else v.to(values.dtype) for v in (weight, bias))
    return F.layer_norm(values, x.shape[-1:], weight, bias, eps).to(x.dtype)


def samples() -> Samples:
    draw = Draw()
    yield (draw.normal(3, 8), draw.normal(8), draw.normal(8), 1e-5), {}
    yield (draw.normal(2, 3, 7), draw.normal(7)), {}
    yield (draw.normal(2, 7),), {"bias": draw.normal(7), "eps": 1e-2}
    yield (draw.normal(5),), {}
    yield (draw.normal(2, 1), draw.normal(1), draw.normal(1)), {}
    yield (draw.normal(0, 8), draw.normal(8), draw.normal(8)), {}
    yield (draw.normal(4, 16) + 20, None, None), {}  # a mean far beyond the deviation
    yield (draw.strided(4, 9), draw.strided(9), draw.strided(9)), {}
    yield (draw.special(6, 5), draw.normal(5), draw.normal(5)), {}
    for dtype in (torch.float16, torch.bfloat16):
        yield (draw.normal(3, 33, dtype=dtype), draw.normal(33, dtype=dtype), draw.normal(33, dtype=dtype)), {}
        yield (draw.normal(3, 8, dtype=dtype), draw.normal(8), draw.normal(8)), {}
