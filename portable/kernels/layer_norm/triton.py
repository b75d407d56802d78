"""layer_norm in Triton, forward and backward: a program holds a whole row, so that memory is passed over once."""

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

WIDEST = 8192  # a row has to fit into the registers of one multiprocessor
PROGRAMS = (
    512  # of the backward, each of which sums the weight's gradient over its rows: more than any GPU runs at once
)


@jit
def normalise(x, weight, bias, out, width, eps, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    values = tl.where(inside, values - tl.sum(values) / width, 0.0)
    values *= tl.rsqrt(tl.sum(values * values) / width + eps)
    if weight is not None:
        values *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        values += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + column, values, mask=inside)


@jit
def gradients(
    grad, x, weight, of_x, of_weight, of_bias, rows, width, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    for_weight, for_bias = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for row in range(first, rows, tl.num_programs(0)):
        values = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        values = tl.where(inside, values - tl.sum(values) / width, 0.0)
        scale = tl.rsqrt(tl.sum(values * values) / width + eps)
        values *= scale
        for_weight += slope * values
        for_bias += slope
        if weight is not None:
            slope *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        slope -= tl.sum(slope) / width + values * (tl.sum(slope * values) / width)
        tl.store(of_x + row * width + column, slope * scale, mask=inside)
    if of_weight is not None:
        tl.store(of_weight + first * width + column, for_weight, mask=inside)
    if of_bias is not None:
        tl.store(of_bias + first * width + column, for_bias, mask=inside)


def accepts(x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """Rows that fit."""
    return x.shape[-1] <= WIDEST


def backward(
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor | None, ...]:
    width = x.shape[-1]
    x, grad = x.contiguous(), grads[0].contiguous()  # type: ignore[union-attr]
    rows = x.numel() // max(width, 1)
    of_x, programs, size = torch.empty_like(x), min(rows, PROGRAMS), block(width)

    def parts(of: Tensor | None, need: bool) -> Tensor | None:
        return x.new_empty((programs, width), dtype=torch.float32) if of is not None and need else None

    def summed(part: Tensor | None, of: Tensor | None) -> Tensor | None:
        return None if part is None or of is None else part.sum(0).to(of.dtype)

    of_weight, of_bias = parts(weight, needs[1]), parts(bias, needs[2])
    scale = None if weight is None else weight.contiguous()
    gradients.launch(
        (programs,), grad, x, scale, of_x, of_weight, of_bias, rows, width, eps, BLOCK=size, values=size
    )  # fmt: skip
    return of_x, summed(of_weight, weight), summed(of_bias, bias), None


@register_kernel(
    "layer_norm",
    provider="triton",
    backends=BACKENDS,
    dtypes=HALF_AND_SINGLE,
    accepts=accepts,
    backward=backward,
    sources=(Path(triton_code.__file__),),
)
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    x, width = x.contiguous(), x.shape[-1]
    weight, bias = (None if v is None else v.contiguous() for v in (weight, bias))
    out, size = torch.empty_like(x), block(width)
    normalise.launch((x.numel() // max(width, 1),), x, weight, bias, out, width, eps, BLOCK=size, values=size)
    return out


def typical() -> Iterator[tuple[Any, ...]]:
    """BERT's, ViT's and GPT-2's widths, an odd one, and the widest."""
    for dtype in HALF_AND_SINGLE:
        for width in (768, 1024, 5000, WIDEST):
            x = torch.empty(64, width, dtype=dtype, device="meta")
            yield x, *(torch.empty(width, dtype=dtype, device="meta") for _ in range(2)), 1e-5
        yield x, torch.empty(width, device="meta"), None, 1e-5
        yield x, None, None, 1e-5
