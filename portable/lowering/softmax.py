"""Softmax, its logarithm, their backward ops, and log-sum-exp."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.elementwise import is_complex, num, where
from portable.lowering.reduction import axes, finish, keep_axes, widened
from portable.lowering.registry import cast, lower

aten = torch.ops.aten


def shifted(x: jax.Array, reduced: tuple[int, ...]) -> jax.Array:
    """``x`` less its maximum, so that its exponential is at most 1."""
    return lax.sub(x, keep_axes(lax.reduce_max(x, reduced), x, reduced))


def softmax_values(x: jax.Array, dim: int) -> jax.Array:
    reduced = axes(x.ndim, dim)
    exponentials = lax.exp(shifted(x, reduced))
    return lax.div(exponentials, keep_axes(lax.reduce_sum(exponentials, reduced), x, reduced))


@lower(aten._softmax.default)
def softmax(ctx: Context, x: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    if not x.size:
        return cast(x, ctx.result.dtype)
    return cast(softmax_values(widened(x), dim), ctx.result.dtype)


@lower(aten._safe_softmax.default)
def safe_softmax(ctx: Context, x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """Softmax that is 0 in a row that is -inf everywhere."""
    x = widened(cast(x, ctx.result.dtype))
    reduced = axes(x.ndim, dim)
    masked = lax.reduce_and(lax.eq(x, num(-np.inf, x)), reduced)
    return cast(where(keep_axes(masked, x, reduced), 0, softmax_values(x, dim)), ctx.result.dtype)


@lower(aten._log_softmax.default)
def log_softmax(ctx: Context, x: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    if not x.size:
        return cast(x, ctx.result.dtype)
    x = widened(x)
    reduced = axes(x.ndim, dim)
    x = shifted(x, reduced)
    return cast(lax.sub(x, keep_axes(lax.log(lax.reduce_sum(lax.exp(x), reduced)), x, reduced)), ctx.result.dtype)


@lower(aten._softmax_backward_data.default)
def softmax_backward(ctx: Context, grad: jax.Array, y: jax.Array, dim: int, input_dtype: torch.dtype) -> jax.Array:
    grad, y = widened(grad), widened(y)
    reduced = axes(y.ndim, dim)
    product = lax.mul(grad, y)
    total = keep_axes(lax.reduce_sum(product, reduced), y, reduced)
    return cast(lax.mul(y, lax.sub(grad, total)), ctx.result.dtype)


@lower(aten._log_softmax_backward_data.default)
def log_softmax_backward(ctx: Context, grad: jax.Array, y: jax.Array, dim: int, input_dtype: torch.dtype) -> jax.Array:
    grad, y = widened(grad), widened(y)
    reduced = axes(y.ndim, dim)
    total = keep_axes(lax.reduce_sum(grad, reduced), y, reduced)
    return cast(lax.sub(grad, lax.mul(lax.exp(y), total)), ctx.result.dtype)


@lower(aten.logsumexp.default)
def logsumexp(ctx: Context, x: jax.Array, dim: Any, keepdim: bool = False) -> jax.Array:
    x = widened(cast(x, ctx.result.dtype))
    reduced = axes(x.ndim, dim)
    if 0 in (x.shape[d] for d in reduced):
        return lax.full(ctx.result.shape, num(-np.inf, x)).astype(ctx.result.jax_dtype)
    largest = lax.reduce_max(lax.real(x) if is_complex(x) else x, reduced)
    # an infinite maximum is not subtracted: inf - inf is NaN
    largest = where(lax.eq(lax.abs(largest), num(np.inf, largest)), 0, largest).astype(x.dtype)
    total = lax.reduce_sum(lax.exp(lax.sub(x, keep_axes(largest, x, reduced))), reduced)
    return finish(lax.add(lax.log(total), largest), ctx.result)
