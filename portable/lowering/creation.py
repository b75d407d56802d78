"""Tensors from numbers: constant fills, ranges, triangles, identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable import dtypes
from portable.lowering.context import Context, Spec
from portable.lowering.elementwise import true_div
from portable.lowering.registry import TracedScalar, broadcast, cast, lower

aten, prims = torch.ops.aten, torch.ops.prims


def filled(result: Spec, value: Any) -> jax.Array:
    """``value`` (a number or 0-d array) everywhere."""
    return broadcast(cast(value, result.dtype), result.shape)


@lower(
    aten.full.default,
    aten.full_like.default,
    prims.full.default,
    prims.full_like.default,
    prims.fill.default,
)
def full(ctx: Context, _: Any, fill_value: Any, **__: Any) -> jax.Array:
    return filled(ctx.result, fill_value)


@lower(aten.new_full.default)
def new_full(ctx: Context, _: Any, size: Sequence[int], fill_value: Any, **__: Any) -> jax.Array:
    return filled(ctx.result, fill_value)


@lower(aten.scalar_tensor.default, prims.scalar_tensor.default)
def scalar_tensor(ctx: Context, s: Any, **_: Any) -> jax.Array:
    return filled(ctx.result, s)


@lower(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten._efficientzerotensor.default,
    aten._new_zeros_with_same_feature_meta.default,
)
def zeros(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    return filled(ctx.result, 0)


@lower(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    return filled(ctx.result, 1)


@lower(
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    prims.empty.default,
    prims.empty_permuted.default,
    prims.empty_strided.default,
)
def empty(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    """Uninitialised in torch; zeros here, since a program must answer the same each time."""
    return filled(ctx.result, 0)


@lower(aten.resize.default, aten.resize_as.default)
def resize(ctx: Context, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """The first elements in storage order; what torch leaves uninitialised is zero here."""
    strides = ctx.strides[0] if ctx.strides else None
    if x.size > 1 and strides != _row_major(x.shape):
        ctx.refuse("resize of a tensor that is not row-major depends on its storage")
    flat = lax.reshape(x, (x.size,))
    count = int(np.prod(ctx.result.shape))
    flat = lax.pad(flat, np.zeros((), x.dtype), [(0, count - x.size, 0)])
    return lax.reshape(flat, ctx.result.shape)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(np.prod([max(n, 1) for n in shape[i + 1 :]])) for i in range(len(shape)))


@lower(aten.copy.default)
def copy(ctx: Context, _: jax.Array, source: jax.Array, *__: Any) -> jax.Array:
    return broadcast(cast(source, ctx.result.dtype), ctx.result.shape)


def steps(ctx: Context, start: Any, step: Any, length: int) -> jax.Array:
    """``start + i * step``: in int64 for integers, else in float64 and rounded once (torch accumulates in double)."""
    integral = not ctx.result.dtype.is_floating_point and not ctx.result.dtype.is_complex
    kind, number = (np.int64, int) if integral else (np.float64, float)
    index = lax.iota(kind, length)
    if (number(start), number(step)) != (0, 1):
        index = lax.add(lax.mul(index, jnp.asarray(number(step), kind)), jnp.asarray(number(start), kind))
    return cast(index, ctx.result.dtype)


@lower(aten.arange.default)
def arange(ctx: Context, end: Any, **_: Any) -> jax.Array:
    return steps(ctx, 0, 1, ctx.result.shape[0])


@lower(aten.arange.start, aten.arange.start_step, aten.range.default, aten.range.step)
def arange_start(ctx: Context, start: Any, end: Any, step: Any = 1, **_: Any) -> jax.Array:
    if any(isinstance(v, TracedScalar) for v in (start, end, step)):
        ctx.refuse("the bounds depend on the data")
    return steps(ctx, start, step, ctx.result.shape[0])


@lower(prims.iota.default)
def iota(ctx: Context, length: int, *, start: int, step: int, **_: Any) -> jax.Array:
    return steps(ctx, start, step, length)


def spaced(start: Any, end: Any, count: int, dtype: torch.dtype, wide: torch.dtype | None = None) -> jax.Array:
    """``count`` equal steps as torch's CPU kernel takes them: from the start up to the middle, from the end after it.

    The step is computed in ``wide``: by default double for integers, else the result's own type.
    """
    wide = wide or (dtype if dtype.is_floating_point or dtype.is_complex else torch.float64)
    low, high = (lax.reshape(cast(cast(v, dtype), wide), ()) for v in (start, end))
    if count == 1:
        return lax.reshape(low, (1,))
    kind = low.dtype
    step = true_div(lax.sub(high, low), jnp.asarray(count - 1, kind))
    index = lax.iota(np.int64, count)
    up = lax.convert_element_type(index, kind)
    down = lax.convert_element_type(lax.sub(lax.full_like(index, count - 1), index), kind)
    rising = lax.add(broadcast(low, (count,)), lax.mul(broadcast(step, (count,)), up))
    falling = lax.sub(broadcast(high, (count,)), lax.mul(broadcast(step, (count,)), down))
    return lax.select(lax.lt(index, lax.full_like(index, count // 2)), rising, falling)


@lower(aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor)
def linspace(ctx: Context, start: Any, end: Any, steps: int, **_: Any) -> jax.Array:
    if steps == 0:
        return filled(ctx.result, 0)
    return cast(spaced(start, end, steps, ctx.result.dtype), ctx.result.dtype)


@lower(aten.logspace.default, aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor)
def logspace(ctx: Context, start: Any, end: Any, steps: int, base: float = 10.0, **_: Any) -> jax.Array:
    if steps == 0:
        return filled(ctx.result, 0)
    dtype = ctx.result.dtype
    if steps == 1 and dtype.is_floating_point:
        exponent = lax.reshape(cast(start, torch.float64), (1,))  # not rounded first
    else:
        exponent = spaced(
            start, end, steps, dtype, torch.float32 if dtype.itemsize < 4 and dtype.is_floating_point else None
        )
    wide = exponent.dtype if dtypes.to_torch(exponent.dtype).is_complex else np.float64
    exponent = lax.convert_element_type(exponent, wide)
    return cast(lax.pow(jnp.full((steps,), base, wide), exponent), ctx.result.dtype)


@lower(aten.eye.default, aten.eye.m)
def eye(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    return cast(_below(ctx.result.shape, 0, lax.eq), ctx.result.dtype)


def _below(shape: Sequence[int], diagonal: int, compare: Any) -> jax.Array:
    """Where column - row compares so with ``diagonal``, over the last two dims."""
    rows = lax.broadcasted_iota(np.int64, shape[-2:], 0)
    columns = lax.broadcasted_iota(np.int64, shape[-2:], 1)
    return broadcast(compare(lax.sub(columns, rows), lax.full_like(rows, diagonal)), tuple(shape))


@lower(aten.tril.default)
def tril(ctx: Context, x: jax.Array, diagonal: int = 0) -> jax.Array:
    return lax.select(_below(x.shape, diagonal, lax.le), x, lax.full_like(x, 0))


@lower(aten.triu.default)
def triu(ctx: Context, x: jax.Array, diagonal: int = 0) -> jax.Array:
    return lax.select(_below(x.shape, diagonal, lax.ge), x, lax.full_like(x, 0))


@lower(aten.tril_indices.default)
def tril_indices(ctx: Context, row: int, col: int, offset: int = 0, **_: Any) -> jax.Array:
    return cast(np.stack(np.tril_indices(row, offset, col)), ctx.result.dtype)


@lower(aten.triu_indices.default)
def triu_indices(ctx: Context, row: int, col: int, offset: int = 0, **_: Any) -> jax.Array:
    return cast(np.stack(np.triu_indices(row, offset, col)), ctx.result.dtype)
