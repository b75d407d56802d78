"""Quotients and remainders, rounded as torch rounds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax import lax

from portable.lowering.bounds import divisible
from portable.lowering.context import Context
from portable.lowering.elementwise import is_float, is_signed, num, true_div, trunc
from portable.lowering.registry import (
    DEFAULT,
    INT_TO_FLOAT,
    cast,
    elementwise,
    lower,
    narrowed,
    promoted,
)

aten = torch.ops.aten


def remainder(x: jax.Array, y: jax.Array) -> jax.Array:
    """The remainder with the sign of the divisor."""
    rest = lax.rem(x, y)
    zero = num(0, x)
    other_sign = lax.ne(lax.lt(rest, zero), lax.lt(y, zero))
    return lax.select(lax.bitwise_and(lax.ne(rest, zero), other_sign), lax.add(rest, y), rest)


def floor_div(x: jax.Array, y: jax.Array, dtype: torch.dtype | None = None) -> jax.Array:
    """The quotient rounded down; for floats by way of the remainder, as in Python, so that rounding does no harm.

    For a half precision ``dtype`` each step is rounded to it, as in torch.
    """
    zero = num(0, x)
    rest = lax.rem(x, y)
    other_sign = lax.bitwise_and(lax.ne(rest, zero), lax.ne(lax.lt(rest, zero), lax.lt(y, zero)))
    if not is_float(x):
        quotient = lax.div(x, y)
        return lax.select(other_sign, lax.sub(quotient, num(1, x)), quotient) if is_signed(x) else quotient

    def step(value: jax.Array) -> jax.Array:
        return value if dtype is None else narrowed(value, dtype)

    quotient = step(true_div(step(lax.sub(x, step(rest))), y))
    quotient = lax.select(other_sign, step(lax.sub(quotient, num(1, x))), quotient)
    down = lax.floor(quotient)
    down = lax.select(lax.gt(lax.sub(quotient, down), num(0.5, x)), lax.add(down, num(1, x)), down)
    plain = true_div(x, y)
    down = lax.select(lax.ne(quotient, zero), down, lax.mul(plain, zero))
    return lax.select(lax.eq(y, zero), plain, down)


@lower(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder_rule(ctx: Context, x: Any, y: Any) -> jax.Array:
    return _rest(ctx, remainder, x, y)


@lower(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(ctx: Context, x: Any, y: Any) -> jax.Array:
    return _rest(ctx, lax.rem, x, y)


def _rest(ctx: Context, formula: Callable[[jax.Array, jax.Array], jax.Array], x: Any, y: Any) -> jax.Array:
    (x, y), result = promoted(DEFAULT, ctx.result.shape, x, y)
    divisible(ctx, y)
    return cast(formula(x, y), result)


def _is_number(y: Any) -> bool:
    """Whether torch keeps this divisor, and the steps of the division, in float32 for a half precision dividend."""
    return not isinstance(y, jax.Array) or y.ndim == 0


@lower(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(ctx: Context, x: Any, y: Any) -> jax.Array:
    number = _is_number(y)
    (x, y), result = promoted(DEFAULT, ctx.result.shape, x, y, rounded=not number)
    divisible(ctx, y)
    return cast(floor_div(x, y, None if number else result), result)


@lower(aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode)
def div(ctx: Context, x: Any, y: Any, *, rounding_mode: str | None = None) -> jax.Array:
    if rounding_mode == "floor":
        return floor_divide(ctx, x, y)
    if rounding_mode == "trunc":
        number = _is_number(y)
        (x, y), result = promoted(DEFAULT, ctx.result.shape, x, y, rounded=not number)
        divisible(ctx, y)
        quotient = true_div(x, y)
        return cast(trunc(quotient if number else narrowed(quotient, result)), result)
    power_of_two = isinstance(y, float | int) and abs(math.frexp(y)[0]) == 0.5 and 1e-30 < abs(y) < 1e30
    (x, y), result = promoted(INT_TO_FLOAT, ctx.result.shape, x, y, rounded=False)
    return cast(lax.div(x, y) if power_of_two else true_div(x, y), result)


@elementwise(aten.addcdiv.default, operands=(0, 1, 2))
def addcdiv(x: jax.Array, y: jax.Array, z: jax.Array, *, value: complex = 1) -> jax.Array:
    return lax.add(x, true_div(y if value == 1 else lax.mul(y, num(value, y)), z))
