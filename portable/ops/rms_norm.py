"""Root-mean-square normalisation over the last axis (Llama, T5, Mistral)."""

from __future__ import annotations

import torch
from torch import Tensor

from portable.ops._op import Samples, refuse, wide
from portable.ops._samples import Draw

SCHEMA = "(Tensor x, Tensor? weight=None, float eps=1e-06) -> Tensor"


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last axis (Zhang and Sennrich 2019, equation 4).

    In half precision everything, the product with the weight included, is float32 and is rounded once: as in
    ``torch.nn.functional.rms_norm``; Llama's own code rounds before that product too.

    Args:
        x: (\\*, D), floating point.
        weight: (D,), floating point of any width, or None for ones.
        eps: added to the mean of squares.

    Returns:
        (\\*, D) in the dtype of ``x``.

    Raises:
        OpArgumentError: ``weight`` has another shape than (D,).
    """
    if x.ndim == 0 or (weight is not None and weight.shape != x.shape[-1:]):
        refuse("rms_norm", "x is (*, D) and weight (D,)", "give x a last axis as long as weight")
    values = wide(x)
    out = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.to(out.dtype)
    return out.to(x.dtype)


def samples() -> Samples:
    draw = Draw()
    yield (draw.normal(3, 8), draw.normal(8), 1e-6), {}
    yield (draw.normal(2, 3, 7),), {"eps": 1e-2}
    yield (draw.normal(5),), {}
    yield (draw.normal(1, 1), draw.normal(1)), {}
    yield (draw.normal(0, 8), draw.normal(8)), {}
    yield (draw.normal(3, 0), draw.normal(0)), {}
    yield (torch.zeros(2, 4), draw.normal(4)), {}
    yield (draw.strided(4, 9), draw.strided(9)), {}
    yield (draw.special(6, 5), draw.normal(5)), {}
    for dtype in (torch.float16, torch.bfloat16):
        yield (draw.normal(3, 33, dtype=dtype), draw.normal(33, dtype=dtype)), {}
        yield (300 * draw.normal(2, 8, dtype=dtype), draw.normal(8)), {}  # squares beyond float16; a float32 weight
