"""moe_dispatch in Triton, forward and backward: a stable counting sort of the experts, where torch has to sort, and a
copy of the rows; the gradient gathers what the copies got."""

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

MOST_EXPERTS = 1023
COMPARED = 8192  # pairs of an entry and an expert that a program compares
AT_ONCE = 1024  # channels of a row


@jit
def count(indices, counts, size, experts, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """How many of a block's entries go to each expert; those to an unknown one are counted after all others."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(indices + place, mask=place < size, other=0)
    expert = tl.where((expert >= 0) & (expert < experts), expert, experts)
    expert = tl.where(place < size, expert, -1).to(tl.int32)
    bins = tl.arange(0, BINS)
    found = tl.sum((expert[:, None] == bins[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0).to(tl.int64) * (experts + 1) + bins, found, mask=bins <= experts)


@jit
def put(indices, starts, order, position, size, experts, blocks, BLOCK: tl.constexpr):
    """Where each entry goes: after those of its expert in earlier blocks, and earlier in its own."""
    within = tl.arange(0, BLOCK)
    place = tl.program_id(0) * BLOCK + within
    inside = place < size
    expert = tl.load(indices + place, mask=inside, other=0)
    expert = tl.where((expert >= 0) & (expert < experts), expert, experts)
    expert = tl.where(inside, expert, -1).to(tl.int32)
    same = (expert[:, None] == expert[None, :]) & (within[None, :] < within[:, None])
    earlier = tl.sum(same.to(tl.int32), 1)
    spot = tl.load(starts + expert.to(tl.int64) * blocks + tl.program_id(0), mask=inside, other=0) + earlier
    if order is not None:
        tl.store(order + spot, place.to(tl.int64), mask=inside)
    if position is not None:
        tl.store(position + place, spot, mask=inside)


@jit
def gather(x, order, out, width, copies, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(order + row) // copies
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        tl.store(out + row * width + column, tl.load(x + token * width + column, mask=inside), mask=inside)


@jit
def gathered_back(grad, position, out, width, copies, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        total = tl.zeros([BLOCK], tl.float32)
        for copy in range(0, copies):
            row = tl.load(position + token * copies + copy)
            total += tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * width + column, total, mask=inside)


def accepts(x: Any, indices: Any, num_experts: int) -> Any:
    """As many experts as a program can compare with."""
    return num_experts <= MOST_EXPERTS and indices.dtype == torch.int64


def _placed(indices: Tensor, experts: int, order: Tensor | None, position: Tensor | None) -> Tensor:
    """Fill ``order`` and ``position``, its inverse; gives how many entries each expert has."""
    size, bins = indices.numel(), block(experts + 1)
    per_program = max(16, min(128, COMPARED // bins))
    blocks = -(-size // per_program)
    counts = indices.new_empty((blocks, experts + 1), dtype=torch.int32)
    count.launch((blocks,), indices, counts, size, experts, BLOCK=per_program, BINS=bins, values=per_program * bins)
    flat = counts.t().reshape(-1).to(torch.int64)
    starts = flat.cumsum(0) - flat
    put.launch(
        (blocks,), indices, starts, order, position, size, experts, blocks,
        BLOCK=per_program, values=per_program * per_program,
    )  # fmt: skip
    return counts.sum(0)[:experts]


def backward(
    grads: Sequence[Tensor | None], needs: Sequence[bool], x: Tensor, indices: Tensor, num_experts: int
) -> tuple[Tensor | None, ...]:
    tokens, width = x.shape
    grad, indices = grads[0].contiguous(), indices.contiguous()  # type: ignore[union-attr]
    position, out = torch.empty_like(indices), torch.empty_like(x, memory_format=torch.contiguous_format)
    _placed(indices, num_experts, None, position)
    size = block(width, AT_ONCE)
    gathered_back.launch((tokens,), grad, position, out, width, indices.shape[1], BLOCK=size, values=size)
    return out, None, None


@register_kernel(
    "moe_dispatch",
    provider="triton",
    backends=BACKENDS,
    dtypes=HALF_AND_SINGLE,
    accepts=accepts,
    backward=backward,
    sources=(Path(triton_code.__file__),),
)
def moe_dispatch(x: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    x, indices, width = x.contiguous(), indices.contiguous(), x.shape[1]
    order = indices.new_empty(indices.numel())
    counts = _placed(indices, num_experts, order, None)
    rows, size = x.new_empty((indices.numel(), width)), block(width, AT_ONCE)
    gather.launch((indices.numel(),), x, order, rows, width, indices.shape[1], BLOCK=size, values=size)
    return rows, order, counts


def typical() -> Iterator[tuple[Any, ...]]:
    """Mixtral's and DeepSeek-V3's experts, one token to one expert, and the most."""
    for dtype in HALF_AND_SINGLE:
        for experts, copies, width in ((8, 2, 4096), (256, 8, 7168), (16, 1, 5000), (MOST_EXPERTS, 2, 64)):
            indices = torch.empty(512, copies, dtype=torch.int64, device="meta")
            yield torch.empty(512, width, dtype=dtype, device="meta"), indices, experts
