"""Top-k routing of tokens to the experts of a mixture (Mixtral, Qwen-MoE)."""

from __future__ import annotations

import torch
from torch import Tensor

from portable.ops._op import Samples, refuse, wide
from portable.ops._samples import Draw

SCHEMA = "(Tensor logits, int top_k, bool renormalize=True) -> (Tensor, Tensor)"


def moe_route(logits: Tensor, top_k: int, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """The ``top_k`` experts of each token and their weights: the largest of ``softmax(logits)`` (Shazeer et al. 2017).

    Experts are chosen by their logits, largest first; of equal ones the lower index wins, NaN counts as the largest.
    In half precision the softmax is float32, as in Mixtral's own code.

    Args:
        logits: (\\*, E), floating point.
        top_k: 1…E.
        renormalize: the weights of a token's experts sum to one (Mixtral): the softmax over their logits alone.

    Returns:
        Weights (\\*, top_k), float64 for float64 logits, else float32; and indices (\\*, top_k), int64.

    Raises:
        OpArgumentError: ``top_k`` is not in 1…E.
    """
    if logits.ndim == 0 or not 1 <= top_k <= logits.shape[-1]:
        refuse("moe_route", f"top_k={top_k} of logits {list(logits.shape)}", "top_k is in 1…E for logits (*, E)")
    values = wide(logits)
    indices = torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
    if renormalize:
        return values.gather(-1, indices).softmax(-1), indices
    return values.softmax(-1).gather(-1, indices), indices


def samples() -> Samples:
    draw = Draw()
    yield (draw.normal(5, 8), 2), {}
    yield (draw.normal(5, 8), 2), {"renormalize": False}
    yield (draw.normal(2, 3, 4), 4, False), {}
    yield (draw.normal(3, 1), 1), {}
    yield (draw.normal(0, 8), 2), {}
    yield (draw.normal(7), 3), {}
    yield (torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2), {}  # ties
    yield (200 * draw.normal(5, 8), 3), {}
    yield (draw.strided(5, 9), 2), {}
    yield (draw.special(6, 5), 3), {}
    for dtype in (torch.float16, torch.bfloat16):
        yield (draw.normal(5, 8, dtype=dtype), 2), {}
