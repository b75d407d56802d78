"""Bring the tokens of each expert together, so that one grouped product runs all experts without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from portable.ops._op import Samples, refuse
from portable.ops._samples import Draw

SCHEMA = "(Tensor x, Tensor indices, int num_experts) -> (Tensor, Tensor, Tensor)"


def moe_dispatch(x: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once for each of its K experts, the rows of an expert together (Gale et al. 2022, MegaBlocks).

    The rows of expert 0 come first; within an expert they keep the tokens' order. An index outside 0…E-1, e.g. an
    expert on another device, gives a row after all others that no expert counts. No capacity, so no token is dropped.

    Args:
        x: (T, D), any dtype.
        indices: (T, K), int64: the experts of each token, from ``moe_route``.
        num_experts: E.

    Returns:
        rows (T·K, D) in the dtype of ``x``; order (T·K,), int64: row i is a copy of token ``order[i] // K``, for its
        expert number ``order[i] % K``; counts (E,), int64: rows of each expert. ``moe_combine`` takes ``order``.

    Raises:
        OpArgumentError: ``x`` is not (T, D), ``indices`` not (T, K) with K ≥ 1, or ``num_experts`` is negative.
    """
    if x.ndim != 2 or indices.ndim != 2 or indices.shape[0] != x.shape[0] or indices.shape[1] == 0 or num_experts < 0:
        shapes = f"x {list(x.shape)}, indices {list(indices.shape)}, num_experts={num_experts}"
        refuse("moe_dispatch", f"does not take {shapes}", "x is (T, D), indices (T, K) with K >= 1")
    flat = indices.reshape(-1)
    known = (flat >= 0) & (flat < num_experts)
    expert = torch.where(known, flat, num_experts)
    order = torch.sort(expert, stable=True).indices
    counts = (expert.unsqueeze(1) == torch.arange(num_experts, device=x.device)).sum(0)
    return x.index_select(0, order // indices.shape[1]), order, counts


def samples() -> Samples:
    draw = Draw()
    yield (draw.normal(5, 3), draw.integers(5, 2, below=4), 4), {}
    yield (draw.normal(7, 3), draw.integers(7, 1, below=3), 8), {}  # experts without a token
    yield (draw.normal(4, 3), torch.tensor([[0, 7], [-1, 1], [1, 0], [2, -1]]), 3), {}  # experts that are elsewhere
    yield (draw.normal(1, 1), torch.zeros(1, 1, dtype=torch.int64), 1), {}
    yield (draw.normal(0, 3), draw.integers(0, 2, below=4), 4), {}
    yield (draw.normal(3, 0), draw.integers(3, 2, below=4), 4), {}
    yield (draw.strided(5, 3), draw.integers(2, 5, below=4).t(), 4), {}
    yield (draw.special(6, 4), draw.integers(6, 2, below=4), 4), {}
    for dtype in (torch.float16, torch.bfloat16):
        yield (draw.normal(9, 3, dtype=dtype), draw.integers(9, 2, below=4), 4), {}
