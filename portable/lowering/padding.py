"""Padding: constant, reflection, replication, and the gradients of the last two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import cast, lower
from portable.lowering.scatter import widened

aten = torch.ops.aten


@lower(aten.constant_pad_nd.default)
def constant_pad_nd(ctx: Context, x: jax.Array, pad: Sequence[int], value: Any = 0) -> jax.Array:
    """torch lists (before, after) from the last dim backwards; a negative width crops."""
    widths = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        widths[-1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, cast(value, ctx.result.dtype), widths)


def _widths(ndim: int, padding: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(dim, before, after), from the last dim backwards."""
    for i in range(len(padding) // 2):
        yield ndim - 1 - i, padding[2 * i], padding[2 * i + 1]


def _cropped(x: jax.Array, dim: int, before: int, after: int) -> jax.Array:
    """``x`` without what negative widths cut off."""
    return lax.slice_in_dim(x, max(-before, 0), x.shape[dim] - max(-after, 0), 1, dim)


def _reflected(x: jax.Array, dim: int, before: int, after: int) -> jax.Array:
    n = x.shape[dim]
    parts = [_cropped(x, dim, before, after)]
    if before > 0:
        parts.insert(0, lax.rev(lax.slice_in_dim(x, 1, before + 1, 1, dim), (dim,)))
    if after > 0:
        parts.append(lax.rev(lax.slice_in_dim(x, n - 1 - after, n - 1, 1, dim), (dim,)))
    return lax.concatenate(parts, dim) if len(parts) > 1 else parts[0]


def _replicated(x: jax.Array, dim: int, before: int, after: int) -> jax.Array:
    n = x.shape[dim]
    parts = [_cropped(x, dim, before, after)]
    if before > 0:
        parts.insert(0, _repeated(lax.slice_in_dim(x, 0, 1, 1, dim), dim, before))
    if after > 0:
        parts.append(_repeated(lax.slice_in_dim(x, n - 1, n, 1, dim), dim, after))
    return lax.concatenate(parts, dim) if len(parts) > 1 else parts[0]


def _repeated(edge: jax.Array, dim: int, count: int) -> jax.Array:
    shape = tuple(count if d == dim else n for d, n in enumerate(edge.shape))
    return lax.broadcast_in_dim(edge, shape, tuple(range(edge.ndim)))


@lower(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(ctx: Context, x: jax.Array, padding: Sequence[int]) -> jax.Array:
    for dim, before, after in _widths(x.ndim, padding):
        x = _reflected(x, dim, before, after)
    return x


@lower(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(ctx: Context, x: jax.Array, padding: Sequence[int]) -> jax.Array:
    for dim, before, after in _widths(x.ndim, padding):
        x = _replicated(x, dim, before, after)
    return x


def _placed(part: jax.Array, dim: int, start: int, size: int) -> jax.Array:
    """``part`` at ``start`` along ``dim`` of zeros."""
    widths = [(0, 0, 0)] * part.ndim
    widths[dim] = (start, size - start - part.shape[dim], 0)
    return lax.pad(part, np.zeros((), part.dtype), widths)


def _folded(grad: jax.Array, dim: int, size: int, before: int, after: int, reflect: bool) -> jax.Array:
    """The gradient along one dim: the middle, and each border added to where it was read."""
    end = grad.shape[dim]
    low, high = max(before, 0), max(after, 0)
    total = _placed(lax.slice_in_dim(grad, low, end - high, 1, dim), dim, max(-before, 0), size)
    # (width, where the border lies in grad, where its mirror image lies in x, which edge of x it repeats)
    borders = ((low, 0, 1, 0), (high, end - high, size - 1 - high, size - 1))
    for width, start, mirror, edge in borders:
        if not width:
            continue
        part = lax.slice_in_dim(grad, start, start + width, 1, dim)
        if reflect:
            part = _placed(lax.rev(part, (dim,)), dim, mirror, size)
        else:
            part = _placed(lax.expand_dims(lax.reduce_sum(part, (dim,)), (dim,)), dim, edge, size)
        total = lax.add(total, part)
    return total


def _pad_backward(ctx: Context, grad: jax.Array, padding: Sequence[int], reflect: bool) -> jax.Array:
    if grad.size == 0:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    shape = ctx.result.shape
    (total,) = widened(grad)
    for dim, before, after in _widths(grad.ndim, padding):
        total = _folded(total, dim, shape[dim], before, after, reflect)
    return cast(total, ctx.result.dtype)


@lower(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
)
def reflection_pad_backward(ctx: Context, grad: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
    return _pad_backward(ctx, grad, padding, True)


@lower(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def replication_pad_backward(ctx: Context, grad: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
    return _pad_backward(ctx, grad, padding, False)
