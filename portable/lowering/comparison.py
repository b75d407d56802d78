"""Comparisons, predicates, logic and bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.elementwise import is_complex, is_float, is_nan, is_signed, num, sign_bit
from portable.lowering.registry import ALWAYS_BOOL, NO_OPMATH, cast, elementwise_table, lower, promoted

aten = torch.ops.aten


def comparison(formula: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A rule that compares in the operands' common dtype: a number meets a bfloat16 as a bfloat16."""

    def rule(ctx: Context, x: Any, y: Any) -> jax.Array:
        operands, _ = promoted(NO_OPMATH, ctx.result.shape, x, y)
        return cast(formula(*operands), ctx.result.dtype)

    return rule


_COMPARISONS = {"eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge}
for _name, _formula in _COMPARISONS.items():
    _packet = getattr(aten, _name)
    lower(_packet.Tensor, _packet.Scalar)(comparison(_formula))


def _nonzero(x: jax.Array) -> jax.Array:
    return cast(x, torch.bool)


def is_inf(x: jax.Array) -> jax.Array:
    if is_complex(x):
        return lax.bitwise_or(is_inf(lax.real(x)), is_inf(lax.imag(x)))
    return lax.eq(lax.abs(x), num(np.inf, x)) if is_float(x) else lax.full_like(x, False, np.bool_)


def _infinity(value: float) -> Callable[[jax.Array], jax.Array]:
    return lambda x: lax.eq(x, num(value, x)) if is_float(x) else lax.full_like(x, False, np.bool_)


def signbit(x: jax.Array) -> jax.Array:
    if is_float(x):
        return sign_bit(x)
    return lax.full_like(x, False) if x.dtype == jnp.bool_ else lax.lt(x, num(0, x))


elementwise_table(
    {
        aten.isnan.default: is_nan,
        aten.isinf.default: is_inf,
        aten.isposinf.default: _infinity(np.inf),
        aten.isneginf.default: _infinity(-np.inf),
        aten.signbit.default: signbit,
        aten.logical_not.default: lambda x: lax.bitwise_not(_nonzero(x)),
        aten.logical_and.default: lambda x, y: lax.bitwise_and(_nonzero(x), _nonzero(y)),
        aten.logical_or.default: lambda x, y: lax.bitwise_or(_nonzero(x), _nonzero(y)),
        aten.logical_xor.default: lambda x, y: lax.bitwise_xor(_nonzero(x), _nonzero(y)),
    },
    promote=ALWAYS_BOOL,
)


def shift_left(x: jax.Array, by: jax.Array) -> jax.Array:
    # StableHLO's shift by more than the width gives 0, and a negative amount counts as such: as in torch
    return lax.shift_left(x, by)


def shift_right(x: jax.Array, by: jax.Array) -> jax.Array:
    return lax.shift_right_arithmetic(x, by) if is_signed(x) else lax.shift_right_logical(x, by)


def _scaled(power: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The operators << and >> of floats multiply by a power of two."""
    return lambda x, by: lax.mul(x, lax.pow(lax.full_like(x, 2), lax.mul(by, num(power, by))))


def _shift(of_ints: Callable[..., jax.Array], power: int) -> Callable[..., jax.Array]:
    of_floats = _scaled(power)
    return lambda x, by: of_floats(x, by) if is_float(x) else of_ints(x, by)


elementwise_table(
    {
        aten.bitwise_not.default: lax.bitwise_not,
        aten.bitwise_left_shift.Tensor: shift_left,
        aten.bitwise_left_shift.Tensor_Scalar: shift_left,
        aten.bitwise_left_shift.Scalar_Tensor: shift_left,
        aten.bitwise_right_shift.Tensor: shift_right,
        aten.bitwise_right_shift.Tensor_Scalar: shift_right,
        aten.bitwise_right_shift.Scalar_Tensor: shift_right,
        aten.__lshift__.Tensor: _shift(shift_left, 1),
        aten.__lshift__.Scalar: _shift(shift_left, 1),
        aten.__rshift__.Tensor: _shift(shift_right, -1),
        aten.__rshift__.Scalar: _shift(shift_right, -1),
    }
)
for _name, _formula in {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}.items():
    _packet = getattr(aten, f"bitwise_{_name}")
    elementwise_table({_packet.Tensor: _formula, _packet.Scalar: _formula, _packet.Scalar_Tensor: _formula})


def gcd(x: jax.Array, y: jax.Array) -> jax.Array:
    """Greatest common divisor, by Euclid; gcd(0, 0) is 0."""
    zero = num(0, x)

    def more(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lax.reduce_or(lax.ne(state[1], zero), tuple(range(x.ndim)))

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        a, b = state
        done = lax.eq(b, zero)
        rest = lax.rem(a, lax.select(done, lax.full_like(b, 1), b))
        return lax.select(done, a, b), lax.select(done, b, rest)

    return lax.while_loop(more, step, (_magnitude(x), _magnitude(y)))[0]


def lcm(x: jax.Array, y: jax.Array) -> jax.Array:
    divisor = gcd(x, y)
    zero = lax.eq(divisor, num(0, x))
    quotient = lax.div(x, lax.select(zero, lax.full_like(x, 1), divisor))
    # C's arithmetic is that of int: in narrower types the sign goes before the product wraps
    wide = np.int32 if is_signed(x) and x.dtype.itemsize < 4 else x.dtype
    product = lax.mul(lax.convert_element_type(quotient, wide), lax.convert_element_type(y, wide))
    return lax.select(zero, lax.full_like(x, 0), lax.convert_element_type(_magnitude(product), x.dtype))


def _magnitude(x: jax.Array) -> jax.Array:
    return lax.abs(x) if is_signed(x) else x


elementwise_table({aten.gcd.default: gcd, aten.lcm.default: lcm})


@lower(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
def isin(ctx: Context, elements: Any, tested: Any, *, assume_unique: bool = False, invert: bool = False) -> jax.Array:
    shape = ctx.result.shape
    column = lax.expand_dims(elements, (len(shape),)) if isinstance(elements, jax.Array) else elements
    row = lax.reshape(tested, (tested.size,)) if isinstance(tested, jax.Array) and tested.ndim else tested
    count = tested.size if isinstance(tested, jax.Array) else 1
    pairs, _ = promoted(NO_OPMATH, (*shape, count), column, row)
    found = lax.reduce_or(lax.eq(*pairs), (len(shape),))
    return lax.bitwise_not(found) if invert else found
