"""Writing into a view, functionally: ``*_scatter`` gives the base with the view replaced. Gradients of views."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import broadcast, cast, lower
from portable.lowering.scatter import rows, widened

aten = torch.ops.aten


def _replace(x: jax.Array, source: jax.Array, dim: int, start: int, length: int, step: int) -> jax.Array:
    """``x`` with ``length`` positions from ``start`` by ``step`` along ``dim`` taken from ``source``."""
    shape = tuple(length if d == dim else n for d, n in enumerate(x.shape))
    if 0 in shape:
        return x
    source = broadcast(source, shape)
    if step == 1:
        if shape == x.shape:
            return source
        starts = tuple(np.int32(start if d == dim else 0) for d in range(x.ndim))
        return lax.dynamic_update_slice(x, source, starts)
    spread = [(0, 0, 0)] * x.ndim
    spread[dim] = (start, x.shape[dim] - start - (length - 1) * step - 1, step - 1)
    along = lax.broadcasted_iota(np.int32, x.shape, dim)
    offset = lax.sub(along, lax.full_like(along, start))
    inside = lax.bitwise_and(
        lax.bitwise_and(lax.ge(offset, lax.full_like(along, 0)), lax.lt(offset, lax.full_like(along, length * step))),
        lax.eq(lax.rem(offset, lax.full_like(along, step)), lax.full_like(along, 0)),
    )
    return lax.select(inside, lax.pad(source, np.zeros((), x.dtype), spread), x)


@lower(aten.slice_scatter.default)
def slice_scatter(
    ctx: Context,
    x: jax.Array,
    source: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    positions = range(*slice(start, end, step).indices(x.shape[dim]))
    return _replace(x, cast(source, ctx.result.dtype), dim % x.ndim, positions.start, len(positions), step)


@lower(aten.slice_backward.default)
def slice_backward(
    ctx: Context, grad: jax.Array, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> jax.Array:
    dim %= len(sizes)
    positions = range(*slice(start, end, step).indices(sizes[dim]))
    if not positions:
        return jnp.zeros(ctx.result.shape, grad.dtype)
    spread = [(0, 0, 0)] * grad.ndim
    spread[dim] = (positions.start, sizes[dim] - positions[-1] - 1, step - 1)
    return lax.pad(grad, np.zeros((), grad.dtype), spread)


@lower(aten.select_scatter.default)
def select_scatter(ctx: Context, x: jax.Array, source: jax.Array, dim: int, index: int) -> jax.Array:
    dim %= x.ndim
    if not -x.shape[dim] <= index < x.shape[dim]:
        ctx.refuse(f"index {index} is out of range for dimension {dim} with size {x.shape[dim]}")
    row = lax.expand_dims(cast(source, ctx.result.dtype), (dim,))
    return _replace(x, row, dim, index % x.shape[dim], 1, 1)


@lower(aten.select_backward.default)
def select_backward(ctx: Context, grad: jax.Array, sizes: Sequence[int], dim: int, index: int) -> jax.Array:
    dim %= len(sizes)
    spread = [(0, 0, 0)] * len(sizes)
    spread[dim] = (index % sizes[dim], sizes[dim] - index % sizes[dim] - 1, 0)
    return lax.pad(lax.expand_dims(grad, (dim,)), np.zeros((), grad.dtype), spread)


def _on_diagonal(
    ctx: Context, shape: tuple[int, ...], values: jax.Array, offset: int, dim1: int, dim2: int
) -> tuple[jax.Array, jax.Array]:
    """``values`` on the diagonal of a tensor of this shape, zeros elsewhere; and where the diagonal is."""
    dim1, dim2 = dim1 % len(shape), dim2 % len(shape)
    rows_ = lax.broadcasted_iota(np.int32, shape, dim1)
    columns = lax.broadcasted_iota(np.int32, shape, dim2)
    inside = lax.eq(lax.sub(columns, rows_), lax.full_like(rows_, offset))
    rest = tuple(d for d in range(len(shape)) if d not in (dim1, dim2))
    length = values.shape[-1]
    before = max(offset, 0)
    edge = (before, shape[dim2] - length - before, 0)
    padded = lax.pad(values, np.zeros((), values.dtype), [(0, 0, 0)] * (values.ndim - 1) + [edge])
    spread = lax.broadcast_in_dim(padded, shape, (*rest, dim2))
    return lax.select(inside, spread, lax.full_like(spread, 0)), inside


@lower(aten.diagonal_scatter.default)
def diagonal_scatter(
    ctx: Context, x: jax.Array, source: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    if source.size == 0:
        return x
    spread, inside = _on_diagonal(ctx, x.shape, cast(source, ctx.result.dtype), offset, dim1, dim2)
    return lax.select(inside, spread, x)


@lower(aten.diagonal_backward.default)
def diagonal_backward(
    ctx: Context, grad: jax.Array, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> jax.Array:
    if grad.size == 0:
        return jnp.zeros(ctx.result.shape, grad.dtype)
    return _on_diagonal(ctx, ctx.result.shape, grad, offset, dim1, dim2)[0]


@lower(aten.unfold_backward.default)
def unfold_backward(ctx: Context, grad: jax.Array, sizes: Sequence[int], dim: int, size: int, step: int) -> jax.Array:
    """Each window's gradient is added where the window was; the other axes broadcast, as istft's window needs."""
    shape = ctx.result.shape
    if not shape or grad.size == 0:
        return lax.reshape(grad, shape) if grad.size else jnp.zeros(shape, grad.dtype)
    dim %= len(shape)
    grad = broadcast(grad, (*shape[:dim], grad.shape[dim], *shape[dim + 1 :], grad.shape[-1]))
    order = [*range(dim + 1), grad.ndim - 1, *range(dim + 1, grad.ndim - 1)]
    (windows,) = widened(lax.transpose(grad, order))
    count = windows.shape[dim]
    windows = lax.reshape(windows, (*shape[:dim], count * size, *shape[dim + 1 :]))
    where = (np.arange(count)[:, None] * step + np.arange(size)).reshape(-1)
    total = rows(lax.scatter_add, jnp.zeros(shape, windows.dtype), dim, jnp.asarray(where), windows)
    return cast(total, ctx.result.dtype)
