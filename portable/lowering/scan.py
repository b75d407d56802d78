"""Scans: cumulative sums, products, extrema and log-sum-exp along one dimension."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.elementwise import is_complex, is_float, is_nan, num, where
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
    if is_complex(x):
        return _complex_logcumsumexp(x, dim)
    return cast(lax.cumlogsumexp(x, dim % x.ndim) if x.ndim else x, ctx.result.dtype)


def _complex_logcumsumexp(x: jax.Array, dim: int) -> jax.Array:
    """Number by number, as torch does: the angles add up beyond π, so that the order of additions shows."""

    def add(total: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        less = lax.lt(lax.real(row), lax.real(total))
        low, high = lax.select(less, row, total), lax.select(less, total, row)
        value = lax.add(lax.log1p(lax.exp(lax.sub(low, high))), high)
        infinite = lax.bitwise_and(lax.eq(lax.real(low), lax.real(high)), jnp.isinf(lax.real(low)))
        sum_of_infinite = lax.select(lax.real(low) < 0, low, lax.log(lax.add(lax.exp(low), lax.exp(high))))
        value = lax.select(infinite, sum_of_infinite, value)
        value = lax.select(is_nan(low) | is_nan(high), lax.full_like(value, complex(np.nan, np.nan)), value)
        return value, value

    if x.ndim == 0 or x.size == 0:
        return x
    axis = dim % x.ndim
    rows = jnp.moveaxis(x, axis, 0)
    return jnp.moveaxis(lax.scan(add, lax.full_like(rows[0], complex(-np.inf, 0)), rows)[1], 0, axis)


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
