"""Cross entropy of logits with class indices: the loss of a language model or classifier."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from portable.ops._op import Samples, refuse, wide
from portable.ops._samples import Draw

SCHEMA = (
    '(Tensor logits, Tensor target, int ignore_index=-100, float label_smoothing=0.0, str reduction="mean") -> Tensor'
)
REDUCTIONS = ("mean", "sum", "none")


def softmax_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """``-log softmax(logits)[target]`` over the last axis, as ``torch.nn.functional.cross_entropy``.

    With label smoothing s: ``(1 - s)`` of that plus ``s`` of the mean over all classes (Szegedy et al. 2016, section
    7).
    In half precision everything is float32, the result too: as training code does by ``logits.float()``.

    Args:
        logits: (\\*, V), floating point.
        target: (\\*), int64, of 0…V-1 or ``ignore_index``.
        ignore_index: a target that takes no part: its loss and gradient are zero and "mean" does not count it.
        reduction: "mean", "sum" or "none". The mean of nothing is NaN.

    Returns:
        A scalar, or (\\*) for "none"; float64 for float64 logits, else float32.

    Raises:
        OpArgumentError: shapes do not match or ``reduction`` is none of these.
        IndexError: in eager, a target is out of range.
    """
    if logits.shape[:-1] != target.shape or logits.ndim == 0:
        shapes = f"logits {list(logits.shape)} with target {list(target.shape)}"
        refuse("softmax_cross_entropy", f"does not take {shapes}", "logits are (*, V), target (*)")
    if reduction not in REDUCTIONS:
        refuse("softmax_cross_entropy", f"reduction={reduction!r}", f"one of {', '.join(REDUCTIONS)}")
    rows = wide(logits).reshape(-1, logits.shape[-1])
    loss = F.cross_entropy(
        rows, target.reshape(-1), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    return loss.view(target.shape) if reduction == "none" else loss


def samples() -> Samples:
    draw = Draw()
    target = draw.integers(6, below=7)
    yield (draw.normal(6, 7), target), {}
    yield (draw.normal(6, 7), target), {"label_smoothing": 0.1}
    yield (draw.normal(2, 3, 7), target.view(2, 3), 3), {"reduction": "none"}
    yield (draw.normal(2, 3, 7), target.view(2, 3), 3), {"reduction": "sum", "label_smoothing": 0.2}
    yield (draw.normal(4, 5), torch.full((4,), -100)), {}  # the mean of nothing
    yield (draw.normal(4, 5), torch.full((4,), -100)), {"reduction": "sum"}
    yield (draw.normal(3, 1), torch.zeros(3, dtype=torch.int64)), {}
    yield (draw.normal(0, 5), draw.integers(0, below=5)), {"reduction": "sum"}
    yield (draw.normal(7), draw.integers(below=7)), {}
    yield (1000 * draw.normal(6, 7), target), {"reduction": "none"}
    yield (draw.strided(6, 7), target), {}
    yield (draw.special(6, 7), target), {"reduction": "none"}
    for dtype in (torch.float16, torch.bfloat16):
        yield (draw.normal(6, 33, dtype=dtype), target), {}
