"""Exponentials, logarithms, trigonometry.

Of complex numbers XLA takes both sides of a branch cut for one, and loses the sign of a zero: -0.0 in either part
counts as 0.0. Where a function is real on the real axis, f(conj z) = conj f(z); where it is odd or even too, one
quadrant tells all others. There it is evaluated, and the signs follow from those of z.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jax import lax

from portable.lowering.elementwise import is_complex, num, sign_bit, where
from portable.lowering.registry import INT_TO_FLOAT, elementwise_table

aten = torch.ops.aten

Formula = Callable[[jax.Array], jax.Array]


def _negated(x: jax.Array, negative: jax.Array) -> jax.Array:
    return lax.select(negative, lax.neg(x), x)


def symmetric(formula: Formula) -> Formula:
    """``formula``, evaluated in the upper half of the complex plane: f(conj z) = conj f(z)."""

    def of(x: jax.Array) -> jax.Array:
        if not is_complex(x):
            return formula(x)
        real, imaginary = lax.real(x), lax.imag(x)
        value = formula(lax.complex(real, lax.abs(imaginary)))
        return lax.complex(lax.real(value), _negated(lax.imag(value), sign_bit(imaginary)))

    return of


def odd(formula: Formula) -> Formula:
    """``formula``, evaluated in the first quadrant: f(conj z) = conj f(z) and f(-z) = -f(z)."""

    def of(x: jax.Array) -> jax.Array:
        if not is_complex(x):
            return formula(x)
        real, imaginary = lax.real(x), lax.imag(x)
        value = formula(lax.complex(lax.abs(real), lax.abs(imaginary)))
        return lax.complex(_negated(lax.real(value), sign_bit(real)), _negated(lax.imag(value), sign_bit(imaginary)))

    return of


def even(formula: Formula) -> Formula:
    """``formula``, evaluated in the first quadrant: f(conj z) = conj f(z) and f(-z) = f(z)."""

    def of(x: jax.Array) -> jax.Array:
        if not is_complex(x):
            return formula(x)
        real, imaginary = lax.real(x), lax.imag(x)
        value = formula(lax.complex(lax.abs(real), lax.abs(imaginary)))
        return lax.complex(lax.real(value), _negated(lax.imag(value), lax.ne(sign_bit(real), sign_bit(imaginary))))

    return of


def _swapped(x: jax.Array) -> jax.Array:
    return lax.complex(lax.imag(x), lax.real(x))


def identity_at_zero(formula: Formula) -> Formula:
    """``formula``, where a complex zero is its own value, with its signs."""

    def of(x: jax.Array) -> jax.Array:
        return lax.select(lax.eq(x, num(0, x)), x, formula(x)) if is_complex(x) else formula(x)

    return of


def _cos(x: jax.Array) -> jax.Array:
    if not is_complex(x):
        return lax.cos(x)
    value, real, imaginary = lax.cos(x), lax.real(x), lax.imag(x)
    zero = lax.neg(lax.mul(lax.sin(real), imaginary))  # with the sign that XLA's has lost
    wanted = lax.bitwise_and(lax.eq(lax.imag(value), num(0, real)), lax.eq(zero, num(0, real)))
    return lax.complex(lax.real(value), lax.select(wanted, zero, lax.imag(value)))


def exp2(x: jax.Array) -> jax.Array:
    # not lax.exp2, which rounds at integers: pow is exact there
    return lax.exp(lax.mul(x, num(math.log(2), x))) if is_complex(x) else lax.pow(lax.full_like(x, 2), x)


def _logarithm(base: int) -> Any:
    def log(x: jax.Array) -> jax.Array:
        if is_complex(x):
            whole, scale = lax.log(x), num(math.log(base), lax.real(x))
            return lax.complex(lax.div(lax.real(whole), scale), lax.div(lax.imag(whole), scale))
        quotient = lax.div(lax.log(x), num(math.log(base), x))
        # a power of the base has an exact logarithm, which the quotient misses by a rounding
        nearest = lax.round(quotient, lax.RoundingMethod.TO_NEAREST_EVEN)
        return lax.select(lax.eq(lax.pow(lax.full_like(x, base), nearest), x), nearest, quotient)

    return log


def reciprocal(x: jax.Array) -> jax.Array:
    inverse = lax.div(num(1, x), x)
    return where(lax.eq(x, num(0, x)), complex(np.inf, np.nan), inverse) if is_complex(x) else inverse


def sinc(x: jax.Array) -> jax.Array:
    angle = lax.mul(x, num(math.pi, x))
    return where(lax.eq(x, num(0, x)), 1, lax.div(sin(angle), angle))


cos = even(_cos)
sin = odd(lax.sin)
sqrt = symmetric(lax.sqrt)


def rsqrt(x: jax.Array) -> jax.Array:
    # lax.rsqrt refines an estimate, of zero for subnormals; torch divides
    return reciprocal(sqrt(x))


@even
def cosh(x: jax.Array) -> jax.Array:
    return lax.conj(cos(_swapped(x))) if is_complex(x) else lax.cosh(x)


@odd
def sinh(x: jax.Array) -> jax.Array:
    return _swapped(lax.sin(_swapped(x))) if is_complex(x) else lax.sinh(x)


@odd
def atan(x: jax.Array) -> jax.Array:
    return _swapped(lax.atanh(_swapped(x))) if is_complex(x) else lax.atan(x)


log2, log10 = _logarithm(2), _logarithm(10)
elementwise_table(
    {
        aten.exp.default: symmetric(lax.exp),
        aten.exp2.default: symmetric(exp2),
        aten.expm1.default: identity_at_zero(symmetric(lax.expm1)),
        aten.log.default: lax.log,
        aten.log2.default: log2,
        aten.log10.default: log10,
        aten.log1p.default: identity_at_zero(lax.log1p),
        aten.sin.default: sin,
        aten.cos.default: cos,
        aten.tan.default: odd(lax.tan),
        aten.sinh.default: sinh,
        aten.cosh.default: cosh,
        aten.tanh.default: odd(lax.tanh),
        aten.asin.default: odd(lax.asin),
        aten.acos.default: symmetric(lax.acos),
        aten.atan.default: atan,
        aten.asinh.default: odd(lax.asinh),
        aten.acosh.default: symmetric(lax.acosh),
        aten.atanh.default: odd(lax.atanh),
        aten.atan2.default: lax.atan2,
        aten.sigmoid.default: lax.logistic,
        aten.sqrt.default: sqrt,
        aten.rsqrt.default: rsqrt,
        aten.reciprocal.default: reciprocal,
        aten.sinc.default: sinc,
        aten.deg2rad.default: lambda x: lax.mul(x, num(math.pi / 180, x)),
        aten.rad2deg.default: lambda x: lax.mul(x, num(180 / math.pi, x)),
    },
    promote=INT_TO_FLOAT,
)
