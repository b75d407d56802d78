"""Special functions: error function, gamma family, exponentially scaled forms, float representation, complex parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.scipy import special as scipy_special

from portable.lowering.context import Context
from portable.lowering.elementwise import is_complex, is_float, is_nan, num, where
from portable.lowering.registry import (
    INT_TO_FLOAT,
    NO_OPMATH,
    cast,
    elementwise,
    elementwise_table,
    lower,
)

aten = torch.ops.aten

SQRT_HALF = math.sqrt(0.5)
ONE_OVER_SQRT_PI = 1 / math.sqrt(math.pi)


def is_finite(x: jax.Array) -> jax.Array:
    if is_complex(x):
        return lax.bitwise_and(is_finite(lax.real(x)), is_finite(lax.imag(x)))
    return lax.is_finite(x) if is_float(x) else lax.full_like(x, True, np.bool_)


def polynomial(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    """The polynomial with these coefficients, highest power first, by Horner's rule."""
    total = lax.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total = lax.add(lax.mul(total, x), num(c, x))
    return total


# Error function


def erfcx(x: jax.Array) -> jax.Array:
    """exp(x²) erfc(x): W. J. Cody, Rational Chebyshev approximations for the error function (Math. Comp. 23)."""
    y = lax.abs(x)
    square = lax.mul(y, y)
    top = [
        1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2,
        3.20937758913846947e3,
    ]  # fmt: skip
    bottom = [1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3]
    erf = lax.div(lax.mul(y, polynomial(square, top)), polynomial(square, bottom))
    near = lax.mul(lax.exp(square), lax.sub(num(1, x), erf))
    top = [
        2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1,
        2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
        1.23033935479799725e3,
    ]  # fmt: skip
    bottom = [
        1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
        3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3,
    ]  # fmt: skip
    bounded = lax.min(y, num(4, x))
    middle = lax.div(polynomial(bounded, top), polynomial(bounded, bottom))
    inverse = lax.div(num(1, x), square)
    top = [
        1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1,
        1.25781726111229246e-1, 1.60837851487422766e-2, 6.58749161529837803e-4,
    ]  # fmt: skip
    bottom = [
        1.0, 2.56852019228982242, 1.87295284992346725,
        5.27905102951428412e-1, 6.05183413124413191e-2, 2.33520497626869185e-3,
    ]  # fmt: skip
    tail = lax.mul(inverse, lax.div(polynomial(inverse, top), polynomial(inverse, bottom)))
    far = lax.div(lax.sub(num(ONE_OVER_SQRT_PI, x), tail), y)
    out = lax.select(lax.le(y, num(0.46875, x)), near, lax.select(lax.le(y, num(4, x)), middle, far))
    reflected = lax.sub(lax.mul(num(2, x), lax.exp(square)), out)
    return lax.select(lax.lt(x, num(0, x)), reflected, out)


def ndtr(x: jax.Array) -> jax.Array:
    return lax.mul(num(0.5, x), lax.erfc(lax.mul(x, num(-SQRT_HALF, x))))


def log_ndtr(x: jax.Array) -> jax.Array:
    scaled = lax.mul(x, num(SQRT_HALF, x))
    low = lax.sub(lax.log(lax.mul(erfcx(lax.neg(scaled)), num(0.5, x))), lax.mul(scaled, scaled))
    high = lax.log1p(lax.mul(lax.erfc(scaled), num(-0.5, x)))
    return lax.select(lax.lt(x, num(-1, x)), low, high)


def entr(x: jax.Array) -> jax.Array:
    zero = num(0, x)
    inner = lax.neg(lax.mul(x, lax.log(x)))
    out = where(lax.eq(x, zero), 0, inner)
    return lax.select(is_nan(x), x, where(lax.lt(x, zero), -np.inf, out))


# Gamma family


def digamma(x: jax.Array) -> jax.Array:
    """NaN at negative integers; at a zero the infinity of the opposite sign."""
    pole = lax.bitwise_and(lax.lt(x, num(0, x)), lax.eq(x, lax.floor(x)))
    at_zero = lax.div(num(-1, x), x)
    out = lax.select(lax.eq(x, num(np.inf, x)), x, lax.digamma(x))
    return lax.select(lax.eq(x, num(0, x)), at_zero, where(pole, np.nan, out))


def lgamma(x: jax.Array) -> jax.Array:
    infinite = lax.eq(lax.abs(x), num(np.inf, x))
    return where(infinite, np.inf, lax.lgamma(x))


def trigamma(x: jax.Array) -> jax.Array:
    """Reflection, six steps of recurrence, the asymptotic series (Abramowitz and Stegun 6.4.7, 6.4.6, 6.4.12)."""
    one = num(1, x)
    reflect = lax.lt(x, num(0.5, x))
    sine = lax.sin(lax.mul(x, num(math.pi, x)))
    y = lax.select(reflect, lax.sub(one, x), x)
    total = lax.full_like(x, 0)
    for _ in range(6):
        total = lax.add(total, lax.div(one, lax.mul(y, y)))
        y = lax.add(y, one)
    inverse = lax.div(one, lax.mul(y, y))
    series = polynomial(inverse, [1 / 42, -1 / 30, 1 / 6])
    series = lax.add(lax.add(one, lax.div(num(0.5, x), y)), lax.mul(inverse, series))
    total = lax.add(total, lax.div(series, y))
    reflected = lax.sub(lax.div(num(math.pi**2, x), lax.mul(sine, sine)), total)
    return lax.select(reflect, reflected, total)


BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798, -174611 / 330)
ZETA_START = 9  # terms are summed one by one until the argument is beyond


def _zeta_sum(s: jax.Array, q: jax.Array) -> jax.Array:
    """The sum of (q + k)^-s over k = 0, 1, …, by Euler and Maclaurin (Abramowitz and Stegun 23.1.30)."""
    one = num(1, s)
    exponent = lax.neg(s)

    def below(a: jax.Array) -> jax.Array:
        return lax.lt(a, num(ZETA_START, a))

    def more(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lax.reduce_or(below(state[0]), tuple(range(q.ndim)))

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        a, total = state
        going = below(a)
        following = lax.add(total, lax.pow(a, exponent))
        return lax.select(going, lax.add(a, one), a), lax.select(going, following, total)

    finite = lax.select(lax.is_finite(q), q, lax.full_like(q, 1))
    a, total = lax.while_loop(more, step, (finite, lax.full_like(s, 0)))
    power = lax.pow(a, exponent)
    tail = lax.add(lax.mul(num(0.5, s), power), lax.div(lax.mul(power, a), lax.sub(s, one)))
    factor = lax.div(lax.mul(s, power), a)
    for k, bernoulli in enumerate(BERNOULLI, start=1):
        tail = lax.add(tail, lax.mul(factor, num(bernoulli / math.factorial(2 * k), s)))
        growth = lax.mul(lax.add(s, num(2 * k - 1, s)), lax.add(s, num(2 * k, s)))
        factor = lax.mul(factor, lax.div(growth, lax.mul(a, a)))
    return lax.select(lax.eq(power, num(0, s)), total, lax.add(total, tail))


def zeta(s: jax.Array, q: jax.Array) -> jax.Array:
    """Hurwitz zeta: inf at s = 1 and at the poles q = 0, -1, …; NaN for s < 1 and for negative q, fractional s.

    At s = inf the first term decides, and where it vanishes Cephes' remainder of the series is NaN.
    """
    at_pole = lax.bitwise_and(lax.le(q, num(0, q)), lax.eq(q, lax.floor(q)))
    undefined = lax.bitwise_and(lax.lt(q, num(0, q)), lax.ne(s, lax.floor(s)))
    out = where(lax.bitwise_and(lax.is_finite(q), lax.bitwise_not(is_nan(s))), _zeta_sum(s, q), np.nan)
    one = num(1, q)
    limit = where(lax.lt(q, one), np.inf, where(lax.eq(q, one), 1, lax.full_like(q, np.nan)))
    out = lax.select(lax.eq(s, num(np.inf, s)), limit, out)
    out = where(at_pole, np.inf, where(undefined, np.nan, out))
    return where(lax.eq(s, num(1, s)), np.inf, where(lax.lt(s, num(1, s)), np.nan, out))


@elementwise(aten.polygamma.default, operands=(1,), promote=INT_TO_FLOAT)
def polygamma(n: int, x: jax.Array) -> jax.Array:
    if n == 0:
        return digamma(x)
    if n == 1:
        return trigamma(x)
    factor = math.exp(math.lgamma(n + 1)) * (1 if n % 2 else -1)
    return lax.mul(num(factor, x), zeta(lax.full_like(x, n + 1), x))


def igamma(a: jax.Array, x: jax.Array) -> jax.Array:
    return _incomplete(a, x, lax.igamma(a, x), at_zero=0, at_infinity=1)


def igammac(a: jax.Array, x: jax.Array) -> jax.Array:
    return _incomplete(a, x, lax.igammac(a, x), at_zero=1, at_infinity=0)


def _incomplete(a: jax.Array, x: jax.Array, inner: jax.Array, *, at_zero: float, at_infinity: float) -> jax.Array:
    """The limits of a regularised incomplete gamma function, with its values in between."""
    zero, infinity = num(0, x), num(np.inf, x)
    out = where(lax.bitwise_or(is_nan(x), is_nan(a)), np.nan, inner)
    out = where(lax.eq(x, infinity), at_infinity, out)
    out = where(lax.eq(a, infinity), where(lax.eq(x, infinity), np.nan, lax.full_like(x, at_zero)), out)
    out = where(lax.eq(x, zero), at_zero, out)
    out = where(lax.eq(a, zero), where(lax.gt(x, zero), at_infinity, lax.full_like(x, np.nan)), out)
    return where(lax.bitwise_or(lax.lt(x, zero), lax.lt(a, zero)), np.nan, out)


def xlog1py(x: jax.Array, y: jax.Array) -> jax.Array:
    product = lax.mul(x, lax.log1p(y))
    return where(is_nan(y), np.nan, where(lax.eq(x, num(0, x)), 0, product))


def i0(x: jax.Array) -> jax.Array:
    return lax.mul(lax.exp(lax.abs(x)), lax.bessel_i0e(x))


def i1(x: jax.Array) -> jax.Array:
    return lax.mul(lax.exp(lax.abs(x)), lax.bessel_i1e(x))


elementwise_table(
    {
        aten.erf.default: lax.erf,
        aten.erfc.default: lax.erfc,
        aten.erfinv.default: lax.erf_inv,
        aten.special_erfcx.default: erfcx,
        aten.special_ndtr.default: ndtr,
        aten.special_log_ndtr.default: log_ndtr,
        aten.special_ndtri.default: scipy_special.ndtri,
        aten.special_entr.default: entr,
        aten.digamma.default: digamma,
        aten.lgamma.default: lgamma,
        aten.igamma.default: igamma,
        aten.igammac.default: igammac,
        aten.special_zeta.default: zeta,
        aten.special_zeta.other_scalar: zeta,
        aten.special_zeta.self_scalar: zeta,
        aten.special_xlog1py.default: xlog1py,
        aten.special_xlog1py.other_scalar: xlog1py,
        aten.special_xlog1py.self_scalar: xlog1py,
        aten.i0.default: i0,
        aten.special_i0e.default: lax.bessel_i0e,
        aten.special_i1.default: i1,
        aten.special_i1e.default: lax.bessel_i1e,
    },
    promote=INT_TO_FLOAT,
)


# How a float is represented

elementwise_table({aten.nextafter.default: lax.nextafter}, promote=NO_OPMATH)
_EXPONENT_BITS = {np.dtype(np.float32): 8, np.dtype(np.float64): 11}


@lower(aten.frexp.Tensor)
def frexp(ctx: Context, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """By the bits, since XLA's arithmetic may flush subnormal numbers."""
    wide = cast(x, torch.float32) if x.dtype.itemsize < 4 else x
    exponent_bits = _EXPONENT_BITS[wide.dtype]
    width = 8 * wide.dtype.itemsize
    mantissa_bits = width - 1 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    integer = np.dtype(f"uint{width}")
    bits = lax.bitcast_convert_type(wide, integer)

    def constant(value: int) -> jax.Array:
        return lax.full_like(bits, np.asarray(value, integer))

    sign = lax.bitwise_and(bits, constant(1 << (width - 1)))
    size = lax.bitwise_xor(bits, sign)
    field = lax.shift_right_logical(size, constant(mantissa_bits))
    subnormal = lax.eq(field, constant(0))
    # a subnormal's leading bit moves up to where a normal number has its hidden one
    shift = lax.sub(lax.clz(size), constant(exponent_bits))
    shifted = lax.select(subnormal, lax.shift_left(size, shift), size)
    mantissa = lax.bitwise_and(shifted, constant((1 << mantissa_bits) - 1))
    mantissa = lax.bitwise_or(lax.bitwise_or(mantissa, constant((bias - 1) << mantissa_bits)), sign)
    exponent = lax.sub(lax.convert_element_type(field, np.int32), lax.full_like(field, bias - 1, np.int32))
    lowered_by = lax.sub(lax.convert_element_type(shift, np.int32), lax.full_like(field, 1, np.int32))
    exponent = lax.select(subnormal, lax.sub(exponent, lowered_by), exponent)
    kept = lax.bitwise_or(lax.eq(size, constant(0)), lax.eq(field, constant(2**exponent_bits - 1)))
    value = lax.select(kept, wide, lax.bitcast_convert_type(mantissa, wide.dtype))
    return cast(value, ctx.result[0].dtype), where(kept, 0, exponent)


# Complex numbers


@lower(aten.angle.default)
def angle(ctx: Context, x: jax.Array) -> jax.Array:
    if is_complex(x):
        return lax.atan2(lax.imag(x), lax.real(x))
    x = cast(x, ctx.result.dtype)
    return lax.select(is_nan(x), x, where(lax.lt(x, num(0, x)), math.pi, lax.full_like(x, 0)))


elementwise_table({aten.conj_physical.default: lambda x: lax.conj(x) if is_complex(x) else x})


@lower(aten.complex.default)
def complex_(ctx: Context, real: jax.Array, imaginary: jax.Array) -> jax.Array:
    ctx.result.jax_dtype  # noqa: B018 - refuses complex32
    return lax.complex(*jnp.broadcast_arrays(real, imaginary))


@lower(aten.polar.default)
def polar(ctx: Context, size: jax.Array, phase: jax.Array) -> jax.Array:
    size, phase = jnp.broadcast_arrays(size, phase)
    return lax.complex(lax.mul(size, lax.cos(phase)), lax.mul(size, lax.sin(phase)))
