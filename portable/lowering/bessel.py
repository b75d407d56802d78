"""Bessel, modified Bessel and Airy functions.

Each is split as in Abramowitz and Stegun, chapters 9 and 10: near zero a smooth function of x² (9.1.10–13, 9.6.10–13),
far away amplitudes P and Q that are smooth in 1/x (9.2.5–6, 9.7.1–2, 10.4.59–64). The smooth parts are Chebyshev
expansions whose coefficients mpmath computes to 40 digits when the function is first used, cut where the dtype ends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jax import lax

from portable.lowering.elementwise import num, where
from portable.lowering.registry import INT_TO_FLOAT, elementwise_table
from portable.lowering.special import i0, i1, is_finite

aten = torch.ops.aten

NEAR = 8.0  # where J and Y go over to their amplitudes
NEAR_K = 2.0  # where K goes over to its asymptotic form
AIRY_LOW, AIRY_HIGH = -6.0, 2.0  # between them Ai is one Chebyshev expansion
NODES = 48


@functools.cache
def expansion(function: Callable[[Any], Any], low: float, high: float) -> tuple[float, ...]:
    """Chebyshev coefficients of ``function`` (of mpmath numbers) on [low, high], from its values at Chebyshev nodes."""
    import mpmath

    angles = np.pi * (np.arange(NODES) + 0.5) / NODES
    with mpmath.workdps(40):
        values = [float(function(mpmath.mpf((math.cos(a) * (high - low) + (high + low)) / 2))) for a in angles]
    cosines = np.cos(np.outer(np.arange(NODES), angles))
    coefficients = 2 / NODES * cosines @ np.asarray(values)
    return (float(coefficients[0]) / 2, *map(float, coefficients[1:]))


def evaluate(function: Callable[[Any], Any], x: jax.Array, low: float, high: float) -> jax.Array:
    """The Chebyshev expansion of ``function`` on [low, high] at ``x``, by Clenshaw's recurrence; clamped outside."""
    coefficients = expansion(function, low, high)
    enough = float(np.finfo(x.dtype).eps) / 16 * max(map(abs, coefficients))
    while abs(coefficients[-1]) < enough:
        coefficients = coefficients[:-1]
    x = lax.max(num(low, x), lax.min(num(high, x), x))
    t = lax.div(lax.sub(lax.add(x, x), num(low + high, x)), num(high - low, x))
    twice = lax.add(t, t)
    older = newer = lax.full_like(x, 0)
    for c in reversed(coefficients[1:]):
        older, newer = newer, lax.add(lax.sub(lax.mul(twice, newer), older), num(c, x))
    return lax.add(lax.sub(lax.mul(t, newer), older), num(coefficients[0], x))


# The smooth parts, as functions of mpmath numbers


def _j_near(order: int) -> Callable[[Any], Any]:
    """J₀(x), or J₁(x)/x, as a function of x²."""

    def f(t: Any) -> Any:
        import mpmath

        x = mpmath.sqrt(t)
        return mpmath.besselj(order, x) / x**order

    return f


def _y_near(order: int) -> Callable[[Any], Any]:
    """Y₀ - (2/π) ln(x) J₀; or (Y₁ - (2/π)(ln(x) J₁ - 1/x))/x, as a function of x²."""

    def f(t: Any) -> Any:
        import mpmath

        x = mpmath.sqrt(t)
        logarithm = mpmath.log(x) * mpmath.besselj(order, x) - (1 / x if order else 0)
        return (mpmath.bessely(order, x) - 2 / mpmath.pi * logarithm) / x**order

    return f


def _amplitude(order: int, sine: bool) -> Callable[[Any], Any]:
    """P, or Q x, as a function of 1/x² (A & S 9.2.5–6)."""

    def f(t: Any) -> Any:
        import mpmath

        x = 1 / mpmath.sqrt(t)
        phase = x - (mpmath.mpf(order) / 2 + mpmath.mpf(1) / 4) * mpmath.pi
        j, y, size = mpmath.besselj(order, x), mpmath.bessely(order, x), mpmath.sqrt(mpmath.pi * x / 2)
        c, s = mpmath.cos(phase), mpmath.sin(phase)
        return size * (y * c - j * s) * x if sine else size * (j * c + y * s)

    return f


def _k_near(order: int) -> Callable[[Any], Any]:
    """K₀ + ln(x/2) I₀; or (K₁ - 1/x - ln(x/2) I₁)/x, as a function of x²."""

    def f(t: Any) -> Any:
        import mpmath

        x = mpmath.sqrt(t)
        logarithm = mpmath.log(x / 2) * mpmath.besseli(order, x)
        k = mpmath.besselk(order, x)
        return (k - 1 / x - logarithm) / x if order else k + logarithm

    return f


def _k_far(order: int) -> Callable[[Any], Any]:
    """√x eˣ K(x) as a function of 1/x."""

    def f(t: Any) -> Any:
        import mpmath

        x = 1 / t
        return mpmath.sqrt(x) * mpmath.exp(x) * mpmath.besselk(order, x)

    return f


_J_NEAR = (_j_near(0), _j_near(1))
_Y_NEAR = (_y_near(0), _y_near(1))
_P, _Q = (tuple(_amplitude(order, sine) for order in (0, 1)) for sine in (False, True))
_K_NEAR = (_k_near(0), _k_near(1))
_K_FAR = (_k_far(0), _k_far(1))


def _airy_middle(x: Any) -> Any:
    import mpmath

    return mpmath.airyai(x)


def _airy_right(t: Any) -> Any:
    """2 √π x^(1/4) e^ζ Ai(x) as a function of 1/ζ, with ζ = (2/3) x^(3/2)."""
    import mpmath

    zeta = 1 / t
    x = (zeta * 3 / 2) ** (mpmath.mpf(2) / 3)
    return 2 * mpmath.sqrt(mpmath.pi) * x ** (mpmath.mpf(1) / 4) * mpmath.exp(zeta) * mpmath.airyai(x)


def _airy_left(sine: bool) -> Callable[[Any], Any]:
    """With Ai(-x) = (P sin(ζ + π/4) - Q cos(ζ + π/4)) / (√π x^(1/4)): P, or Q ζ, as a function of 1/ζ²."""

    def f(t: Any) -> Any:
        import mpmath

        zeta = 1 / mpmath.sqrt(t)
        x = (zeta * 3 / 2) ** (mpmath.mpf(2) / 3)
        size = mpmath.sqrt(mpmath.pi) * x ** (mpmath.mpf(1) / 4)
        phase = zeta + mpmath.pi / 4
        ai, bi = mpmath.airyai(-x) * size, mpmath.airybi(-x) * size
        if sine:
            return ai * mpmath.sin(phase) + bi * mpmath.cos(phase)
        return (bi * mpmath.sin(phase) - ai * mpmath.cos(phase)) * zeta

    return f


_AIRY_P, _AIRY_Q = _airy_left(True), _airy_left(False)


# The functions


def _near(order: int, x: jax.Array) -> jax.Array:
    square = lax.mul(x, x)
    value = evaluate(_J_NEAR[order], square, 0, NEAR**2)
    return lax.mul(value, x) if order else value


def _far(order: int, x: jax.Array, second: bool) -> jax.Array:
    """J (or Y, the ``second`` kind) of large positive x, by its amplitudes."""
    inverse = lax.div(num(1, x), x)
    t = lax.mul(inverse, inverse)
    p = evaluate(_P[order], t, 0, NEAR**-2)
    q = lax.mul(evaluate(_Q[order], t, 0, NEAR**-2), inverse)
    phase = lax.sub(x, num((order / 2 + 0.25) * math.pi, x))
    cosine, sine = lax.cos(phase), lax.sin(phase)
    size = lax.sqrt(lax.mul(num(2 / math.pi, x), inverse))
    if second:
        return lax.mul(size, lax.add(lax.mul(p, sine), lax.mul(q, cosine)))
    return lax.mul(size, lax.sub(lax.mul(p, cosine), lax.mul(q, sine)))


def bessel_j(order: int) -> Callable[[jax.Array], jax.Array]:
    def j(x: jax.Array) -> jax.Array:
        size = lax.abs(x)
        far = _far(order, lax.max(size, num(NEAR, x)), second=False)
        far = lax.select(lax.lt(x, num(0, x)), lax.neg(far), far) if order else far
        value = lax.select(lax.le(size, num(NEAR, x)), _near(order, x), far)
        return where(is_finite(x), value, np.nan)

    return j


def bessel_y(order: int) -> Callable[[jax.Array], jax.Array]:
    def y(x: jax.Array) -> jax.Array:
        smooth = evaluate(_Y_NEAR[order], lax.mul(x, x), 0, NEAR**2)
        logarithm = lax.mul(lax.log(x), _near(order, x))
        if order:
            smooth = lax.mul(smooth, x)
            logarithm = lax.sub(logarithm, lax.div(num(1, x), x))
        near = lax.add(lax.mul(num(2 / math.pi, x), logarithm), smooth)
        value = lax.select(lax.le(x, num(NEAR, x)), near, _far(order, lax.max(x, num(NEAR, x)), second=True))
        value = where(lax.eq(x, num(0, x)), -np.inf, where(is_finite(x), value, np.nan))
        return where(lax.lt(x, num(0, x)), np.nan, value)

    return y


def bessel_k(order: int, scaled: bool) -> Callable[[jax.Array], jax.Array]:
    def k(x: jax.Array) -> jax.Array:
        smooth = evaluate(_K_NEAR[order], lax.mul(x, x), 0, NEAR_K**2)
        small = lax.min(x, num(NEAR_K, x))
        logarithm = lax.log(lax.mul(small, num(0.5, x)))
        if order:
            near = lax.add(lax.div(num(1, x), x), lax.mul(logarithm, i1(small)))
            near = lax.add(near, lax.mul(smooth, x))
        else:
            near = lax.sub(smooth, lax.mul(logarithm, i0(small)))
        inverse = lax.div(num(1, x), lax.max(x, num(NEAR_K, x)))
        far = lax.mul(evaluate(_K_FAR[order], inverse, 0, 1 / NEAR_K), lax.sqrt(inverse))
        if scaled:
            near = lax.mul(near, lax.exp(small))
        else:
            far = lax.mul(far, lax.exp(lax.neg(x)))
        value = lax.select(lax.le(x, num(NEAR_K, x)), near, far)
        value = where(lax.eq(x, num(0, x)), np.inf, value)
        return where(lax.ge(x, num(0, x)), value, np.nan)

    return k


def spherical_j0(x: jax.Array) -> jax.Array:
    value = where(lax.eq(x, num(0, x)), 1, lax.div(lax.sin(x), x))
    return where(lax.eq(lax.abs(x), num(np.inf, x)), 0, value)


def airy_ai(x: jax.Array) -> jax.Array:
    middle = evaluate(_airy_middle, x, AIRY_LOW, AIRY_HIGH)

    def zeta(size: jax.Array) -> jax.Array:
        return lax.mul(lax.mul(num(2 / 3, x), size), lax.sqrt(size))

    right = lax.max(x, num(AIRY_HIGH, x))
    inverse = lax.div(num(1, x), zeta(right))
    root = lax.sqrt(lax.sqrt(right))
    high = evaluate(_airy_right, inverse, 0, 1.5 * AIRY_HIGH**-1.5)
    high = lax.mul(lax.div(high, lax.mul(root, num(2 * math.sqrt(math.pi), x))), lax.exp(lax.neg(zeta(right))))
    left = lax.max(lax.neg(x), num(-AIRY_LOW, x))
    inverse = lax.div(num(1, x), zeta(left))
    t, largest = lax.mul(inverse, inverse), (1.5 * (-AIRY_LOW) ** -1.5) ** 2
    phase = lax.add(zeta(left), num(math.pi / 4, x))
    low = lax.sub(
        lax.mul(evaluate(_AIRY_P, t, 0, largest), lax.sin(phase)),
        lax.mul(lax.mul(evaluate(_AIRY_Q, t, 0, largest), inverse), lax.cos(phase)),
    )
    low = lax.div(low, lax.mul(lax.sqrt(lax.sqrt(left)), num(math.sqrt(math.pi), x)))
    value = lax.select(lax.gt(x, num(AIRY_HIGH, x)), high, lax.select(lax.lt(x, num(AIRY_LOW, x)), low, middle))
    return where(is_finite(x), value, np.nan)


elementwise_table(
    {
        aten.special_bessel_j0.default: bessel_j(0),
        aten.special_bessel_j1.default: bessel_j(1),
        aten.special_bessel_y0.default: bessel_y(0),
        aten.special_bessel_y1.default: bessel_y(1),
        aten.special_modified_bessel_i0.default: i0,
        aten.special_modified_bessel_i1.default: i1,
        aten.special_modified_bessel_k0.default: bessel_k(0, scaled=False),
        aten.special_modified_bessel_k1.default: bessel_k(1, scaled=False),
        aten.special_scaled_modified_bessel_k0.default: bessel_k(0, scaled=True),
        aten.special_scaled_modified_bessel_k1.default: bessel_k(1, scaled=True),
        aten.special_spherical_bessel_j0.default: spherical_j0,
        aten.special_airy_ai.default: airy_ai,
    },
    promote=INT_TO_FLOAT,
)
