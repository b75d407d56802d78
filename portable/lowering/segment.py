"""Reductions over consecutive segments of one axis, given by their lengths or offsets, and their gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.bounds import holds
from portable.lowering.context import Context
from portable.lowering.gather import gather_along
from portable.lowering.registry import cast, lower, narrowed
from portable.lowering.scatter import COMBINE, identity_of, scatter_along, widened
from portable.lowering.sorting import search

aten = torch.ops.aten
NAMES = {"max": "amax", "min": "amin"}


def _segments(data: jax.Array, axis: int, lengths: jax.Array | None, offsets: Any) -> tuple[jax.Array, jax.Array]:
    """For each element of ``data`` the index of its segment, and the segments' lengths (*leading dims, segments).

    An element of no segment has the number of segments as its index.
    """
    if lengths is None:
        last = offsets.ndim - 1
        ends = lax.slice_in_dim(offsets, 1, offsets.shape[last], 1, last)
        lengths = lax.sub(ends, lax.slice_in_dim(offsets, 0, offsets.shape[last] - 1, 1, last))
    else:
        ends = lax.cumsum(lengths, lengths.ndim - 1)
    place = lax.broadcasted_iota(np.int64, data.shape[: axis + 1], axis)
    number = search(lax.convert_element_type(ends, np.int64), place, True)
    return lax.broadcast_in_dim(number, data.shape, tuple(range(axis + 1))), lax.convert_element_type(lengths, np.int64)


def _check_lengths(ctx: Context, lengths: jax.Array, whole: int | None) -> None:
    """As torch does: none is negative, and lengths that were given fill the axis of ``whole`` elements."""
    holds(ctx, jnp.all(lax.ge(lengths, lax.full_like(lengths, 0))), "segment_reduce(): a segment has a negative length")
    if whole is not None:
        total = lax.reduce_sum(lengths, (lengths.ndim - 1,))
        filled = jnp.all(lax.eq(total, lax.full_like(total, whole)))
        holds(ctx, filled, "segment_reduce(): the lengths along the axis have to sum to its size")


def _spread(per_segment: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcast_in_dim(per_segment, shape, tuple(range(axis + 1)))


def _taken(per_segment: jax.Array, axis: int, number: jax.Array) -> jax.Array:
    return gather_along(per_segment, axis, number)


def _combined(
    combine: Any, start: jax.Array, axis: int, number: jax.Array, data: jax.Array, dtype: torch.dtype
) -> jax.Array:
    """All elements of each segment; in half precision one after the other, each result rounded, as torch does."""
    if dtype not in (torch.bfloat16, torch.float16):
        return scatter_along(combine, start, axis, number, data)

    def step(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        place, value = (lax.dynamic_slice_in_dim(v, i, 1, axis) for v in (number, data))
        return narrowed(scatter_along(combine, total, axis, place, value), dtype), None

    return lax.scan(step, start, jnp.arange(data.shape[axis]))[0]


@lower(aten.segment_reduce.default)
def segment_reduce(
    ctx: Context,
    data: jax.Array,
    reduce: str,
    *,
    lengths: jax.Array | None = None,
    indices: jax.Array | None = None,
    offsets: jax.Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> jax.Array:
    shape, name = ctx.result.shape, NAMES.get(reduce, reduce)
    if 0 in shape:
        return jnp.zeros(shape, ctx.result.jax_dtype)
    axis %= data.ndim
    number, lengths = _segments(data, axis, lengths, offsets)
    if not unsafe:
        _check_lengths(ctx, lengths, data.shape[axis] if offsets is None else None)
    (wide,) = widened(data)
    start = jnp.full(shape, identity_of(name, wide.dtype) if initial is None else initial, wide.dtype)
    total = _combined(COMBINE[name], start, axis, number, wide, ctx.result.dtype)
    if reduce == "mean":
        count = lax.convert_element_type(_spread(lengths, shape, axis), wide.dtype)
        empty = lax.eq(count, lax.full_like(count, 0))
        none = lax.full_like(total, np.nan) if initial is None else total
        total = lax.select(empty, none, lax.div(total, count))
    return cast(total, ctx.result.dtype)


@lower(aten._segment_reduce_backward.default)
def segment_reduce_backward(
    ctx: Context,
    grad: jax.Array,
    output: jax.Array,
    data: jax.Array,
    reduce: str,
    *,
    lengths: jax.Array | None = None,
    offsets: jax.Array | None = None,
    axis: int = 0,
    initial: Any = None,
) -> jax.Array:
    if data.size == 0 or grad.size == 0:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    axis %= data.ndim
    number, lengths = _segments(data, axis, lengths, offsets)
    inside = lax.lt(number, lax.full_like(number, lengths.shape[-1]))
    grad, output, data = widened(grad, output, data)
    spread = _taken(grad, axis, number)
    if reduce == "mean":
        count = lax.convert_element_type(_spread(lengths, grad.shape, axis), grad.dtype)
        spread = lax.div(spread, _taken(count, axis, number))
    elif reduce in ("max", "min"):
        spread = _shared(spread, output, data, axis, number)
    elif reduce == "prod":
        spread = lax.mul(spread, _product_of_others(output, data, axis, number, 1 if initial is None else initial))
    return cast(lax.select(inside, spread, lax.full_like(spread, 0)), ctx.result.dtype)


def _shared(spread: jax.Array, output: jax.Array, data: jax.Array, axis: int, number: jax.Array) -> jax.Array:
    """The gradient of an extremum is shared equally by the elements that equal it; NaN equals NaN."""
    extremum = _taken(output, axis, number)
    equal = lax.bitwise_or(lax.eq(data, extremum), lax.bitwise_and(lax.ne(data, data), lax.ne(extremum, extremum)))
    one = lax.convert_element_type(equal, data.dtype)
    count = scatter_along(lax.scatter_add, lax.full_like(output, 0), axis, number, one)
    count = lax.max(_taken(count, axis, number), lax.full_like(data, 1))
    return lax.select(equal, lax.div(spread, count), lax.full_like(spread, 0))


def _product_of_others(output: jax.Array, data: jax.Array, axis: int, number: jax.Array, initial: Any) -> jax.Array:
    """output / x; where x is zero or NaN, the product of the other elements of its segment."""
    zero, nan = lax.eq(data, lax.full_like(data, 0)), lax.ne(data, data)
    special = lax.bitwise_or(zero, nan)
    plain = lax.select(special, lax.full_like(data, 1), data)

    def total(combine: Any, start: Any, values: jax.Array) -> jax.Array:
        values = lax.convert_element_type(values, data.dtype)
        return _taken(scatter_along(combine, lax.full_like(output, start), axis, number, values), axis, number)

    rest = total(lax.scatter_mul, initial, plain)
    other_zeros = lax.sub(total(lax.scatter_add, 0, zero), lax.convert_element_type(zero, data.dtype))
    other_nans = lax.sub(total(lax.scatter_add, 0, nan), lax.convert_element_type(nan, data.dtype))
    rest = lax.select(lax.gt(other_zeros, lax.full_like(data, 0)), lax.full_like(data, 0), rest)
    rest = lax.select(lax.gt(other_nans, lax.full_like(data, 0)), lax.full_like(data, np.nan), rest)
    return lax.select(special, rest, lax.div(_taken(output, axis, number), plain))
