"""rms_norm in Triton, forward and backward: a program holds a whole row, so that memory is passed over once."""

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

WIDEST = 16384  # a row has to fit into the registers of one multiprocessor
PROGRAMS = (
    512  # of the backward, each of which sums the weight's gradient over its rows: more than any GPU runs at once
)


@jit
def normalise(x, weight, out, width, eps, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values) / width + eps)
    if weight is not None:
        values *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + column, values, mask=inside)


@jit
def gradients(grad, x, weight, of_x, of_weight, rows, width, eps, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for row in range(first, rows, tl.num_programs(0)):
        values = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values) / width + eps)
        values *= scale
        total += slope * values
        if weight is not None:
            slope *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        slope -= values * (tl.sum(slope * values) / width)
        tl.store(of_x + row * width + column, slope * scale, mask=inside)
    if of_weight is not None:
        tl.store(of_weight + first * width + column, total, mask=inside)


def accepts(x: Any, weight: Any = None, eps: float = 1e-6) -> Any:
    """Rows that fit."""
    return x.shape[-1] <= WIDEST


def backward(
    grads: Sequence[Tensor | None], needs: Sequence[bool], x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor | None, ...]:
    width = x.shape[-1]
    x, grad = x.contiguous(), grads[0].contiguous()  # type: ignore[union-attr]
    rows = x.numel() // max(width, 1)
    of_x, programs = torch.empty_like(x), min(rows, PROGRAMS)
    parts = x.new_empty((programs, width), dtype=torch.float32) if weight is not None and needs[1] else None
    weight = None if weight is None else weight.contiguous()
    size = block(width)
    gradients.launch((programs,), grad, x, weight, of_x, parts, rows, width, eps, BLOCK=size, values=size)
    return of_x, None if parts is None or weight is None else parts.sum(0).to(weight.dtype), None


@register_kernel(
    "rms_norm",
    provider="triton",
    backends=BACKENDS,
    dtypes=HALF_AND_SINGLE,
    accepts=accepts,
    backward=backward,
    sources=(Path(triton_code.__file__),),
)
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    x, width = x.contiguous(), x.shape[-1]
    weight = None if weight is None else weight.contiguous()
    out, size = torch.empty_like(x), block(width)
    normalise.launch((x.numel() // max(width, 1),), x, weight, out, width, eps, BLOCK=size, values=size)
    return out


def typical() -> Iterator[tuple[Any, ...]]:
    """Llama's and Qwen's widths, an odd one, and the widest."""
    for dtype in HALF_AND_SINGLE:
        for width in (896, 4096, 5000, WIDEST):
            x = torch.empty(64, width, dtype=dtype, device="meta")
            yield x, torch.empty(width, dtype=dtype, device="meta"), 1e-6
        yield x, torch.empty(width, device="meta"), 1e-6
        yield x, None, 1e-6
