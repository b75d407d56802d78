"""swiglu in Triton, forward and backward: one pass over memory, in float32, whatever it is fused with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from portable.kernels import triton_code
from portable.kernels.registry import register_kernel
from portable.kernels.triton_code import BACKENDS, HALF_AND_SINGLE, jit

if TYPE_CHECKING:
    import triton.language as tl

SIZE = 2048


@jit
def product(gate, up, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, g / (1 + tl.exp(-g)) * u, mask=inside)


@jit
def gradients(grad, gate, up, of_gate, of_up, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    slope = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-g))
    tl.store(of_gate + place, slope * u * (sigmoid * (1 + g * (1 - sigmoid))), mask=inside)
    tl.store(of_up + place, slope * (g / (1 + tl.exp(-g))), mask=inside)


def backward(
    grads: Sequence[Tensor | None], needs: Sequence[bool], gate: Tensor, up: Tensor
) -> tuple[Tensor | None, ...]:
    grad, gate, up = grads[0].contiguous(), gate.contiguous(), up.contiguous()  # type: ignore[union-attr]
    of_gate, of_up, size = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    gradients.launch((-(-size // SIZE),), grad, gate, up, of_gate, of_up, size, BLOCK=SIZE, values=SIZE)
    return of_gate, of_up


@register_kernel(
    "swiglu",
    provider="triton",
    backends=BACKENDS,
    dtypes=HALF_AND_SINGLE,
    backward=backward,
    sources=(Path(triton_code.__file__),),
)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out, size = torch.empty_like(gate), gate.numel()
    product.launch((-(-size // SIZE),), gate, up, out, size, BLOCK=SIZE, values=SIZE)
    return out


def typical() -> Iterator[tuple[Any, ...]]:
    for dtype in HALF_AND_SINGLE:
        for shape in ((64, 14336), (7, 333)):
            yield torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape, dtype=dtype, device="meta")
