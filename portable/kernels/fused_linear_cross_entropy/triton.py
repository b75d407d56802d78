"""fused_linear_cross_entropy with Triton: a chunk's logits by the device's own matrix product, their loss in one pass
over them, and in the backward their gradient in their own memory (Hsu et al. 2024, Liger-Kernel, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from portable.kernels import triton_code
from portable.kernels.registry import register_kernel
from portable.kernels.softmax_cross_entropy import triton as cross_entropy
from portable.kernels.triton_code import BACKENDS, HALF_AND_SINGLE


def chunks_of(x: Tensor, weight: Tensor, chunks: int) -> Iterator[slice]:
    """As the reference divides the tokens."""
    tokens, (classes, width) = x.shape[0], weight.shape
    count = max(min(chunks or -(-classes // max(width, 1)), tokens), 1)
    size = max(-(-tokens // count), 1)
    return (slice(start, start + size) for start in range(0, tokens, size))


def accepts(
    x: Any,
    weight: Any,
    target: Any,
    bias: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunks: int = 0,
) -> Any:
    """One dtype, indices as the reference documents them, and a class."""
    alike = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    return alike and target.dtype == torch.int64 and weight.shape[0] > 0


def backward(
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    chunks: int,
) -> tuple[Tensor | None, ...]:
    grad: Tensor = grads[0]  # type: ignore[assignment]
    target = target.contiguous()
    each = cross_entropy.each_gradient(grad, target, ignore_index, reduction)
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
    of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs[3] else None
    for rows in chunks_of(x, weight, chunks):
        slope = F.linear(x[rows], weight, bias)
        cross_entropy.slopes(slope, target[rows], each[rows], ignore_index, label_smoothing, slope)
        of_x[rows] = slope @ weight
        if of_weight is not None:
            of_weight += slope.t() @ x[rows]
        if of_bias is not None:
            of_bias += slope.sum(0, dtype=torch.float32)
    of_weight, of_bias = (None if v is None else v.to(x.dtype) for v in (of_weight, of_bias))
    return of_x, of_weight, None, of_bias, None, None, None, None


@register_kernel(
    "fused_linear_cross_entropy",
    provider="triton",
    backends=BACKENDS,
    dtypes=HALF_AND_SINGLE,
    accepts=accepts,
    backward=backward,
    sources=(Path(triton_code.__file__), Path(cross_entropy.__file__)),
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
    target = target.contiguous()
    each = x.new_empty(x.shape[0], dtype=torch.float32)
    for rows in chunks_of(x, weight, chunks):
        logits = F.linear(x[rows], weight, bias)
        cross_entropy.losses(logits, target[rows], ignore_index, label_smoothing, each[rows])
    return cross_entropy.reduced(each, target, ignore_index, reduction)


def typical() -> Iterator[tuple[Any, ...]]:
    """Llama's and GPT-2's last layers."""
    for dtype in HALF_AND_SINGLE:
        for classes, width in ((128256, 4096), (50257, 768)):
            x, weight = (torch.empty(n, width, dtype=dtype, device="meta") for n in (64, classes))
            for smoothing in (0.0, 0.1):
                yield x, weight, torch.empty(64, dtype=torch.int64, device="meta"), None, -100, smoothing, "mean", 0
