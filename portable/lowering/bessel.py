"""Bessel, modified Bessel and Airy functions: the table, and the modified functions of the second kind.

Those are split as in Abramowitz and Stegun, chapter 9: near zero a logarithm and a smooth function of x² (9.6.10–13),
far away √x eˣ K(x), which is smooth in 1/x (9.7.2). The smooth parts are Chebyshev expansions whose coefficients mpmath
computes to 40 digits when the function is first used, cut where the dtype ends.
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

from portable.lowering.cephes import airy_ai, bessel_j, bessel_y
from portable.lowering.elementwise import num, where
from portable.lowering.registry import INT_TO_FLOAT, elementwise_table
from portable.lowering.special import i0, i1

aten = torch.ops.aten

NEAR_K = 2.0  # where K goes over to its asymptotic form
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


_K_NEAR = (_k_near(0), _k_near(1))
_K_FAR = (_k_far(0), _k_far(1))


# The functions


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
