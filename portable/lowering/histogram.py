"""Histograms: how many elements, or how much weight, falls between edges. The last bin includes its right edge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context, Spec
from portable.lowering.creation import spaced
from portable.lowering.elementwise import true_div
from portable.lowering.registry import broadcast, cast, lower, narrowed
from portable.lowering.scatter import rows
from portable.lowering.sorting import search

aten = torch.ops.aten


def _extent(flat: jax.Array, low: Any, high: Any, data_driven: bool, margin: float) -> tuple[jax.Array, jax.Array]:
    """The outer edges; where they are equal, widened by ``margin`` on both sides."""
    if data_driven and flat.size:
        low, high = lax.reduce_min(flat, (0,)), lax.reduce_max(flat, (0,))
    low, high = (jnp.asarray(v, flat.dtype) for v in (low, high))
    wider = jnp.asarray(margin, flat.dtype)
    empty = lax.eq(low, high)
    return lax.select(empty, lax.sub(low, wider), low), lax.select(empty, lax.add(high, wider), high)


@lower(aten.histc.default)
def histc(ctx: Context, x: jax.Array, bins: int = 100, min: Any = 0, max: Any = 0) -> jax.Array:
    """torch's formula: the bin is (x - min) * bins / (max - min), truncated; NaN and what lies outside are left out."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        ctx.refuse("torch has no histc of integers on CPU")
    wide = x.dtype if x.dtype.itemsize >= 4 else np.dtype(np.float32)
    flat = lax.convert_element_type(lax.reshape(x, (x.size,)), wide)
    low, high = _extent(flat, min, max, min == max, 1.0)
    if flat.size == 0:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    rounded = partial(narrowed, dtype=ctx.result.dtype)  # half precision is rounded after each step
    low, high = (rounded(broadcast(v, flat.shape)) for v in (low, high))
    position = rounded(lax.mul(rounded(lax.sub(flat, low)), rounded(lax.full_like(flat, bins))))
    position = rounded(true_div(position, rounded(lax.sub(high, low))))
    inside = lax.bitwise_and(lax.ge(flat, low), lax.le(flat, high))
    position = lax.convert_element_type(lax.select(inside, position, lax.full_like(flat, 0)), np.int64)
    position = lax.min(position, lax.full_like(position, bins - 1))
    position = lax.select(inside, position, lax.full_like(position, bins))  # a write beyond the end is dropped
    total = rows(lax.scatter_add, jnp.zeros((bins,), wide), 0, position, lax.full_like(flat, 1))
    return cast(total, ctx.result.dtype)


def _bin(values: jax.Array, edges: jax.Array) -> jax.Array:
    """The bin of each value, or the number of bins where it lies in none; int64."""
    count = edges.shape[0] - 1
    first, last = (broadcast(lax.slice_in_dim(edges, i, i + 1), values.shape) for i in (0, count))
    position = lax.sub(search(edges, values, True), lax.full_like(values, 1, np.int64))
    position = lax.select(lax.eq(values, last), lax.full_like(position, count - 1), position)
    inside = lax.bitwise_and(lax.ge(values, first), lax.le(values, last))
    return lax.select(inside, position, lax.full_like(position, count))


def _counted(
    ctx: Context, spec: Spec, points: jax.Array, edges: Sequence[jax.Array], weight: jax.Array | None, density: bool
) -> jax.Array:
    """The histogram of the rows of ``points`` (rows, dims) over the grid of ``edges``."""
    counts = [e.shape[0] - 1 for e in edges]
    size = math.prod(counts)
    cell = jnp.zeros((points.shape[0],), np.int64)
    beyond = jnp.zeros((points.shape[0],), np.bool_)
    for dim, (edge, count) in enumerate(zip(edges, counts, strict=True)):
        position = _bin(lax.index_in_dim(points, dim, 1, keepdims=False), edge)
        beyond = lax.bitwise_or(beyond, lax.eq(position, lax.full_like(position, count)))
        cell = lax.add(lax.mul(cell, lax.full_like(cell, count)), position)
    cell = lax.select(beyond, lax.full_like(cell, size), cell)
    amount = jnp.ones(cell.shape, points.dtype) if weight is None else lax.reshape(weight, cell.shape)
    total = lax.reshape(rows(lax.scatter_add, jnp.zeros((size,), points.dtype), 0, cell, amount), tuple(counts))
    if density:
        total = lax.div(total, broadcast(lax.reduce_sum(total, tuple(range(total.ndim))), total.shape))
        for dim, edge in enumerate(edges):
            width = lax.sub(lax.slice_in_dim(edge, 1, counts[dim] + 1), lax.slice_in_dim(edge, 0, counts[dim]))
            total = lax.div(total, lax.broadcast_in_dim(width, total.shape, (dim,)))
    return cast(total, spec.dtype)


def _edges(
    points: jax.Array, bins: Sequence[int], limits: Sequence[float] | None, dtype: torch.dtype
) -> list[jax.Array]:
    edges = []
    for dim, count in enumerate(bins):
        low, high = limits[2 * dim : 2 * dim + 2] if limits else (0.0, 1.0)
        column = lax.index_in_dim(points, dim, 1, keepdims=False)
        start, end = _extent(column, low, high, limits is None, 0.5)
        edges.append(spaced(start, end, count + 1, dtype))
    return edges


def _rows(x: jax.Array) -> jax.Array:
    """All dims but the last as one."""
    return lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


@lower(aten.histogram.bin_ct)
def histogram(
    ctx: Context,
    x: jax.Array,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> tuple[jax.Array, jax.Array]:
    points = lax.reshape(x, (x.size, 1))
    edges = _edges(points, [bins], range, ctx.result[1].dtype)
    return _counted(ctx, ctx.result[0], points, edges, weight, density), edges[0]


@lower(aten.histogram.bins_tensor)
def histogram_edges(
    ctx: Context, x: jax.Array, bins: jax.Array, *, weight: jax.Array | None = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _counted(ctx, ctx.result[0], lax.reshape(x, (x.size, 1)), [bins], weight, density), bins


@lower(aten._histogramdd_bin_edges.default)
def histogramdd_bin_edges(
    ctx: Context,
    x: jax.Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> list[jax.Array]:
    return _edges(_rows(x), bins, range, ctx.result[0].dtype)


@lower(aten._histogramdd_from_bin_cts.default)
def histogramdd_from_bin_counts(
    ctx: Context,
    x: jax.Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> jax.Array:
    points = _rows(x)
    return _counted(ctx, ctx.result, points, _edges(points, bins, range, ctx.result.dtype), weight, density)


@lower(aten._histogramdd_from_bin_tensors.default)
def histogramdd_from_bin_tensors(
    ctx: Context, x: jax.Array, bins: Sequence[jax.Array], *, weight: jax.Array | None = None, density: bool = False
) -> jax.Array:
    return _counted(ctx, ctx.result, _rows(x), bins, weight, density)
