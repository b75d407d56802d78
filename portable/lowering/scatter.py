"""Writing by index.

An index that is out of range raises after the run, as in eager (`bounds`). Where an index occurs twice, updates are
applied in row-major order, as torch's CPU kernels do: the last write wins, and sums include every one. Sums of half
precision accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.dtypes import to_torch
from portable.lowering.bounds import OF_DIM, holds, within
from portable.lowering.context import Context
from portable.lowering.gather import (
    all_within,
    clamped,
    coordinates,
    flat_within,
    index_select,
    placement,
    with_masks,
    wrapped,
)
from portable.lowering.registry import broadcast, cast, lower

aten = torch.ops.aten
IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS
HALF = (np.dtype(jnp.bfloat16), np.dtype(np.float16))


def widened(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Half precision as float32, bool as int32 (a sum of bools is a disjunction), to accumulate in."""
    if arrays[0].dtype in HALF:
        return tuple(lax.convert_element_type(a, np.float32) for a in arrays)
    if arrays[0].dtype == np.bool_:
        return tuple(lax.convert_element_type(a, np.int32) for a in arrays)
    return arrays


def accumulated(
    write: Callable[..., jax.Array], x: jax.Array, where: jax.Array, updates: jax.Array, *args: Any
) -> jax.Array:
    """``write`` (one of JAX's scatters) in a wide enough type."""
    wide, wide_updates = widened(x, updates)
    return cast(write(wide, where, wide_updates, *args, mode=IN_BOUNDS), to_torch(x.dtype))


@lower(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ctx: Context, x: jax.Array, indices: Sequence[jax.Array | None], values: jax.Array, accumulate: bool = False
) -> jax.Array:
    indices = with_masks(indices)
    given = {d: i for d, i in enumerate(indices) if i is not None}
    if x.size == 0 or values.size == 0:
        return x
    values = cast(values, ctx.result.dtype)
    if any(i.dtype == np.bool_ for i in given.values()):
        return _put_by_mask(ctx, x, indices, list(given), values, accumulate)
    if not given:
        values = broadcast(values, x.shape)
        return _add(x, values) if accumulate else values
    if ctx.op is aten.index_put.default:
        all_within(ctx, x.shape, indices)
    where, dims = coordinates(ctx, x.shape, indices)
    if where.size == 0:
        return x
    window = placement(dims, x.ndim, where.ndim - 1)
    rest = [n for d, n in enumerate(x.shape) if d not in dims]
    batch = iter(where.shape[:-1])
    windows = dict(zip(window, rest, strict=True))
    shape = tuple(windows[i] if i in windows else next(batch) for i in range(len(rest) + where.ndim - 1))
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=window, inserted_window_dims=tuple(dims), scatter_dims_to_operand_dims=tuple(dims)
    )
    values = broadcast(_without_leading_ones(values, len(shape)), shape)
    if accumulate and x.dtype in HALF:  # torch rounds after each addition here, on every device
        return lax.scatter_add(x, where, values, numbers, mode=IN_BOUNDS)
    return accumulated(lax.scatter_add if accumulate else lax.scatter, x, where, values, numbers)


def _without_leading_ones(values: jax.Array, ndim: int) -> jax.Array:
    return lax.reshape(values, values.shape[values.ndim - ndim :]) if values.ndim > ndim else values


def _add(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.bitwise_or(x, y) if x.dtype == np.bool_ else lax.add(x, y)


def _put_by_mask(
    ctx: Context, x: jax.Array, indices: Sequence[Any], given: list[int], values: jax.Array, accumulate: bool
) -> jax.Array:
    """``x[..., mask] = values``: the n-th position where the mask holds takes the n-th row of values.

    The mask's own dims of ``values`` are one dim, as long as the mask has true elements (or 1).
    """
    if len(given) != 1:
        ctx.refuse("a boolean index beside another one selects a number of elements that depends on the data")
    first, mask = given[0], indices[given[0]]
    rest = x.ndim - first - mask.ndim
    values = lax.reshape(values, (1,) * max(first + 1 + rest - values.ndim, 0) + values.shape)
    values = _without_leading_ones(values, first + 1 + rest)
    shape = (*x.shape[:first], values.shape[first], *x.shape[first + mask.ndim :])
    values = broadcast(values, shape)
    if values.shape[first] == 1:
        spread = lax.reshape(values, (*shape[:first], *(1,) * mask.ndim, *shape[first + 1 :]))
        chosen = broadcast(spread, x.shape)
    else:
        n = lax.reduce_sum(lax.convert_element_type(mask, np.int64), tuple(range(mask.ndim)))
        many = f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result"
        holds(ctx, lax.eq(n, lax.full_like(n, values.shape[first])), many)
        rank = lax.cumsum(lax.convert_element_type(lax.reshape(mask, (mask.size,)), np.int32))
        rank = lax.max(lax.sub(rank, lax.full_like(rank, 1)), lax.full_like(rank, 0))
        chosen = lax.reshape(index_select(ctx, values, first, rank), x.shape)
    inside = lax.broadcast_in_dim(mask, x.shape, tuple(range(first, first + mask.ndim)))
    return lax.select(inside, _add(x, chosen) if accumulate else chosen, x)


@lower(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put_accumulate(
    ctx: Context, x: jax.Array, mask: jax.Array, indices: Sequence[jax.Array | None], values: jax.Array
) -> jax.Array:
    if x.size == 0:
        return x
    values = lax.select(broadcast(mask, values.shape), values, lax.full_like(values, 0))
    return index_put(ctx, x, clamped(indices, x.shape), values, True)


def rows(write: Callable[..., jax.Array], x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    """Write slice i of ``source`` along ``dim`` to slice ``index[i]`` of ``x``."""
    window = tuple(d for d in range(x.ndim) if d != dim)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=window, inserted_window_dims=(dim,), scatter_dims_to_operand_dims=(dim,)
    )
    return accumulated(write, x, index[:, None], source, numbers)


def _at_least_1d(x: jax.Array) -> jax.Array:
    return x if x.ndim else lax.reshape(x, (1,))


@lower(aten.index_add.default)
def index_add(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, source: jax.Array, *, alpha: Any = 1
) -> jax.Array:
    if source.size == 0:
        return x
    wide, values = widened(_at_least_1d(x), cast(_at_least_1d(source), ctx.result.dtype))
    if wide.ndim > 1:
        within(ctx, index, wide.shape[dim], OF_DIM, dim=dim % wide.ndim, error=RuntimeError)
    else:
        within(ctx, index, wide.shape[0])
    if alpha != 1:
        values = lax.mul(values, jnp.full(values.shape, alpha, values.dtype))
    out = rows(lax.scatter_add, wide, dim % wide.ndim, _at_least_1d(index), values)
    return lax.reshape(cast(out, ctx.result.dtype), ctx.result.shape)


@lower(aten.index_copy.default)
def index_copy(ctx: Context, x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    if source.size == 0:
        return x
    wide = _at_least_1d(x)
    shape = tuple(index.size if d == dim % wide.ndim else n for d, n in enumerate(wide.shape))
    index = _at_least_1d(index)
    within(ctx, index, wide.shape[dim], f"index_copy_(): {OF_DIM}", dim=dim % wide.ndim)
    out = rows(lax.scatter, wide, dim % wide.ndim, index, broadcast(lax.reshape(source, shape), shape))
    return lax.reshape(out, ctx.result.shape)


@lower(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(ctx: Context, x: jax.Array, dim: int, index: jax.Array, value: Any) -> jax.Array:
    wide, index = _at_least_1d(x), _at_least_1d(index)
    if index.size == 0 or x.size == 0:
        return x
    dim %= wide.ndim
    within(ctx, index, wide.shape[dim], OF_DIM, dim=dim, negative=True)
    shape = tuple(index.size if d == dim else n for d, n in enumerate(wide.shape))
    out = rows(lax.scatter, wide, dim, wrapped(index, wide.shape[dim]), broadcast(cast(value, ctx.result.dtype), shape))
    return lax.reshape(out, ctx.result.shape)


def scatter_along(
    write: Callable[..., jax.Array], x: jax.Array, dim: int, index: jax.Array, source: jax.Array
) -> jax.Array:
    """``x[i, index[i, j, k], k] <- source[i, j, k]`` for dim 1. In the other dims ``index`` may be smaller than ``x``:
    then only that corner of ``x`` is written."""
    if index.size == 0:
        return x
    kept = tuple(d for d in range(x.ndim) if d != dim)
    corner = tuple(n if d == dim else index.shape[d] for d, n in enumerate(x.shape))
    source = lax.slice(source, (0,) * x.ndim, index.shape)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(dim,),
        scatter_dims_to_operand_dims=(dim,),
        operand_batching_dims=kept,
        scatter_indices_batching_dims=kept,
    )
    part = lax.slice(x, (0,) * x.ndim, corner)
    out = accumulated(write, part, lax.expand_dims(index, (index.ndim,)), source, numbers)
    return out if corner == x.shape else lax.dynamic_update_slice(x, out, (np.int32(0),) * x.ndim)


def _scattered(
    ctx: Context, write: Callable[..., jax.Array], x: jax.Array, dim: int, index: jax.Array, source: Any
) -> jax.Array:
    wide, index = _at_least_1d(x), _at_least_1d(index)
    within(ctx, index, wide.shape[dim], OF_DIM, dim=dim % wide.ndim, error=RuntimeError)
    if not isinstance(source, jax.Array) or source.ndim == 0:
        source = broadcast(cast(source, ctx.result.dtype), index.shape)
    return lax.reshape(scatter_along(write, wide, dim % wide.ndim, index, source), ctx.result.shape)


@lower(aten.scatter.src, aten.scatter.value)
def scatter(ctx: Context, x: jax.Array, dim: int, index: jax.Array, source: Any) -> jax.Array:
    return _scattered(ctx, lax.scatter, x, dim, index, source)


@lower(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_with(ctx: Context, x: jax.Array, dim: int, index: jax.Array, source: Any, *, reduce: str) -> jax.Array:
    write = {"add": lax.scatter_add, "multiply": lax.scatter_mul}[reduce]
    return _scattered(ctx, write, x, dim, index, source)


@lower(aten.scatter_add.default)
def scatter_add(ctx: Context, x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    return _scattered(ctx, lax.scatter_add, x, dim, index, source)


COMBINE = {
    "sum": lax.scatter_add,
    "mean": lax.scatter_add,
    "prod": lax.scatter_mul,
    "amax": lax.scatter_max,
    "amin": lax.scatter_min,
}


def identity_of(reduce: str, dtype: np.dtype) -> Any:
    """The value that leaves every other one unchanged under ``reduce``."""
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype == np.bool_:
        return reduce == "amin"
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if reduce == "amax" else np.inf
    info = jnp.iinfo(dtype)
    return info.min if reduce == "amax" else info.max


def _reduced(
    write: Callable[..., jax.Array], x: jax.Array, source: jax.Array, reduce: str, include_self: bool
) -> jax.Array:
    """A scatter that reduces: ``write(combine, x, source)`` scatters; what an index touches starts at the identity
    where the value of ``x`` itself is not to be included."""
    dtype = x.dtype
    touched = write(lax.scatter_add, jnp.zeros(x.shape, np.int32), jnp.ones(source.shape, np.int32))
    hit = lax.gt(touched, lax.full_like(touched, 0))
    wide, values = widened(x, source)
    start = wide
    if not include_self:
        neutral = identity_of(reduce, dtype)
        start = lax.select(hit, jnp.full(wide.shape, neutral, wide.dtype), wide)
    out = write(COMBINE[reduce], start, values)
    if reduce == "mean":
        count = lax.max(lax.add(touched, lax.full_like(touched, int(include_self))), lax.full_like(touched, 1))
        out = _mean(out, lax.convert_element_type(count, out.dtype))
    out = cast(out, to_torch(x.dtype))
    return lax.select(hit, out, x)


def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
    """total / count; integers round down."""
    quotient = lax.div(total, count)
    if not jnp.issubdtype(total.dtype, jnp.signedinteger):
        return quotient
    inexact = lax.lt(lax.rem(total, count), lax.full_like(total, 0))
    return lax.sub(quotient, lax.convert_element_type(inexact, total.dtype))


@lower(aten.scatter_reduce.two)
def scatter_reduce(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, source: jax.Array, reduce: str, *, include_self: bool = True
) -> jax.Array:
    wide, index, source = _at_least_1d(x), _at_least_1d(index), _at_least_1d(source)
    if index.size == 0:
        return x
    within(ctx, index, wide.shape[dim], OF_DIM, dim=dim % wide.ndim, error=RuntimeError)
    source = lax.slice(source, (0,) * source.ndim, index.shape)

    def write(combine: Callable[..., jax.Array], target: jax.Array, values: jax.Array) -> jax.Array:
        return scatter_along(combine, target, dim % wide.ndim, index, values)

    return lax.reshape(_reduced(write, wide, source, reduce, include_self), ctx.result.shape)


@lower(aten.index_reduce.default)
def index_reduce(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, source: jax.Array, reduce: str, *, include_self: bool = True
) -> jax.Array:
    wide, index, source = _at_least_1d(x), _at_least_1d(index), _at_least_1d(source)
    if source.size == 0:
        return x
    within(ctx, index, wide.shape[dim])

    def write(combine: Callable[..., jax.Array], target: jax.Array, values: jax.Array) -> jax.Array:
        return rows(combine, target, dim % wide.ndim, index, values)

    return lax.reshape(_reduced(write, wide, source, reduce, include_self), ctx.result.shape)


@lower(aten.put.default)
def put(ctx: Context, x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False) -> jax.Array:
    if index.size == 0:
        return x
    flat_within(ctx, index, x.size)
    flat = lax.reshape(x, (x.size,))
    index, source = lax.reshape(index, (index.size,)), lax.reshape(source, (source.size,))
    write = lax.scatter_add if accumulate else lax.scatter
    return lax.reshape(rows(write, flat, 0, wrapped(index, x.size), source), x.shape)


@lower(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: Context, x: jax.Array, mask: jax.Array, value: Any) -> jax.Array:
    shape = ctx.result.shape
    return lax.select(broadcast(mask, shape), broadcast(cast(value, ctx.result.dtype), shape), broadcast(x, shape))


@lower(aten.masked_scatter.default)
def masked_scatter(ctx: Context, x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """The n-th position where the mask holds takes the n-th element of ``source``."""
    shape = ctx.result.shape
    x, mask = broadcast(x, shape), broadcast(mask, shape)
    if x.size == 0 or source.size == 0:
        return x
    rank = _rank(mask)
    n = lax.reduce_sum(lax.convert_element_type(mask, np.int64), tuple(range(mask.ndim)))
    holds(ctx, lax.le(n, lax.full_like(n, source.size)), "Number of elements of source < number of ones in mask")
    taken = index_select(ctx, lax.reshape(source, (source.size,)), 0, rank)
    return lax.select(mask, lax.reshape(taken, shape), x)


def _rank(mask: jax.Array) -> jax.Array:
    """How many true elements precede each true element in row-major order (0 before the first); flat."""
    count = lax.cumsum(lax.convert_element_type(lax.reshape(mask, (mask.size,)), np.int64))
    return lax.max(lax.sub(count, lax.full_like(count, 1)), lax.full_like(count, 0))


@lower(aten.masked_scatter_backward.default)
def masked_scatter_backward(ctx: Context, grad: jax.Array, mask: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """The gradient of ``source``: the elements of ``grad`` where the mask holds, in order, then zeros."""
    size = int(np.prod(sizes))
    mask = lax.reshape(broadcast(mask, grad.shape), (grad.size,))
    if size == 0 or grad.size == 0:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    beyond = lax.full_like(mask, size, np.int64)
    where = lax.select(mask, _rank(mask), beyond)  # a write beyond the end is dropped
    flat = rows(lax.scatter, jnp.zeros((size,), grad.dtype), 0, where, lax.reshape(grad, (grad.size,)))
    return lax.reshape(flat, ctx.result.shape)


@lower(aten.value_selecting_reduction_backward.default)
def value_selecting_reduction_backward(
    ctx: Context, grad: jax.Array, dim: int, indices: jax.Array, sizes: Sequence[int], keepdim: bool
) -> jax.Array:
    if not sizes:
        return grad
    dim %= len(sizes)
    if not keepdim:
        grad, indices = lax.expand_dims(grad, (dim,)), lax.expand_dims(indices, (dim,))
    return scatter_along(lax.scatter, jnp.zeros(ctx.result.shape, grad.dtype), dim, indices, grad)


@lower(aten.gather_backward.default)
def gather_backward(
    ctx: Context, grad: jax.Array, x: jax.Array, dim: int, index: jax.Array, sparse_grad: bool
) -> jax.Array:
    return _scattered(ctx, lax.scatter_add, lax.full_like(x, 0), dim, index, grad)
