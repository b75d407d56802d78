"""Elementwise arithmetic: one table row each, or one formula."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import (
    COMPLEX_TO_FLOAT,
    DEFAULT,
    INT_TO_FLOAT,
    NO_OPMATH,
    apply_elementwise,
    broadcast,
    cast,
    elementwise,
    elementwise_table,
    lower,
    narrowed,
    promoted,
)

aten = torch.ops.aten


def num(value: Any, like: jax.Array | np.dtype) -> np.ndarray:
    """A number in the dtype of ``like`` (an array or a dtype), 0-d: what ``jax.lax`` broadcasts in a binary op."""
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(getattr(like, "dtype", like))


def where(condition: jax.Array, x: Any, y: Any) -> jax.Array:
    """``x`` where ``condition`` holds, else ``y``; one of the two may be a number."""
    if not isinstance(x, jax.Array):
        x = lax.full(condition.shape, num(x, y))
    elif not isinstance(y, jax.Array):
        y = lax.full(condition.shape, num(y, x))
    return lax.select(condition, x, y)


def is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_signed(x: jax.Array) -> bool:
    """Whether ``x`` holds signed integers."""
    return jnp.issubdtype(x.dtype, jnp.signedinteger)


def is_complex(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def is_nan(x: jax.Array) -> jax.Array:
    return lax.ne(x, x)


def true_div(x: jax.Array, y: jax.Array | np.ndarray) -> jax.Array:
    """The correctly rounded quotient; ``y`` may be 0-d.

    XLA divides by a broadcast value as ``x * (1 / y)``, which is not: 49 / 49 would be 0.99999994, and anything over
    3e38 zero. A divisor that depends on the dividend (its NaN, which decides the quotient anyway) is left alone.
    """
    if not is_float(x):
        return lax.div(x, y)
    return lax.div(x, lax.select(is_nan(x), x, jnp.broadcast_to(y, x.shape)))


def sign_bit(x: jax.Array) -> jax.Array:
    """Whether the sign bit of a float is set (-0.0 and negative NaNs have it)."""
    bits = np.dtype(f"int{8 * x.dtype.itemsize}")
    return lax.lt(lax.bitcast_convert_type(x, bits), bits.type(0))


# Odds


@lower(aten.logit.default)
def logit(ctx: Context, x: jax.Array, eps: float | None = None) -> jax.Array:
    (x,), result = promoted(INT_TO_FLOAT, ctx.result.shape, x)
    if eps is not None:
        x = lax.select(lax.gt(x, num(1 - eps, x)), lax.full_like(x, 1 - eps), x)
        x = lax.select(lax.lt(x, num(eps, x)), lax.full_like(x, eps), x)
        x = narrowed(x, result)
    odds = lax.div(x, narrowed(lax.sub(num(1, x), x), result))
    return cast(lax.log(narrowed(odds, result)), result)


# Sums and products


def _scaled(ctx: Context, y: jax.Array, alpha: complex) -> jax.Array:
    """``y * alpha``, with alpha rounded to the result's dtype as torch does."""
    return y if alpha == 1 else lax.mul(y, num(num(alpha, ctx.result.jax_dtype), y))


@lower(aten.add.Tensor, aten.add.Scalar)
def add(ctx: Context, x: Any, y: Any, alpha: complex = 1) -> jax.Array:
    (x, y), result = promoted(DEFAULT, ctx.result.shape, x, y)
    if x.dtype == jnp.bool_:
        return lax.bitwise_or(x, lax.bitwise_and(y, num(bool(alpha), y)))
    return cast(lax.add(ctx.summand(x), ctx.summand(_scaled(ctx, y, alpha))), result)


@lower(aten.sub.Tensor, aten.sub.Scalar)
def sub(ctx: Context, x: Any, y: Any, alpha: complex = 1) -> jax.Array:
    (x, y), result = promoted(DEFAULT, ctx.result.shape, x, y)
    if is_complex(x):  # torch adds the product with -alpha, which makes its own zeros and NaN
        return cast(lax.add(x, lax.mul(y, num(-alpha, y))), result)
    return cast(lax.sub(ctx.summand(x), ctx.summand(_scaled(ctx, y, alpha))), result)


@lower(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: Context, x: Any, y: Any, alpha: complex = 1) -> jax.Array:
    return sub(ctx, y, x, alpha)


@lower(aten.mul.Tensor, aten.mul.Scalar)
def mul(ctx: Context, x: Any, y: Any) -> jax.Array:
    (x, y), result = promoted(DEFAULT, ctx.result.shape, x, y, rounded=False)
    return cast(lax.bitwise_and(x, y) if x.dtype == jnp.bool_ else lax.mul(x, y), result)


@elementwise(aten.addcmul.default, operands=(0, 1, 2))
def addcmul(x: jax.Array, y: jax.Array, z: jax.Array, *, value: complex = 1) -> jax.Array:
    return lax.add(x, lax.mul(y if value == 1 else lax.mul(y, num(value, y)), z))


@lower(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(ctx: Context, start: jax.Array, end: jax.Array, weight: Any) -> jax.Array:
    (start, end, weight), result = promoted(DEFAULT, ctx.result.shape, start, end, weight, rounded=False)
    step = lax.sub(end, start)
    size = lax.abs(weight)
    from_start = lax.add(start, lax.mul(weight, step))
    from_end = lax.sub(end, lax.mul(step, lax.sub(num(1, weight), weight)))
    return cast(lax.select(lax.lt(size, num(0.5, size)), from_start, from_end), result)


# Rounding and sign


def trunc(x: jax.Array) -> jax.Array:
    if not is_float(x):
        return x
    return lax.select(lax.lt(x, num(0, x)), lax.ceil(x), lax.floor(x))


def round_half_even(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN) if is_float(x) else x


@elementwise(aten.round.decimals, operands=(0,))
def round_decimals(x: jax.Array, *, decimals: int) -> jax.Array:
    if not is_float(x) or decimals == 0:
        return round_half_even(x)
    scale = num(10.0 ** abs(decimals), x)
    if decimals < 0:
        return lax.mul(round_half_even(true_div(x, scale)), scale)
    return true_div(round_half_even(lax.mul(x, scale)), scale)


def sign(x: jax.Array) -> jax.Array:
    """-1, 0 or 1; 0 for NaN; of a complex number x/|x|."""
    if x.dtype == jnp.bool_:
        return x
    if is_complex(x):
        size = lax.abs(x)
        unit = lax.div(x, lax.complex(size, lax.full_like(size, 0)))
        return where(lax.eq(size, num(0, size)), 0, unit)
    if not is_float(x):
        return lax.sign(x)
    return where(is_nan(x), 0, where(lax.eq(x, num(0, x)), 0, lax.sign(x)))


def absolute(x: jax.Array) -> jax.Array:
    if is_complex(x):
        return hypot(lax.real(x), lax.imag(x))  # unlike XLA's, infinite where either part is
    return x if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.unsignedinteger) else lax.abs(x)


def copysign(x: jax.Array, y: jax.Array) -> jax.Array:
    size = lax.abs(x)
    return lax.select(sign_bit(y), lax.neg(size), size)


def heaviside(x: jax.Array, at_zero: jax.Array) -> jax.Array:
    zero = num(0, x)
    return lax.select(lax.eq(x, zero), at_zero, lax.convert_element_type(lax.gt(x, zero), x.dtype))


elementwise_table(
    {
        aten.neg.default: lax.neg,
        aten.sign.default: sign,
        aten.sgn.default: sign,
        aten.round.default: round_half_even,
        aten.ceil.default: lambda x: lax.ceil(x) if is_float(x) else x,
        aten.floor.default: lambda x: lax.floor(x) if is_float(x) else x,
        aten.trunc.default: trunc,
        aten.frac.default: lambda x: lax.sub(x, trunc(x)),
        aten.square.default: lambda x: lax.mul(x, x),
        aten.heaviside.default: heaviside,
        aten.positive.default: lambda x: x,
    }
)
elementwise_table({aten.abs.default: absolute}, promote=COMPLEX_TO_FLOAT)
elementwise_table({aten.copysign.Tensor: copysign, aten.copysign.Scalar: copysign}, promote=INT_TO_FLOAT)


# Bounds


def maximum(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.bitwise_or(x, y) if x.dtype == jnp.bool_ else lax.max(x, y)


def minimum(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.bitwise_and(x, y) if x.dtype == jnp.bool_ else lax.min(x, y)


def at_least(x: jax.Array, low: jax.Array) -> jax.Array:
    """``x`` bounded by a number; NaN if either is. Unlike `maximum`, of two zeros it gives ``x``, as torch does."""
    if not is_float(x):
        return maximum(x, low)
    return lax.select(lax.bitwise_or(lax.lt(x, low), is_nan(low)), low, x)


def at_most(x: jax.Array, high: jax.Array) -> jax.Array:
    """As `at_least`, from above."""
    if not is_float(x):
        return minimum(x, high)
    return lax.select(lax.bitwise_or(lax.gt(x, high), is_nan(high)), high, x)


def fmax(x: jax.Array, y: jax.Array) -> jax.Array:
    larger = maximum(x, y)
    return lax.select(is_nan(x), y, lax.select(is_nan(y), x, larger)) if is_float(x) else larger


def fmin(x: jax.Array, y: jax.Array) -> jax.Array:
    smaller = minimum(x, y)
    return lax.select(is_nan(x), y, lax.select(is_nan(y), x, smaller)) if is_float(x) else smaller


elementwise_table(
    {
        aten.maximum.default: maximum,
        aten.minimum.default: minimum,
        aten.fmax.default: fmax,
        aten.fmin.default: fmin,
        aten.clamp_min.default: at_least,
        aten.clamp_min.Tensor: maximum,
        aten.clamp_max.default: at_most,
        aten.clamp_max.Tensor: minimum,
    },
    promote=NO_OPMATH,
)


@lower(aten.clamp.default, aten.clamp.Tensor)
def clamp(ctx: Context, x: jax.Array, min: Any = None, max: Any = None) -> jax.Array:
    def formula(x: jax.Array, *bounds: jax.Array) -> jax.Array:
        remaining = iter(bounds)
        x = at_least(x, next(remaining)) if min is not None else x
        return at_most(x, next(remaining)) if max is not None else x

    return apply_elementwise(formula, NO_OPMATH, None, ctx, x, *(b for b in (min, max) if b is not None))


@lower(aten.nan_to_num.default)
def nan_to_num(
    ctx: Context, x: jax.Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> jax.Array:
    if is_complex(x):
        parts = (nan_to_num(ctx, part, nan, posinf, neginf) for part in (lax.real(x), lax.imag(x)))
        return lax.complex(*parts)
    if not is_float(x):
        return x
    limits = jnp.finfo(x.dtype)
    infinity = num(np.inf, x)
    out = where(is_nan(x), 0 if nan is None else nan, x)
    out = where(lax.eq(x, infinity), limits.max if posinf is None else posinf, out)
    return where(lax.eq(x, -infinity), limits.min if neginf is None else neginf, out)


# Logarithms of sums, and products with logarithms


def hypot(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = lax.abs(x), lax.abs(y)
    large, small = lax.max(x, y), lax.min(x, y)
    ratio = lax.div(small, where(lax.eq(large, num(0, x)), 1, large))
    out = lax.mul(large, lax.sqrt(lax.add(num(1, x), lax.mul(ratio, ratio))))
    infinity = num(np.inf, x)
    return where(lax.bitwise_or(lax.eq(x, infinity), lax.eq(y, infinity)), np.inf, out)


def xlogy(x: jax.Array, y: jax.Array) -> jax.Array:
    product = lax.mul(x, lax.log(y))
    return where(is_nan(y), np.nan, where(lax.eq(x, num(0, x)), 0, product))


def log_add_exp(x: jax.Array, y: jax.Array) -> jax.Array:
    if is_complex(x):
        larger = lax.select(lax.ge(lax.real(x), lax.real(y)), x, y)
        smaller = lax.select(lax.ge(lax.real(x), lax.real(y)), y, x)
        total = lax.add(larger, lax.log1p(lax.exp(lax.sub(smaller, larger))))
    else:
        larger = lax.max(x, y)
        total = lax.add(larger, lax.log1p(lax.exp(lax.neg(lax.abs(lax.sub(x, y))))))
    infinite = lax.eq(lax.abs(lax.real(x) if is_complex(x) else x), num(np.inf, lax.real(x) if is_complex(x) else x))
    return lax.select(lax.bitwise_and(lax.eq(x, y), infinite), x, total)


def log_add_exp2(x: jax.Array, y: jax.Array) -> jax.Array:
    ln2 = num(math.log(2), x)
    total = lax.div(log_add_exp(lax.mul(x, ln2), lax.mul(y, ln2)), ln2)
    if is_complex(x):
        return total
    infinite = lax.eq(lax.abs(x), num(np.inf, x))
    return lax.select(lax.bitwise_and(lax.eq(x, y), infinite), x, total)


elementwise_table(
    {aten.hypot.default: hypot, aten.logaddexp.default: log_add_exp, aten.logaddexp2.default: log_add_exp2}
)
elementwise_table(
    {aten.xlogy.Tensor: xlogy, aten.xlogy.Scalar_Self: xlogy, aten.xlogy.Scalar_Other: xlogy}, promote=INT_TO_FLOAT
)


# Selection, conversion, filling


@elementwise(
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.where.Scalar,
    operands=(1, 2),
    promote=NO_OPMATH,
)
def where_(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.select(broadcast(cast(condition, torch.bool), x.shape), x, y)


@lower(aten._to_copy.default)
def to_copy(ctx: Context, x: jax.Array, **_: Any) -> jax.Array:
    return cast(x, ctx.result.dtype)


@lower(aten.fill.Scalar, aten.fill.Tensor)
def fill(ctx: Context, x: jax.Array, value: Any) -> jax.Array:
    return broadcast(cast(value, ctx.result.dtype), ctx.result.shape)


@lower(aten.zero.default)
def zero(ctx: Context, x: jax.Array) -> jax.Array:
    return lax.full_like(x, 0)
