"""Scans: cumulative sums, products, extrema and log-sum-exp along one dimension."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.elementwise import is_float, is_nan, num, where
from portable.lowering.reduction import widened
from portable.lowering.registry import cast, lower

aten = torch.ops.aten


@lower(aten.cumsum.default)
def cumsum(ctx: Context, x: jax.Array, dim: int, *, dtype: Any = None) -> jax.Array:
    x = widened(cast(x, ctx.result.dtype))
    return cast(lax.cumsum(x, dim % x.ndim) if x.ndim else x, ctx.result.dtype)


@lower(aten.cumprod.default)
def cumprod(ctx: Context, x: jax.Array, dim: int, *, dtype: Any = None) -> jax.Array:
    x = widened(cast(x, ctx.result.dtype))
    return cast(lax.cumprod(x, dim % x.ndim) if x.ndim else x, ctx.result.dtype)


@lower(aten.logcumsumexp.default)
def logcumsumexp(ctx: Context, x: jax.Array, dim: int) -> jax.Array:
    x = widened(x)
    return cast(lax.cumlogsumexp(x, dim % x.ndim) if x.ndim else x, ctx.result.dtype)


def _extremum(ctx: Context, scan: Any, x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """The running extremum and the index of its last occurrence; from the first NaN on NaN, and the last NaN's."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    axis = dim % x.ndim
    values = scan(cast(x, torch.int8) if x.dtype == jnp.bool_ else x, axis)
    values = cast(values, ctx.result[0].dtype)
    here = lax.eq(x, values)
    if is_float(x):
        # a scan by max may lose a NaN or not: state it
        nan = is_nan(x)
        seen = lax.cummax(cast(nan, torch.int8), axis)
        values = where(lax.ne(seen, num(0, seen)), np.nan, values)
        here = lax.bitwise_or(lax.eq(x, values), nan)
    positions = lax.broadcasted_iota(np.int64, x.shape, axis)
    return values, lax.cummax(where(here, positions, 0), axis)


@lower(aten.cummax.default)
def cummax(ctx: Context, x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return _extremum(ctx, lax.cummax, x, dim)


@lower(aten.cummin.default)
def cummin(ctx: Context, x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return _extremum(ctx, lax.cummin, x, dim)
