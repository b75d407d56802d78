"""Sums, means and maxima of bags of rows of a table (DLRM, fastText)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from portable.ops._op import Samples, refuse, wide
from portable.ops._samples import Draw

SCHEMA = (
    '(Tensor weight, Tensor indices, Tensor offsets, str mode="sum", Tensor? per_sample_weights=None, '
    "int? padding_idx=None) -> Tensor"
)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: str = "sum",
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """One row for each bag, the sum, mean or maximum of its rows of ``weight``: as torch's function of this name.

    Bag b holds ``indices[offsets[b] : offsets[b + 1]]``, the last one the rest. An empty bag gives zeros. In half
    precision the sums are float32 and are rounded once.

    Args:
        weight: (rows, D), floating point.
        indices: (N,), int64 or int32, of 0…rows-1.
        offsets: (B,), of the dtype of ``indices``; ascending, the first is 0.
        mode: "sum", "mean" or "max".
        per_sample_weights: (N,), of the dtype of ``weight``: a factor for each row; only with "sum".
        padding_idx: entries with this index take no part.

    Returns:
        (B, D) in the dtype of ``weight``.

    Raises:
        OpArgumentError: shapes or the mode are none of these, or factors are given without "sum".
    """
    if weight.ndim != 2 or indices.ndim != 1 or offsets.ndim != 1:
        refuse("embedding_bag", "weight is (rows, D), indices (N,), offsets (B,)", "flatten indices, give offsets")
    if mode not in ("sum", "mean", "max") or (per_sample_weights is not None and mode != "sum"):
        refuse("embedding_bag", f"mode={mode!r}", "one of sum, mean, max; sum where per_sample_weights are given")
    factors = None if per_sample_weights is None else wide(per_sample_weights)
    out = F.embedding_bag(
        indices, wide(weight), offsets, mode=mode, per_sample_weights=factors, padding_idx=padding_idx
    )
    return out.to(weight.dtype)


def samples() -> Samples:
    draw = Draw()
    offsets = torch.tensor([0, 3, 3, 8])  # the second bag is empty
    for mode in ("sum", "mean", "max"):
        yield (draw.normal(9, 5), draw.integers(11, below=9), offsets, mode), {}
        yield (draw.normal(3, 4), draw.integers(11, below=3), offsets), {"mode": mode, "padding_idx": 1}
        yield (draw.special(6, 4), torch.arange(6), torch.arange(6), mode), {}
        for dtype in (torch.float16, torch.bfloat16):
            yield (draw.normal(9, 5, dtype=dtype), draw.integers(11, below=9), offsets, mode), {}
    factors = draw.normal(11)
    yield (draw.normal(9, 5), draw.integers(11, below=9), offsets), {"per_sample_weights": factors}
    yield (draw.strided(9, 5), draw.integers(11, below=9), offsets), {}
    yield (draw.normal(9, 5), draw.integers(0, below=9), torch.zeros(2, dtype=torch.int64)), {}
