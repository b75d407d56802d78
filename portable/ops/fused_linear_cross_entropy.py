"""The last linear layer of a language model together with its loss; the logits never exist as a whole.

Vocabularies of 128 000 tokens make the logits the largest tensor of a training step. Forward and backward take a chunk
of tokens at a time, and the backward computes the chunk's logits again (Hsu et al. 2024, Liger-Kernel, section 3.2;
Wijmans et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from portable.ops._op import Samples, refuse, wide
from portable.ops._samples import Draw
from portable.ops.softmax_cross_entropy import REDUCTIONS

SCHEMA = (
    "(Tensor x, Tensor weight, Tensor target, Tensor? bias=None, int ignore_index=-100, "
    'float label_smoothing=0.0, str reduction="mean", int chunks=0) -> Tensor'
)


def fused_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunks: int = 0,
) -> Tensor:
    """``softmax_cross_entropy(linear(x, weight, bias), target)`` without the memory for the logits.

    A chunk's logits have the dtype of ``x``, as from ``nn.Linear``; their softmax, the loss and the sums over chunks
    are float32 in half precision.

    Args:
        x: (N, D), floating point.
        weight: (V, D); bias: (V,) or None; of the dtype of ``x``.
        target: (N,), int64, of 0…V-1 or ``ignore_index``, which takes no part.
        label_smoothing, reduction: as in ``softmax_cross_entropy``.
        chunks: into how many the tokens are divided; 0: ceil(V / D), with which a chunk's logits are as large as x.

    Returns:
        A scalar, or (N,) for "none"; float64 for float64 inputs, else float32.

    Raises:
        OpArgumentError: these shapes do not hold, ``reduction`` is none of these, or ``chunks`` is negative.
    """
    right = x.ndim == weight.ndim == 2 and x.shape[1] == weight.shape[1] and target.shape == x.shape[:1]
    if not right or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = f"x {list(x.shape)}, weight {list(weight.shape)}, target {list(target.shape)}"
        refuse("fused_linear_cross_entropy", f"does not take {shapes}", "(N, D), (V, D), (N,), and (V,) for the bias")
    if reduction not in REDUCTIONS or chunks < 0:
        legal = f"reduction is one of {', '.join(REDUCTIONS)}, chunks 0 or more"
        refuse("fused_linear_cross_entropy", f"reduction={reduction!r}, chunks={chunks}", legal)
    losses = _TokenLosses.apply(x, weight, target, bias, ignore_index, label_smoothing, chunks)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


class _TokenLosses(torch.autograd.Function):
    """The loss of each token. Only the arguments are kept for the backward, which is differentiable itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore: int, smoothing: float, chunks: int
    ) -> Tensor:
        losses = []
        for rows in _chunks(x, weight, chunks):
            log_p = wide(F.linear(x[rows], weight, bias)).log_softmax(-1)
            takes_part = target[rows] != ignore
            of = torch.where(takes_part, target[rows], 0)
            loss = -(1 - smoothing) * log_p.gather(1, of.unsqueeze(1)).squeeze(1)
            loss = loss - smoothing * log_p.mean(1) if smoothing else loss
            losses.append(torch.where(takes_part, loss, 0))
        return torch.cat(losses)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, target, bias, *ctx.constants = inputs
        ctx.save_for_backward(x, weight, target, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, target, bias = ctx.saved_tensors
        return (*_gradients(grads[0], x, weight, target, bias, *ctx.constants), None, None, None)


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    chunks: int,
) -> tuple[Tensor | None, ...]:
    """The gradient of each argument, a chunk at a time; the forward is not run again."""
    if reduction == "mean":
        grad = grad / (target != ignore_index).sum()
    each = grad.expand(x.shape[:1])
    return (*_gradients(each, x, weight, target, bias, ignore_index, label_smoothing, chunks), None, None, None, None)


def _chunks(x: Tensor, weight: Tensor, chunks: int) -> Iterator[slice]:
    tokens, (classes, width) = x.shape[0], weight.shape
    count = chunks or -(-classes // max(width, 1))
    count = max(min(count, tokens), 1)
    size = -(-tokens // count)
    for i in range(count):
        yield slice(i * size, (i + 1) * size)


def _gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore: int,
    smoothing: float,
    chunks: int,
) -> tuple[Tensor | None, ...]:
    """Of x, weight, target (None) and bias, from the gradient of each token's loss.

    ``d loss / d logits = softmax - (1 - s) onehot(target) - s / V`` for a token that takes part.
    """
    classes = weight.shape[0]
    takes_part = target != ignore
    g = torch.where(takes_part, g, 0)
    of = torch.where(takes_part, target, 0)
    gx, gw, gb = [], None, None
    for rows in _chunks(x, weight, chunks):
        p = wide(F.linear(x[rows], weight, bias)).softmax(-1)
        hit = of[rows].unsqueeze(1) == torch.arange(classes, device=x.device)
        slope = p - torch.where(hit, 1 - smoothing + smoothing / classes, smoothing / classes)
        slope = torch.where(takes_part[rows].unsqueeze(1), slope * g[rows].unsqueeze(1), 0)
        narrow = slope.to(x.dtype)
        gx.append(narrow @ weight)
        part = wide(narrow.transpose(0, 1) @ x[rows])
        gw = part if gw is None else gw + part
        gb = slope.sum(0) if gb is None else gb + slope.sum(0)
    of_weight, of_bias = (None if v is None else v.to(weight.dtype) for v in (gw, gb))
    return torch.cat(gx), of_weight, None, None if bias is None else of_bias


def samples() -> Samples:
    draw = Draw()
    target = draw.integers(6, below=7)
    yield (draw.normal(6, 4), draw.normal(7, 4), target), {}
    yield (draw.normal(6, 4), draw.normal(7, 4), target, draw.normal(7)), {"chunks": 4, "label_smoothing": 0.1}
    yield (draw.normal(6, 4), draw.normal(7, 4), target, None, 3), {"chunks": 2, "reduction": "none"}
    yield (draw.normal(6, 4), draw.normal(7, 4), target), {"reduction": "sum", "chunks": 99}
    yield (draw.normal(3, 4), draw.normal(7, 4), torch.full((3,), -100)), {"reduction": "sum"}
    yield (draw.normal(0, 4), draw.normal(7, 4), target[:0]), {"reduction": "sum"}
    yield (draw.normal(1, 4), draw.normal(7, 4), target[:1]), {}
    yield (draw.strided(6, 4), draw.strided(7, 4), target, draw.strided(7)), {}
    yield (draw.special(6, 4), draw.normal(7, 4), target), {"reduction": "none"}
    for dtype in (torch.float16, torch.bfloat16):
        yield (draw.normal(6, 8, dtype=dtype), 0.3 * draw.normal(33, 8, dtype=dtype), 4 * target), {}
