"""Reductions along dimensions: sums, products, extrema and where they are, truth, moments, norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context, Spec
from portable.lowering.elementwise import is_complex, is_float, is_nan, num, true_div, where
from portable.lowering.registry import cast, lower

aten = torch.ops.aten


def axes(ndim: int, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """The reduced axes, non-negative and sorted; all of them for None or an empty list."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(sorted({d % ndim for d in dims})) if ndim else ()


def size(x: jax.Array, reduced: Sequence[int]) -> int:
    """How many elements of ``x`` make one element of the result."""
    return math.prod(x.shape[d] for d in reduced)


def widened(x: jax.Array) -> jax.Array:
    """``x`` in the dtype that torch accumulates in: half precision in float32."""
    return cast(x, torch.float32) if x.dtype.itemsize == 2 and is_float(x) else x


def finish(x: jax.Array, spec: Spec) -> jax.Array:
    """A reduced value as torch's result: its dtype, and its kept dimensions."""
    return lax.reshape(cast(x, spec.dtype), spec.shape)


def keep_axes(x: jax.Array, like: jax.Array, reduced: Sequence[int]) -> jax.Array:
    """A value reduced over ``reduced``, broadcast again to the shape of ``like``."""
    kept = tuple(d for d in range(like.ndim) if d not in reduced)
    return lax.broadcast_in_dim(x, like.shape, kept)


# Sums, products, means


@lower(aten.sum.default, aten.sum.dim_IntList)
def sum_(ctx: Context, x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    x = widened(cast(x, ctx.result.dtype))
    total = lax.reduce_or if x.dtype == np.bool_ else lax.reduce_sum
    return finish(total(x, axes(x.ndim, dim)), ctx.result)


@lower(aten.nansum.default)
def nansum(ctx: Context, x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    x = where(is_nan(x), 0, x) if is_float(x) or is_complex(x) else x
    return sum_(ctx, x, dim)


@lower(aten.prod.default, aten.prod.dim_int)
def prod(ctx: Context, x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    x = widened(cast(x, ctx.result.dtype))
    product = lax.reduce_and if x.dtype == np.bool_ else lax.reduce_prod
    return finish(product(x, axes(x.ndim, dim)), ctx.result)


@lower(aten.mean.default, aten.mean.dim)
def mean(ctx: Context, x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    reduced = axes(x.ndim, dim)
    total = lax.reduce_sum(widened(cast(x, ctx.result.dtype)), reduced)
    return finish(true_div(total, lax.full_like(total, size(x, reduced))), ctx.result)


# Truth


@lower(aten.any.default, aten.any.dim, aten.any.dims)
def any_(ctx: Context, x: jax.Array, dim: Any = None, keepdim: bool = False) -> jax.Array:
    return finish(lax.reduce_or(cast(x, torch.bool), _listed_axes(x, dim)), ctx.result)


@lower(aten.all.default, aten.all.dim, aten.all.dims)
def all_(ctx: Context, x: jax.Array, dim: Any = None, keepdim: bool = False) -> jax.Array:
    return finish(lax.reduce_and(cast(x, torch.bool), _listed_axes(x, dim)), ctx.result)


def _listed_axes(x: jax.Array, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """As `axes`, but an empty list reduces nothing."""
    return () if isinstance(dim, (list, tuple)) and not dim else axes(x.ndim, dim)


@lower(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(ctx: Context, x: jax.Array, dim: Any = None) -> jax.Array:
    return finish(lax.reduce_sum(cast(cast(x, torch.bool), torch.int64), axes(x.ndim, dim)), ctx.result)


# Extrema


def reduce_max(x: jax.Array, reduced: Sequence[int]) -> jax.Array:
    return lax.reduce_or(x, reduced) if x.dtype == jnp.bool_ else lax.reduce_max(x, reduced)


def reduce_min(x: jax.Array, reduced: Sequence[int]) -> jax.Array:
    return lax.reduce_and(x, reduced) if x.dtype == jnp.bool_ else lax.reduce_min(x, reduced)


@lower(aten.amax.default)
def amax(ctx: Context, x: jax.Array, dim: Any = (), keepdim: bool = False) -> jax.Array:
    return finish(reduce_max(x, axes(x.ndim, dim)), ctx.result)


@lower(aten.amin.default)
def amin(ctx: Context, x: jax.Array, dim: Any = (), keepdim: bool = False) -> jax.Array:
    return finish(reduce_min(x, axes(x.ndim, dim)), ctx.result)


@lower(aten.max.default)
def max_all(ctx: Context, x: jax.Array) -> jax.Array:
    if not x.size:
        ctx.refuse("an empty tensor has no maximum: torch raises")
    return amax(ctx, x)


@lower(aten.min.default)
def min_all(ctx: Context, x: jax.Array) -> jax.Array:
    if not x.size:
        ctx.refuse("an empty tensor has no minimum: torch raises")
    return amin(ctx, x)


@lower(aten.aminmax.default)
def aminmax(
    ctx: Context, x: jax.Array, *, dim: int | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    reduced = axes(x.ndim, dim)
    return finish(reduce_min(x, reduced), ctx.result[0]), finish(reduce_max(x, reduced), ctx.result[1])


def first_index(choose: Callable[..., jax.Array], x: jax.Array, dim: int | None) -> jax.Array:
    """The index of the first extremum along ``dim`` (None: of the flattened array); a NaN is the extremum."""
    x = cast(x, torch.int8) if x.dtype == jnp.bool_ else x
    if dim is None or x.ndim == 0:
        x, dim = lax.reshape(x, (x.size,)), 0
    return choose(x, dim % x.ndim, np.int64)


@lower(aten.argmax.default)
def argmax(ctx: Context, x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    return lax.reshape(first_index(lax.argmax, x, dim), ctx.result.shape)


@lower(aten.argmin.default)
def argmin(ctx: Context, x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    return lax.reshape(first_index(lax.argmin, x, dim), ctx.result.shape)


@lower(aten.max.dim)
def max_dim(ctx: Context, x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    index = lax.reshape(first_index(lax.argmax, x, dim), ctx.result[1].shape)
    return finish(reduce_max(x, axes(x.ndim, dim)), ctx.result[0]), index


@lower(aten.min.dim)
def min_dim(ctx: Context, x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    index = lax.reshape(first_index(lax.argmin, x, dim), ctx.result[1].shape)
    return finish(reduce_min(x, axes(x.ndim, dim)), ctx.result[0]), index


# Moments


def moments(x: jax.Array, reduced: Sequence[int], correction: float) -> tuple[jax.Array, jax.Array]:
    """(variance, mean) over ``reduced``, in two passes; NaN or inf where no degree of freedom is left, as torch."""
    count = size(x, reduced)
    total = lax.reduce_sum(x, reduced)
    average = lax.div(total, num(count, total))
    centred = lax.sub(x, keep_axes(average, x, reduced))
    if is_complex(x):
        squares = lax.add(lax.square(lax.real(centred)), lax.square(lax.imag(centred)))
    else:
        squares = lax.square(centred)
    spread = lax.reduce_sum(squares, reduced)
    return lax.div(spread, num(max(count - correction, 0), spread)), average


def _moments(x: jax.Array, dim: Any, correction: float | None) -> tuple[jax.Array, jax.Array]:
    return moments(widened(x), axes(x.ndim, dim), 1 if correction is None else correction)


def _moments_or_nan(x: jax.Array, dim: Any, correction: float | None) -> tuple[jax.Array, jax.Array]:
    """As `_moments`; the mean of what contains an infinity is NaN, as torch's one-pass mean is."""
    variance, average = _moments(x, dim, correction)
    if is_complex(x):
        return variance, average
    reduced = axes(x.ndim, dim)
    infinite = lax.reduce_or(lax.bitwise_not(lax.is_finite(x)), reduced)
    return variance, where(infinite, math.nan, average)


@lower(aten.var.correction)
def var(ctx: Context, x: jax.Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> jax.Array:
    return finish(_moments(x, dim, correction)[0], ctx.result)


@lower(aten.std.correction)
def std(ctx: Context, x: jax.Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> jax.Array:
    return finish(lax.sqrt(_moments(x, dim, correction)[0]), ctx.result)


@lower(aten.var_mean.correction)
def var_mean(
    ctx: Context, x: jax.Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    variance, average = _moments_or_nan(x, dim, correction)
    return finish(variance, ctx.result[0]), finish(average, ctx.result[1])


@lower(aten.std_mean.correction)
def std_mean(
    ctx: Context, x: jax.Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    variance, average = _moments_or_nan(x, dim, correction)
    return finish(lax.sqrt(variance), ctx.result[0]), finish(average, ctx.result[1])


# Norms


def vector_norm(x: jax.Array, order: float, reduced: Sequence[int]) -> jax.Array:
    """The ``order``-norm over ``reduced``, without rescaling: it overflows where torch's does."""
    size_ = lax.abs(x)
    if order == 0:
        return lax.reduce_sum(lax.convert_element_type(lax.ne(size_, num(0, size_)), size_.dtype), reduced)
    if order == math.inf:
        return _extremum_or_zero(lax.reduce_max, size_, reduced)
    if order == -math.inf:
        return _extremum_or_zero(lax.reduce_min, size_, reduced)
    if order == 1:
        return lax.reduce_sum(size_, reduced)
    if order == 2:
        return lax.sqrt(lax.reduce_sum(lax.square(size_), reduced))
    total = lax.reduce_sum(lax.pow(size_, lax.full_like(size_, order)), reduced)
    return lax.pow(total, lax.full_like(total, 1 / order))


def _extremum_or_zero(reduce: Callable[..., jax.Array], x: jax.Array, reduced: Sequence[int]) -> jax.Array:
    if size(x, reduced):
        return reduce(x, reduced)
    return jnp.zeros(tuple(n for d, n in enumerate(x.shape) if d not in reduced), x.dtype)


@lower(aten.linalg_vector_norm.default)
def linalg_vector_norm(
    ctx: Context, x: jax.Array, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> jax.Array:
    x = widened(x if dtype is None else cast(x, dtype))
    return finish(vector_norm(x, ord, axes(x.ndim, dim)), ctx.result)


@lower(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype)
def norm(
    ctx: Context, x: jax.Array, p: float | None = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> jax.Array:
    return linalg_vector_norm(ctx, x, 2 if p is None else p, dim, dtype=dtype)


@lower(aten.dist.default)
def dist(ctx: Context, x: jax.Array, y: jax.Array, p: float = 2) -> jax.Array:
    return ctx.torch(lambda x, y: torch.linalg.vector_norm(x - y, ord=p), x, y)


@lower(aten.trace.default)
def trace(ctx: Context, x: jax.Array) -> jax.Array:
    x = widened(cast(x, ctx.result.dtype))
    rows, columns = (lax.broadcasted_iota(np.int32, x.shape, d) for d in (0, 1))
    return finish(lax.reduce_sum(where(lax.eq(rows, columns), x, 0), (0, 1)), ctx.result)
