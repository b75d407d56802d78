"""softmax_cross_entropy in Triton, forward and backward: a program goes along a row of logits without keeping the
probabilities (the online softmax of Milakov and Gimelshein 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from portable.kernels import triton_code
from portable.kernels.registry import register_kernel
from portable.kernels.triton_code import BACKENDS, HALF_AND_SINGLE, block, jit

if TYPE_CHECKING:
    import triton.language as tl

AT_ONCE = 4096  # logits of a row


@jit
def cross_entropy(
    logits, target, grad, out, classes, ignore, smoothing,
    GRADIENT: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's loss, or with GRADIENT the gradient of its logits, which may take the logits' own place. A target out
    of range gives NaN: there is no way to raise."""
    row = tl.program_id(0).to(tl.int64)
    start = row * classes
    label = tl.load(target + row)
    takes_part = label != ignore
    known = (label >= 0) & (label < classes)
    read = tl.where(takes_part, classes, 0)
    top = float("-inf")
    total = 0.0
    for first in range(0, read, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(logits + start + column, mask=column < classes, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # so far there was nothing but -inf
        total = total * tl.exp(top - base) + tl.sum(tl.exp(z - base))
        top = higher
    if GRADIENT:
        slope = tl.load(grad + row).to(tl.float32)
        rest = smoothing / classes
        for first in range(0, classes, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < classes
            z = tl.load(logits + start + column, mask=column < read, other=0.0).to(tl.float32)
            p = tl.exp(z - top) / total - tl.where(column == label, 1 - smoothing + rest, rest)
            p = tl.where(known, p * slope, float("nan"))
            tl.store(out + start + column, tl.where(takes_part, p, 0.0), mask=inside)
    else:
        chosen = tl.load(logits + start + label, mask=known & takes_part, other=float("nan")).to(tl.float32)
        loss = tl.log(total) - (chosen - top)
        if SMOOTH:
            spread = 0.0
            for first in range(0, read, BLOCK):
                column = first + tl.arange(0, BLOCK)
                z = tl.load(logits + start + column, mask=column < classes, other=0.0).to(tl.float32)
                spread += tl.sum(tl.where(column < classes, z - top, 0.0))
            loss = (1 - smoothing) * loss + smoothing * (tl.log(total) - spread / classes)
        tl.store(out + row, tl.where(takes_part, loss, 0.0))


def losses(logits: Tensor, target: Tensor, ignore: int, smoothing: float, out: Tensor) -> None:
    """Write the loss of each row into ``out``, float32; all are contiguous."""
    _launch(logits, target, out, out, ignore, smoothing, False)


def slopes(logits: Tensor, target: Tensor, grad: Tensor, ignore: int, smoothing: float, out: Tensor) -> None:
    """Write the gradient of each row's logits into ``out``, which may be ``logits``.

    Args:
        grad: float32, of each row's loss.
    """
    _launch(logits, target, grad, out, ignore, smoothing, True)


def _launch(
    logits: Tensor, target: Tensor, grad: Tensor, out: Tensor, ignore: int, smoothing: float, gradient: bool
) -> None:
    classes = logits.shape[-1]
    size = block(classes, AT_ONCE)
    cross_entropy.launch(
        (target.numel(),), logits, target, grad, out, classes, ignore, float(smoothing),
        GRADIENT=gradient, SMOOTH=smoothing != 0, BLOCK=size, values=size,
    )  # fmt: skip


def reduced(each: Tensor, target: Tensor, ignore: int, reduction: str) -> Tensor:
    """The losses, their sum, or their mean over the targets that take part."""
    if reduction == "none":
        return each.view(target.shape)
    return each.sum() if reduction == "sum" else each.sum() / (target != ignore).sum()


def each_gradient(grad: Tensor, target: Tensor, ignore: int, reduction: str) -> Tensor:
    """The gradient of each loss from that of what `reduced` gives."""
    grad = grad / (target != ignore).sum() if reduction == "mean" else grad
    return grad.float().expand(target.shape).contiguous()


def accepts(
    logits: Any, target: Any, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Any:
    """Indices as the reference documents them, and a class."""
    return target.dtype == torch.int64 and logits.shape[-1] > 0


def backward(
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> tuple[Tensor | None, ...]:
    grad: Tensor = grads[0]  # type: ignore[assignment]
    logits, target = logits.contiguous(), target.contiguous()
    out = torch.empty_like(logits)
    each = each_gradient(grad, target, ignore_index, reduction)
    slopes(logits, target, each, ignore_index, label_smoothing, out)
    return out, None, None, None, None


@register_kernel(
    "softmax_cross_entropy",
    provider="triton",
    backends=BACKENDS,
    dtypes=HALF_AND_SINGLE,
    accepts=accepts,
    backward=backward,
    sources=(Path(triton_code.__file__),),
)
def softmax_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:
    logits, target = logits.contiguous(), target.contiguous()
    each = logits.new_empty(target.numel(), dtype=torch.float32)
    losses(logits, target, ignore_index, label_smoothing, each)
    return reduced(each, target, ignore_index, reduction)


def typical() -> Iterator[tuple[Any, ...]]:
    """Llama's, GPT-2's and ImageNet's numbers of classes."""
    for dtype in HALF_AND_SINGLE:
        for classes in (128256, 50257, 1000):
            for smoothing in (0.0, 0.1):
                logits = torch.empty(64, classes, dtype=dtype, device="meta")
                yield logits, torch.empty(64, dtype=torch.int64, device="meta"), -100, smoothing, "mean"
