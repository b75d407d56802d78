"""Pooling whose windows follow from the output's size: adaptive and fractional, with their gradients; unpooling.

Adaptive window ``i`` of ``out`` over ``n`` inputs reaches from ``floor(i * n / out)`` to ``ceil((i + 1) * n / out)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.elementwise import true_div
from portable.lowering.pooling import LAST, accumulating, later_maximum, lowest, positions, scatter_flat
from portable.lowering.registry import cast, lower

aten = torch.ops.aten


def adaptive_windows(n: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) of each window."""
    i = np.arange(out)
    return i * n // out, -((-(i + 1) * n) // out)


def range_sums(x: jax.Array, axis: int, start: np.ndarray, end: np.ndarray) -> jax.Array:
    """Sums of ``x[start[i]:end[i]]`` along ``axis``; what lies outside a range does not touch it, be it NaN."""
    n, lengths = x.shape[axis], end - start
    longest = int(lengths.max(initial=0))
    if longest == 0 or x.size == 0:
        return jnp.zeros((*x.shape[:axis], len(start), *x.shape[axis + 1 :]), x.dtype)
    if (lengths == longest).all() and longest * len(start) == n and (start == np.arange(len(start)) * longest).all():
        return lax.reduce_sum(lax.reshape(x, (*x.shape[:axis], len(start), longest, *x.shape[axis + 1 :])), (axis + 1,))
    taps = start[:, None] + np.arange(longest)
    gathered = jnp.take(x, np.minimum(taps, n - 1), axis=axis, mode="clip")
    inside = lax.broadcast_in_dim(taps < end[:, None], gathered.shape, (axis, axis + 1))
    return lax.reduce_sum(lax.select(inside, gathered, lax.full_like(gathered, 0)), (axis + 1,))


def _lengths(size: Sequence[int], out: Sequence[int], dtype: np.dtype) -> np.ndarray:
    area = np.ones((), np.int64)
    for n, m in zip(size, out, strict=True):
        start, end = adaptive_windows(n, m)
        area = area[..., None] * (end - start)
    return area.astype(dtype)


@lower(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(ctx: Context, x: jax.Array, output_size: Sequence[int]) -> jax.Array:
    rank = len(output_size)
    total = accumulating(x)
    for axis in range(x.ndim - rank, x.ndim):
        total = range_sums(total, axis, *adaptive_windows(x.shape[axis], ctx.result.shape[axis]))
    area = _lengths(x.shape[-rank:], ctx.result.shape[-rank:], total.dtype)
    return cast(true_div(total, jnp.broadcast_to(area, total.shape)), ctx.result.dtype)


@lower(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(ctx: Context, g: jax.Array, x: jax.Array) -> jax.Array:
    rank = 2 if ctx.op is aten._adaptive_avg_pool2d_backward.default else 3
    total = accumulating(g)
    area = _lengths(x.shape[-rank:], g.shape[-rank:], total.dtype)
    total = lax.div(total, jnp.broadcast_to(area, total.shape))
    for axis in range(x.ndim - rank, x.ndim):
        # the windows that hold input i are, again, adaptive windows, with input and output exchanged
        total = range_sums(total, axis, *adaptive_windows(g.shape[axis], x.shape[axis]))
    return cast(total, ctx.result.dtype)


def window_maxima(x: jax.Array, taps: Sequence[jax.Array], inside: Sequence[np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Maximum, and its flat position, of windows given by the positions that they read.

    Args:
        x: (N, \\*size).
        taps: for each dimension, positions (N or 1, windows, taps).
        inside: for each dimension, which taps belong to their window, (windows, taps).
    """
    size = x.shape[1:]
    where = positions(size, x.shape)
    least = lowest(x.dtype)
    for d, (at, kept) in enumerate(zip(taps, inside, strict=True)):
        axis = 1 + d
        index = jnp.broadcast_to(at, (x.shape[0], *at.shape[1:]))
        windows, count = kept.shape
        flat = lax.reshape(index, (x.shape[0], *(1,) * d, windows * count, *(1,) * (len(size) - d - 1)))
        spread = (*x.shape[:axis], windows, count, *x.shape[axis + 1 :])
        mask = lax.broadcast_in_dim(kept, spread, (axis, axis + 1))
        value = lax.reshape(jnp.take_along_axis(x, flat, axis, mode="clip"), spread)
        place = lax.reshape(jnp.take_along_axis(where, flat, axis, mode="clip"), spread)
        value = lax.select(mask, value, jnp.full(spread, least))
        place = lax.select(mask, place, lax.full_like(place, LAST))
        x, where = lax.reduce((value, place), (least, LAST), later_maximum, (axis + 1,))
    return x, cast(where, torch.int64)


def _pooled(ctx: Context, x: jax.Array, rank: int, taps: list, inside: list) -> tuple[jax.Array, ...]:
    shape = ctx.result[0].shape
    if 0 in shape:
        return tuple(jnp.zeros(r.shape, r.jax_dtype) for r in ctx.result)
    rows = lax.reshape(x, (int(np.prod(x.shape[:-rank])), *x.shape[-rank:]))
    values, indices = window_maxima(rows, taps, inside)
    return lax.reshape(values, shape), lax.reshape(indices, shape)


@lower(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(ctx: Context, x: jax.Array, output_size: Sequence[int]) -> tuple[jax.Array, ...]:
    rank = 2 if ctx.op is aten.adaptive_max_pool2d.default else 3
    taps, inside = [], []
    for n, out in zip(x.shape[-rank:], ctx.result[0].shape[-rank:], strict=True):
        start, end = adaptive_windows(n, out)
        at = start[:, None] + np.arange(int((end - start).max(initial=1)))
        taps.append(jnp.asarray(np.minimum(at, max(n - 1, 0))[None]))
        inside.append(at < end[:, None])
    return _pooled(ctx, x, rank, taps, inside)


@lower(aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool_backward(ctx: Context, g: jax.Array, x: jax.Array, indices: jax.Array) -> jax.Array:
    rank = 2 if ctx.op is aten.adaptive_max_pool2d_backward.default else 3
    return scatter_flat(g, indices, x.shape[-rank:])


@lower(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_max_pool(
    ctx: Context, x: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: jax.Array
) -> tuple[jax.Array, ...]:
    """Window ``i`` starts at ``int((i + u) * a) - int(u * a)``, ``a = (n - k) / (out - 1)``; the last at ``n - k``.

    ``u`` is the sample of plane and dimension; in 2d ordered (width, height), in 3d (time, height, width). There may be
    samples for more batches than the input has; torch reads the first.
    """
    rank = len(kernel_size)
    if 0 in ctx.result[0].shape:
        return tuple(jnp.zeros(r.shape, r.jax_dtype) for r in ctx.result)
    planes = int(np.prod(x.shape[:-rank]))
    batch = x.shape[0] if x.ndim == rank + 2 else 1
    samples = lax.reshape(random_samples[:batch], (planes, rank))
    taps, inside = [], []
    for d, (n, k, out) in enumerate(zip(x.shape[-rank:], kernel_size, output_size, strict=True)):
        u = samples[:, (1 - d) if rank == 2 else d, None]
        alpha = np.asarray((n - k) / (out - 1) if out > 1 else 0, u.dtype)
        i = np.arange(out - 1).astype(u.dtype)
        starts = ((u + i) * alpha).astype(jnp.int32) - (u * alpha).astype(jnp.int32)
        starts = jnp.concatenate([starts, jnp.full((planes, 1), n - k, jnp.int32)], axis=1)
        taps.append(starts[:, :, None] + np.arange(k, dtype=np.int32))
        inside.append(np.ones((out, k), bool))
    return _pooled(ctx, x, rank, taps, inside)


@lower(aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default)
def fractional_max_pool_backward(
    ctx: Context, g: jax.Array, x: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], indices: jax.Array
) -> jax.Array:
    return scatter_flat(g, indices, x.shape[-len(kernel_size) :])
