"""Reductions along dimensions, and scans."""
from __future__ import annotations

from collections.abc import Sequence

import jax
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import cast, lower

aten = torch.ops.aten


def axes(ndim: int, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """The reduced axes, non-negative and sorted; all of them for None or an empty list."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(sorted({d % ndim for d in dims})) if ndim else ()


@lower(aten.sum.default, aten.sum.dim_IntList)
def sum_(ctx: Context, x: jax.Array, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    wide = torch.float32 if ctx.result.dtype in (torch.bfloat16, torch.float16) else ctx.result.dtype
    total = lax.reduce_sum(cast(cast(x, ctx.result.dtype), wide), axes(x.ndim, dim))
    return lax.reshape(cast(total, ctx.result.dtype), ctx.result.shape)
