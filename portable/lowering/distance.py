"""Distances between rows: ``cdist`` and ``pdist`` under any p-norm, with their gradients."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.matmul import dot
from portable.lowering.registry import broadcast, cast, lower

aten = torch.ops.aten
HALF = (jnp.bfloat16, jnp.float16)
# rows above which torch takes the matrix product for p = 2, and its modes that force or forbid it
PRODUCT_ROWS, PRODUCT, NO_PRODUCT = 25, 1, 2


def _wide(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32) if x.dtype in HALF else x


def norm(difference: jax.Array, p: float) -> jax.Array:
    """p-norm over the last axis; p = 0 counts, p = inf is the maximum."""
    last = (difference.ndim - 1,)
    size = lax.abs(difference)
    if p == 0:
        return lax.reduce_sum(lax.convert_element_type(lax.ne(size, lax.full_like(size, 0)), size.dtype), last)
    if p == math.inf:
        return lax.reduce_max(size, last)
    if p == 1:
        return lax.reduce_sum(size, last)
    if p == 2:
        return lax.sqrt(lax.reduce_sum(size * size, last))
    return lax.pow(lax.reduce_sum(lax.pow(size, lax.full_like(size, p)), last), lax.full_like(size[..., 0], 1 / p))


def slope(difference: jax.Array, distance: jax.Array, p: float) -> jax.Array:
    """By each difference: ``sign(d) (|d| / distance)^(p - 1)``, 0 where the distance is 0."""
    distance = lax.broadcast_in_dim(distance, difference.shape, tuple(range(difference.ndim - 1)))
    zero, size, sign = lax.full_like(difference, 0), lax.abs(difference), lax.sign(difference)
    if p == 0:
        return zero
    if p == 1:
        return sign
    if p == math.inf:
        return sign * lax.convert_element_type(lax.eq(size, distance), difference.dtype)
    if p == 2:
        return lax.select(lax.eq(distance, zero), zero, difference / distance)
    power = sign * lax.pow(size / distance, lax.full_like(size, p - 1))
    none = lax.eq(distance, zero) | (lax.eq(size, zero) if p < 1 else lax.full_like(distance, False, dtype=np.bool_))
    return lax.select(none, zero, power)


def _euclidean(ctx: Context, x: jax.Array, y: jax.Array) -> jax.Array:
    """Through one matrix product, ``|x|² - 2 x·y + |y|²`` bounded by 0, as torch does for many rows."""
    batch = x.ndim - 2
    xx, yy = (lax.reduce_sum(v * v, (batch + 1,)) for v in (x, y))
    xy = dot(ctx, x, lax.transpose(y, (*range(batch), batch + 1, batch)))
    squares = lax.expand_dims(xx, (batch + 1,)) + lax.expand_dims(yy, (batch,)) - 2 * xy
    return lax.sqrt(lax.max(squares, lax.full_like(squares, 0)))


def _batched(ctx: Context, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return broadcast(_wide(x), (*batch, *x.shape[-2:])), broadcast(_wide(y), (*batch, *y.shape[-2:]))


def _differences(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.expand_dims(x, (x.ndim - 1,)) - lax.expand_dims(y, (y.ndim - 2,))


@lower(aten._cdist_forward.default)
def cdist(ctx: Context, x: jax.Array, y: jax.Array, p: float, compute_mode: int | None) -> jax.Array:
    x, y = _batched(ctx, x, y)
    if 0 in ctx.result.shape or x.shape[-1] == 0:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    many = max(x.shape[-2], y.shape[-2]) > PRODUCT_ROWS and compute_mode != NO_PRODUCT
    if p == 2 and (many or compute_mode == PRODUCT):
        return cast(_euclidean(ctx, x, y), ctx.result.dtype)
    return cast(norm(_differences(x, y), p), ctx.result.dtype)


@lower(aten._cdist_backward.default)
def cdist_backward(ctx: Context, g: jax.Array, x: jax.Array, y: jax.Array, p: float, distance: jax.Array) -> jax.Array:
    if 0 in ctx.result.shape or 0 in g.shape:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    x, y = _batched(ctx, x, y)
    d = slope(_differences(x, y), _wide(distance), p) * lax.expand_dims(_wide(g), (g.ndim,))
    return cast(lax.reduce_sum(d, (d.ndim - 2,)), ctx.result.dtype)


def _pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.triu_indices(n, 1)


@lower(aten._pdist_forward.default)
def pdist(ctx: Context, x: jax.Array, p: float = 2.0) -> jax.Array:
    if 0 in ctx.result.shape or x.shape[1] == 0:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    first, second = _pairs(x.shape[0])
    return cast(norm(x[first] - x[second], p), ctx.result.dtype)


@lower(aten._pdist_backward.default)
def pdist_backward(ctx: Context, g: jax.Array, x: jax.Array, p: float, distance: jax.Array) -> jax.Array:
    if 0 in x.shape or g.size == 0:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    first, second = _pairs(x.shape[0])
    d = slope(x[first] - x[second], distance, p) * lax.expand_dims(g, (1,))
    return jnp.zeros(x.shape, x.dtype).at[first].add(d).at[second].add(-d)
