"""Orthogonal polynomials of ``torch.special``, by their three-term recurrences (Abramowitz and Stegun, table 22.7).

The degree n is an array: it is rounded toward zero, and a negative degree gives 0. Where torch uses the trigonometric
form of a Chebyshev polynomial (degree over 6 or 8, argument inside (-1, 1)), so does the lowering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jax import lax

from portable.lowering.elementwise import is_nan, num, trunc, where
from portable.lowering.registry import INT_TO_FLOAT, elementwise

aten = torch.ops.aten

Step = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
HERMITE_LIMIT = {np.dtype(np.float32): 128, np.dtype(np.float64): 512}  # a greater degree is NaN in torch


def recurrence(x: jax.Array, n: jax.Array, first: jax.Array, step: Step, active: jax.Array) -> jax.Array:
    """p(n) from p(0) = 1, p(1) = ``first`` and p(k+1) = ``step(x, k, p(k), p(k-1))``, where ``active``."""
    one = num(1, x)

    def pending(k: jax.Array, p: jax.Array) -> jax.Array:
        return lax.bitwise_and(active, lax.bitwise_and(lax.lt(lax.full_like(n, k), n), lax.bitwise_not(is_nan(p))))

    def more(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        k, _, p = state
        return lax.reduce_or(pending(k, p), tuple(range(x.ndim)))

    def advance(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        k, before, p = state
        now = pending(k, p)
        following = step(x, lax.full_like(x, k), p, before)
        return lax.add(k, one), lax.select(now, p, before), lax.select(now, following, p)

    start = (lax.full((), one), lax.full_like(x, 1), first)
    value = lax.while_loop(more, advance, start)[2]
    return where(lax.ge(n, one), value, where(lax.ge(n, num(0, n)), 1, lax.full_like(x, 0)))


def _even(n: jax.Array) -> jax.Array:
    return lax.eq(lax.rem(n, num(2, n)), num(0, n))


def _chebyshev_step(x: jax.Array, k: jax.Array, p: jax.Array, before: jax.Array) -> jax.Array:
    return lax.sub(lax.mul(lax.add(x, x), p), before)


def _t(n: jax.Array, angle: jax.Array) -> jax.Array:
    return lax.cos(lax.mul(n, angle))


def _u(n: jax.Array, angle: jax.Array) -> jax.Array:
    return lax.div(lax.sin(lax.mul(lax.add(n, num(1, n)), angle)), lax.sin(angle))


def _v(n: jax.Array, angle: jax.Array) -> jax.Array:
    half = num(0.5, n)
    return lax.div(lax.cos(lax.mul(lax.add(n, half), angle)), lax.cos(lax.mul(angle, half)))


def _w(n: jax.Array, angle: jax.Array) -> jax.Array:
    half = num(0.5, n)
    return lax.div(lax.sin(lax.mul(lax.add(n, half), angle)), lax.sin(lax.mul(angle, half)))


def _twice_plus(shift: float) -> Callable[[jax.Array], jax.Array]:
    return lambda x: lax.add(lax.add(x, x), num(shift, x))


# kind: p(1), the trigonometric form, from which degree on it is used, the size at 1 and at -1
_ONE: Callable[[jax.Array], jax.Array] = lambda n: lax.full_like(n, 1)  # noqa: E731
_CHEBYSHEV: dict[str, tuple[Any, ...]] = {
    "t": (lambda x: x, _t, 6, _ONE, _ONE),
    "u": (_twice_plus(0), _u, 8, lambda n: lax.add(n, num(1, n)), lambda n: lax.add(n, num(1, n))),
    "v": (_twice_plus(-1), _v, 8, _ONE, _twice_plus(1)),
    "w": (_twice_plus(1), _w, 8, _twice_plus(1), _ONE),
}


def chebyshev(kind: str, shifted: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
    first, form, limit, at_one, at_minus_one = _CHEBYSHEV[kind]

    def formula(x: jax.Array, n: jax.Array) -> jax.Array:
        x = lax.sub(lax.add(x, x), num(1, x)) if shifted else x
        n = trunc(n)
        one = num(1, x)
        inside = lax.bitwise_and(lax.lt(lax.abs(x), one), lax.gt(n, num(limit, n)))
        edge = lax.eq(lax.abs(x), one)
        active = lax.bitwise_not(lax.bitwise_or(inside, edge))
        value = recurrence(x, n, first(x), _chebyshev_step, active)
        value = lax.select(inside, form(n, lax.acos(x)), value)
        below = at_minus_one(n)
        below = lax.select(_even(n), below, lax.neg(below))
        at_edge = lax.select(lax.gt(x, num(0, x)), at_one(n), below)
        value = lax.select(edge, at_edge, value)
        return where(lax.ge(n, num(0, n)), value, 0)

    return formula


def hermite(factor: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The physicists' polynomial H for ``factor`` 2, the probabilists' He for 1."""

    def step(x: jax.Array, k: jax.Array, p: jax.Array, before: jax.Array) -> jax.Array:
        return lax.mul(num(factor, x), lax.sub(lax.mul(x, p), lax.mul(k, before)))

    def formula(x: jax.Array, n: jax.Array) -> jax.Array:
        n = trunc(n)
        within = lax.le(n, num(HERMITE_LIMIT[x.dtype], n))
        value = recurrence(x, n, lax.mul(num(factor, x), x), step, within)
        return where(lax.gt(n, num(HERMITE_LIMIT[x.dtype], n)), np.nan, value)

    return formula


def laguerre(x: jax.Array, n: jax.Array) -> jax.Array:
    one = num(1, x)

    def step(x: jax.Array, k: jax.Array, p: jax.Array, before: jax.Array) -> jax.Array:
        factor = lax.add(lax.add(k, k), lax.sub(one, x))
        return lax.div(lax.sub(lax.mul(factor, p), lax.mul(k, before)), lax.add(k, one))

    # at 0 the value is 1 whatever the degree, which rounding would miss
    n = trunc(n)
    value = recurrence(x, n, lax.sub(one, x), step, lax.ne(x, num(0, x)))
    return where(lax.bitwise_and(lax.eq(x, num(0, x)), lax.ge(n, num(0, n))), 1, value)


def legendre(x: jax.Array, n: jax.Array) -> jax.Array:
    one = num(1, x)

    def step(x: jax.Array, k: jax.Array, p: jax.Array, before: jax.Array) -> jax.Array:
        factor = lax.add(lax.add(k, k), one)
        return lax.div(lax.sub(lax.mul(lax.mul(factor, x), p), lax.mul(k, before)), lax.add(k, one))

    n = trunc(n)
    edge = lax.eq(lax.abs(x), one)
    value = recurrence(x, n, x, step, lax.bitwise_not(edge))
    at_edge = lax.select(lax.bitwise_or(lax.gt(x, num(0, x)), _even(n)), lax.full_like(x, 1), lax.full_like(x, -1))
    return lax.select(lax.bitwise_and(edge, lax.ge(n, num(0, n))), at_edge, value)


_FORMULAS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    **{f"chebyshev_polynomial_{kind}": chebyshev(kind, shifted=False) for kind in _CHEBYSHEV},
    **{f"shifted_chebyshev_polynomial_{kind}": chebyshev(kind, shifted=True) for kind in _CHEBYSHEV},
    "hermite_polynomial_h": hermite(2),
    "hermite_polynomial_he": hermite(1),
    "laguerre_polynomial_l": laguerre,
    "legendre_polynomial_p": legendre,
}
for _name, _formula in _FORMULAS.items():
    _packet = getattr(aten, f"special_{_name}")
    elementwise(_packet.default, _packet.x_scalar, _packet.n_scalar, promote=INT_TO_FLOAT)(_formula)
