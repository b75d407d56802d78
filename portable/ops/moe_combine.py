"""Bring the experts' results back to their tokens: the inverse of ``moe_dispatch``, with the routing weights."""

from __future__ import annotations

import torch
from torch import Tensor

from portable.ops._op import Samples, refuse, wide
from portable.ops._samples import Draw

SCHEMA = "(Tensor rows, Tensor order, Tensor weights) -> Tensor"


def moe_combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """For each token the sum of its K rows, each times its weight (Shazeer et al. 2017, equation 1).

    In half precision products and sum are float32 and are rounded once.

    Args:
        rows: (T·K, D), floating point: row i belongs to token ``order[i] // K``.
        order: (T·K,), int64: a permutation of 0…T·K-1, from ``moe_dispatch``.
        weights: (T, K), any floating dtype, from ``moe_route``; 0 for an expert that is not here.

    Returns:
        (T, D) in the dtype of ``rows``.

    Raises:
        OpArgumentError: these shapes do not hold.
    """
    if rows.ndim != 2 or weights.ndim != 2 or order.shape != rows.shape[:1] or weights.numel() != rows.shape[0]:
        shapes = f"rows {list(rows.shape)}, order {list(order.shape)}, weights {list(weights.shape)}"
        refuse("moe_combine", f"does not take {shapes}", "rows are (T*K, D), order (T*K,), weights (T, K)")
    place = torch.arange(order.shape[0], device=order.device)
    row_of = torch.zeros_like(order).scatter(0, order, place)
    values = wide(rows).index_select(0, row_of).unflatten(0, tuple(weights.shape))
    return (values * weights.to(values.dtype).unsqueeze(-1)).sum(1).to(rows.dtype)


def samples() -> Samples:
    draw = Draw()
    for tokens, k, width in ((5, 2, 3), (7, 1, 3), (1, 1, 1), (0, 2, 3), (3, 2, 0)):
        yield (draw.normal(tokens * k, width), _order(draw, tokens * k), draw.normal(tokens, k)), {}
    yield (draw.strided(10, 3), _order(draw, 10), draw.strided(5, 2)), {}
    yield (draw.special(10, 3), _order(draw, 10), draw.normal(5, 2)), {}
    for dtype in (torch.float16, torch.bfloat16):
        yield (draw.normal(12, 9, dtype=dtype), _order(draw, 12), draw.normal(6, 2)), {}


def _order(draw: Draw, n: int) -> Tensor:
    return draw.normal(n).argsort()
