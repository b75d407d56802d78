"""Order: sort, top k, order statistics, binary search.

NaN is larger than every number, as torch has it. A sort is stable. topk and kthvalue take of equal elements those that
torch's CPU kernels take: where there are any, the sequential algorithm is done step by step (introselect.py).

To do so for a whole sort would be too slow. torch leaves open where an unstable sort of more than 16 elements puts
equal ones; where they are to be expected (integers of up to 16 bits, half precision) and the index is read, it is
refused.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable import dtypes
from portable.lowering import introselect
from portable.lowering.context import Context
from portable.lowering.gather import gather_along
from portable.lowering.registry import NO_OPMATH, broadcast, cast, described, lower

aten = torch.ops.aten


def ordered(x: jax.Array, dim: int, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    """``x`` sorted stably along ``dim``, and the int64 indices. A descending order is an ascending one of the reversed
    tensor, reversed: equal elements keep their order and no key needs to be negated."""
    kind = x.dtype
    if kind == np.bool_:
        x = lax.convert_element_type(x, np.uint8)
    index = lax.broadcasted_iota(np.int64, x.shape, dim)
    if descending:
        x, index = lax.rev(x, (dim,)), lax.rev(index, (dim,))
    values, index = lax.sort((x, index), dimension=dim, is_stable=True, num_keys=1)
    if descending:
        values, index = lax.rev(values, (dim,)), lax.rev(index, (dim,))
    return (lax.convert_element_type(values, np.bool_) if kind == np.bool_ else values), index


SMALL_SORT = 16


def coarse(x: jax.Array) -> bool:
    """Whether equal elements are to be expected: half precision, or integers of up to 16 bits."""
    return x.dtype.itemsize <= 2


def refuse_ties(ctx: Context, remedy: str) -> None:
    """Refuse, if the index is read, a case in which torch's order of equal elements cannot be reproduced."""
    if ctx.uses(1):
        ctx.refuse(
            f"torch leaves open which of equal elements comes first, and its choice cannot be reproduced: {remedy}"
        )


@lower(aten.sort.default)
def sort(ctx: Context, x: jax.Array, dim: int = -1, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    return sort_stable(ctx, x, stable=False, dim=dim, descending=descending)


@lower(aten.sort.stable)
def sort_stable(
    ctx: Context, x: jax.Array, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    if not stable and x.shape[dim] > SMALL_SORT and coarse(x):
        refuse_ties(ctx, "pass stable=True")
    return ordered(x, dim % x.ndim, descending)


def _top_key(x: jax.Array, largest: bool) -> jax.Array:
    """A key whose largest elements, in XLA's total order of floats, are those that torch picks: one zero, one NaN."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        if x.dtype == np.bool_:
            x = lax.convert_element_type(x, np.int32)
        return x if largest else lax.bitwise_not(x)
    if x.dtype.itemsize < 4:
        x = lax.convert_element_type(x, np.float32)
    zero = lax.full_like(x, 0)
    key = lax.select(lax.eq(x, zero), zero, x if largest else lax.neg(x))
    nan = np.asarray(np.nan, x.dtype)
    nan = nan if largest else np.copysign(nan, np.asarray(-1, x.dtype))
    return lax.select(lax.ne(x, x), broadcast(jnp.asarray(nan), x.shape), key)


@lower(aten.topk.default)
def topk(
    ctx: Context, x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return lax.reshape(x, ctx.result[0].shape), jnp.zeros(ctx.result[1].shape, np.int64)
    dim %= x.ndim
    if 0 in ctx.result[0].shape:
        return jnp.zeros(ctx.result[0].shape, x.dtype), jnp.zeros(ctx.result[1].shape, np.int64)
    last = x.ndim - 1
    order = [d for d in range(x.ndim) if d != dim] + [dim]
    moved = lax.transpose(x, order)
    key = integer_key(_top_key(moved, largest))
    best, index = lax.top_k(key, min(k + 1, x.shape[dim]))
    index = lax.slice_in_dim(index, 0, k, 1, last)
    if ctx.uses(1):  # the values are the same, whichever of equal elements is taken
        index = lax.cond(
            _repeats(best),
            lambda key: introselect.by_slice(lambda one: introselect.top(one, k, sorted), key),
            lambda key: lax.convert_element_type(index, np.int32),
            key,
        )
    index = lax.convert_element_type(index, np.int64)
    back = np.argsort(order).tolist()
    return lax.transpose(gather_along(moved, last, index), back), lax.transpose(index, back)


def integer_key(x: jax.Array) -> jax.Array:
    """An integer of the same order as ``x``, where NaN is the largest and there is one zero (see `_top_key`)."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    kind = np.dtype(f"int{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, kind)
    negative = lax.bitwise_xor(bits, lax.full_like(bits, np.iinfo(kind).max))
    return lax.select(lax.lt(bits, lax.full_like(bits, 0)), negative, bits)


def _repeats(ordered: jax.Array) -> jax.Array:
    """Whether any slice of keys in order holds an element twice."""
    last, n = ordered.ndim - 1, ordered.shape[-1]
    same = lax.eq(lax.slice_in_dim(ordered, 1, n, 1, last), lax.slice_in_dim(ordered, 0, n - 1, 1, last))
    return lax.reduce_or(same, tuple(range(same.ndim)))


def _at(x: jax.Array, dim: int, position: jax.Array | int) -> jax.Array:
    """The elements at ``position`` along ``dim`` (an int, or an array with dim 1 there), with dim 1 kept."""
    if isinstance(position, int):
        return lax.slice_in_dim(x, position, position + 1, 1, dim)
    return gather_along(x, dim, position)


def _order_statistic(
    ctx: Context, x: jax.Array, dim: int, position: jax.Array | int, pair: tuple[jax.Array, jax.Array] | None = None
) -> tuple[jax.Array, jax.Array]:
    values, index = pair or ordered(x, dim)
    shape = ctx.result[0].shape
    return lax.reshape(_at(values, dim, position), shape), lax.reshape(_at(index, dim, position), shape)


@lower(aten.kthvalue.default)
def kthvalue(ctx: Context, x: jax.Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    dim %= x.ndim
    values, index = ordered(x, dim)
    if ctx.uses(1) and x.shape[dim] > 1:
        order = [d for d in range(x.ndim) if d != dim] + [dim]
        key = integer_key(_top_key(lax.transpose(x, order), True))
        near = lax.transpose(lax.slice_in_dim(values, max(k - 2, 0), min(k + 1, x.shape[dim]), 1, dim), order)

        def among_equals(key: jax.Array) -> jax.Array:
            found = introselect.by_slice(lambda one: introselect.quick_select(one, k - 1)[k - 1 : k], key)
            return lax.transpose(lax.convert_element_type(found, np.int64), np.argsort(order).tolist())

        plain = lax.slice_in_dim(index, k - 1, k, 1, dim)
        place = lax.cond(_repeats(integer_key(_top_key(near, True))), among_equals, lambda _: plain, key)
        return lax.reshape(gather_along(x, dim, place), ctx.result[0].shape), lax.reshape(place, ctx.result[1].shape)
    return _order_statistic(ctx, x, dim, k - 1, (values, index))


def _nan_count(x: jax.Array, dim: int) -> jax.Array:
    """How many NaN along ``dim``, which stays with size 1; int64."""
    nan = lax.ne(x, x) if jnp.issubdtype(x.dtype, jnp.inexact) else lax.full_like(x, False, np.bool_)
    return lax.expand_dims(lax.reduce_sum(lax.convert_element_type(nan, np.int64), (dim,)), (dim,))


def _median_position(x: jax.Array, dim: int, ignore_nan: bool) -> jax.Array:
    """The lower median's position in ascending order; NaN sort last, so that the first of them lies at n - count."""
    n = x.shape[dim]
    nans = _nan_count(x, dim)
    if ignore_nan:
        rest = lax.sub(lax.full_like(nans, n - 1), nans)
        return lax.max(lax.div(rest, lax.full_like(nans, 2)), lax.full_like(nans, 0))
    zero = lax.full_like(nans, 0)
    return lax.select(lax.gt(nans, zero), lax.sub(lax.full_like(nans, n), nans), lax.full_like(nans, (n - 1) // 2))


def _median_dim(ctx: Context, x: jax.Array, dim: int, ignore_nan: bool) -> tuple[jax.Array, ...]:
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    dim %= x.ndim
    if x.size == 0:
        return tuple(jnp.zeros(r.shape, r.jax_dtype) for r in ctx.result)
    return _order_statistic(ctx, x, dim, _median_position(x, dim, ignore_nan))


@lower(aten.median.dim)
def median_dim(ctx: Context, x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, ...]:
    return _median_dim(ctx, x, dim, False)


@lower(aten.nanmedian.dim)
def nanmedian_dim(ctx: Context, x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, ...]:
    return _median_dim(ctx, x, dim, True)


def _median(ctx: Context, x: jax.Array, ignore_nan: bool) -> jax.Array:
    if x.size == 0:
        return cast(math.nan, ctx.result.dtype)
    flat = lax.reshape(x, (x.size,))
    values, _ = ordered(flat, 0)
    return lax.reshape(_at(values, 0, _median_position(flat, 0, ignore_nan)), ())


@lower(aten.median.default)
def median(ctx: Context, x: jax.Array) -> jax.Array:
    return _median(ctx, x, False)


@lower(aten.nanmedian.default)
def nanmedian(ctx: Context, x: jax.Array) -> jax.Array:
    return _median(ctx, x, True)


def _inserted(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """``x`` (at most `SMALL_SORT` elements along ``dim``) as libstdc++'s insertion sort leaves it, and the indices.

    Its comparison is ``<``, which knows no place for NaN: an element that is not less than the one before it stays,
    and one that is less than the first goes to the front past whatever lies between.
    """
    values = jnp.moveaxis(x, dim, -1)
    index = lax.broadcasted_iota(np.int64, values.shape, values.ndim - 1)
    for i in range(1, x.shape[dim]):
        value, before = values[..., i : i + 1], values[..., :i]
        less = lax.lt(broadcast(value, before.shape), before)
        moves = lax.cumprod(less.astype(np.int32), values.ndim - 1, reverse=True) > 0
        moves = moves | less[..., :1]
        place = i - jnp.sum(moves, -1, keepdims=True)
        at = lax.broadcasted_iota(np.int64, values.shape, values.ndim - 1)
        source = jnp.where(at == place, i, jnp.where((at > place) & (at <= i), at - 1, at))
        values, index = (gather_along(v, values.ndim - 1, source) for v in (values, index))
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(index, -1, dim)


@lower(aten.mode.default)
def mode(ctx: Context, x: jax.Array, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, ...]:
    """The smallest of the most frequent values, and the last index where it occurs.

    In sorted order, the length of the run that ends at each position is that position minus the start of the run.
    """
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    dim %= x.ndim
    if x.size == 0:
        return tuple(jnp.zeros(r.shape, r.jax_dtype) for r in ctx.result)
    n = x.shape[dim]
    if n > SMALL_SORT:
        refuse_ties(ctx, "sort with stable=True")
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    values, index = _inserted(x, dim) if floats and n <= SMALL_SORT else ordered(x, dim)
    position = lax.broadcasted_iota(np.int64, x.shape, dim)
    first = lax.slice_in_dim(position, 0, 1, 1, dim)
    later = lax.ne(lax.slice_in_dim(values, 1, n, 1, dim), lax.slice_in_dim(values, 0, n - 1, 1, dim))
    starts = lax.select(later, lax.slice_in_dim(position, 1, n, 1, dim), lax.full_like(position, 0, shape=later.shape))
    starts = lax.cummax(lax.concatenate([first, starts], dim), dim)
    run = lax.sub(position, starts)
    best = lax.argmax(run, dim, np.int64)  # the first of the longest runs: the smallest value
    return _order_statistic(ctx, x, dim, lax.expand_dims(best, (dim,)), (values, index))


def search(boundaries: jax.Array, values: jax.Array, right: bool, sorter: jax.Array | None = None) -> jax.Array:
    """Binary search along the last dim of ``boundaries`` (same leading dims as ``values``), as int64.

    The position of the first boundary that is >= the value (> with ``right``); the comparison is negated, so that a NaN
    value goes to the end, as in torch.
    """
    n, last = boundaries.shape[-1], boundaries.ndim - 1
    low, high = lax.full_like(values, 0, np.int64), lax.full_like(values, n, np.int64)
    if n == 0:
        return low

    def narrow(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = lax.div(lax.add(low, high), lax.full_like(low, 2))
        at = lax.min(middle, lax.full_like(low, n - 1))
        if sorter is not None:
            at = gather_along(sorter, last, at)
        found = gather_along(boundaries, last, at)
        reached = lax.gt(found, values) if right else lax.ge(found, values)
        open_ = lax.lt(low, high)
        up = lax.bitwise_and(open_, lax.bitwise_not(reached))
        down = lax.bitwise_and(open_, reached)
        return lax.select(up, lax.add(middle, lax.full_like(low, 1)), low), lax.select(down, middle, high)

    low, _ = lax.fori_loop(0, n.bit_length(), narrow, (low, high))
    return low


def _searched(
    ctx: Context, boundaries: jax.Array, values: Any, right: bool, sorter: jax.Array | None = None
) -> jax.Array:
    common = dtypes.promote(NO_OPMATH, (described(boundaries), described(values)))[0]
    boundaries, values = cast(boundaries, common), cast(values, common)
    if common is torch.bool:
        boundaries, values = (lax.convert_element_type(v, np.uint8) for v in (boundaries, values))
    if 0 in ctx.result.shape:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    if boundaries.ndim == 1:
        values = lax.reshape(values, (values.size,))
    return cast(lax.reshape(search(boundaries, values, right, sorter), ctx.result.shape), ctx.result.dtype)


@lower(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    ctx: Context,
    boundaries: jax.Array,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    return _searched(ctx, boundaries, values, right or side == "right", sorter)


@lower(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(
    ctx: Context, values: Any, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False
) -> jax.Array:
    return _searched(ctx, boundaries, values, right)
