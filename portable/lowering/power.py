"""Powers of integers, floats and complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch._prims_common import get_computation_dtype

from portable.lowering.context import Context
from portable.lowering.elementwise import is_complex, is_signed, num, where
from portable.lowering.registry import DEFAULT, apply_elementwise, cast, described, lower, narrowed
from portable.lowering.transcendental import reciprocal, rsqrt, sqrt

aten = torch.ops.aten


def pow_int(x: jax.Array, y: jax.Array) -> jax.Array:
    """Integer power by repeated squaring; a negative exponent gives 0, except of 1 and -1."""
    one, zero = num(1, x), num(0, x)

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        result, base, exponent = state
        odd = lax.ne(lax.bitwise_and(exponent, one), zero)
        result = lax.select(odd, lax.mul(result, base), result)
        return result, lax.mul(base, base), lax.shift_right_logical(exponent, lax.full_like(exponent, 1))

    def more(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return lax.reduce_or(lax.ne(state[2], zero), tuple(range(x.ndim)))

    exponent = lax.max(y, zero) if is_signed(x) else y
    power = lax.while_loop(more, step, (lax.full_like(x, 1), x, exponent))[0]
    if not is_signed(x):
        return power
    even = lax.eq(lax.bitwise_and(y, one), zero)
    inverse = lax.select(even, lax.mul(x, x), x)
    inverse = lax.select(lax.eq(lax.abs(x), one), inverse, lax.full_like(x, 0))
    return lax.select(lax.lt(y, zero), inverse, power)


def power(x: jax.Array, y: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return pow_int(x, y)
    if is_complex(x):
        return _complex_power(x, y)
    return lax.pow(x, y)


def _complex_power(x: jax.Array, y: jax.Array) -> jax.Array:
    """At zero exp(y log 0), as C has it: 0 or infinite by the sign of the exponent's real part, NaN without it."""
    real, imaginary = lax.real(y), lax.imag(y)
    zero = num(0, real)
    at_zero = where(lax.lt(real, zero), complex(np.inf, np.nan), lax.full_like(x, complex(np.nan, np.nan)))
    at_zero = where(lax.gt(real, zero), complex(0, -0.0), at_zero)
    at_zero = where(lax.is_finite(imaginary), at_zero, lax.full_like(x, complex(np.nan, np.nan)))
    return lax.select(lax.eq(x, num(0, x)), at_zero, lax.pow(x, y))


def _refuse_booleans(ctx: Context, x: Any, y: Any) -> None:
    """Torch's CPU kernel gives bool or none, its type inference int64."""
    if all(v.dtype == np.bool_ if isinstance(v, jax.Array) else described(v) is bool for v in (x, y)):
        ctx.refuse("a boolean to the power of a boolean, of which torch gives one type and announces another")


# exponents for which torch has a formula of its own, with other values at -0.0 and -inf than pow
_SPECIAL_POWERS: dict[complex, Callable[[jax.Array], jax.Array]] = {
    0.5: sqrt,
    -0.5: rsqrt,
    2: lax.square,
    3: lambda x: lax.mul(lax.mul(x, x), x),
    -1: reciprocal,
    -2: lambda x: reciprocal(lax.square(x)),
}
# elements that torch's loop over bfloat16 takes at a time
_AT_A_TIME = {"AVX512": 64, "AVX2": 32}


def _rounded_rsqrt(x: jax.Array) -> jax.Array:
    """x ** -0.5 as torch computes it in bfloat16: in elements that do not fill vectors, the root is rounded too."""
    in_steps = reciprocal(narrowed(lax.sqrt(x), torch.bfloat16))
    at_a_time = _AT_A_TIME.get(torch.backends.cpu.get_cpu_capability())
    in_vectors = x.size - x.size % at_a_time if at_a_time else 0
    place = lax.reshape(lax.iota(np.int64, x.size), x.shape)
    return lax.select(lax.lt(place, num(in_vectors, place)), rsqrt(x), in_steps)


# torch's formulas in bfloat16, where they round more than once
_POWERS_IN_BFLOAT16: dict[complex, Callable[[jax.Array], jax.Array]] = {
    -0.5: _rounded_rsqrt,
    3: lambda x: lax.mul(narrowed(lax.square(x), torch.bfloat16), x),
    -2: lambda x: reciprocal(narrowed(lax.square(x), torch.bfloat16)),
}


@lower(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: Context, x: jax.Array, exponent: Any) -> jax.Array:
    if not isinstance(exponent, (bool, int, float, complex)):
        return apply_elementwise(power, DEFAULT, None, ctx, x, exponent)
    _refuse_booleans(ctx, x, exponent)
    if exponent == 0:
        return jnp.ones(ctx.result.shape, ctx.result.jax_dtype)
    if exponent == 1:
        return cast(x, ctx.result.dtype)

    def formula(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return lax.integer_pow(x, int(exponent.real))
        special = _SPECIAL_POWERS.get(exponent)
        if ctx.result.dtype is torch.float16 and exponent in (0.5, -0.5):
            special = None  # torch takes pow there
        if ctx.result.dtype is torch.bfloat16:
            special = _POWERS_IN_BFLOAT16.get(exponent, special)
        return special(x) if special else power(x, lax.full_like(x, num(exponent, ctx.result.jax_dtype)))

    return cast(formula(cast(x, get_computation_dtype(ctx.result.dtype))), ctx.result.dtype)


@lower(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_(ctx: Context, x: Any, y: Any) -> jax.Array:
    _refuse_booleans(ctx, x, y)
    return apply_elementwise(power, DEFAULT, None, ctx, x, y)
