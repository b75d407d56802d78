"""The matrix exponential: scaling, a Taylor polynomial of degree 16, squaring.

Paterson and Stockmeyer's scheme ("On the number of nonscalar multiplications necessary to evaluate polynomials", 1973)
evaluates the polynomial in six products. Its remainder x¹⁷/17! stays below half a unit in the last place of float64 for
norms up to THETA. float32 is computed in float64: squaring amplifies rounding errors, where elements cancel, beyond
what two implementations would agree on.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.linalg import identity_like
from portable.lowering.registry import lower

aten = torch.ops.aten
DEGREE = 16
THETA = 0.75


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _taylor(x: jax.Array) -> jax.Array:
    """The sum of xᵏ/k! up to DEGREE: Horner's rule in x⁴ over blocks of four powers."""
    powers = [identity_like(x), x]
    while len(powers) <= 4:
        powers.append(_product(powers[-1], x))
    out = powers[4] / math.factorial(DEGREE)
    for start in range(DEGREE - 4, -1, -4):
        for k in range(4):
            out = out + powers[k] / math.factorial(start + k)
        out = _product(out, powers[4]) if start else out
    return out


@lower(aten.linalg_matrix_exp.default)
def matrix_exp(ctx: Context, x: jax.Array) -> jax.Array:
    if x.size == 0:
        return x
    if x.shape[-1] == 1:
        return lax.exp(x)
    if x.dtype in (jnp.bfloat16, jnp.float16):
        ctx.refuse("torch's half precision result is NaN for all but small norms: convert to float32")
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float64))
    norm = jnp.max(jnp.sum(jnp.abs(wide), axis=-2), axis=-1)
    exponent = jnp.ceil(jnp.log2(norm / THETA))
    squarings = jnp.clip(jnp.where(jnp.isfinite(exponent), exponent, 0), 0, 1100).astype(jnp.int32)
    scale = jnp.exp2(-squarings.astype(norm.dtype))
    start = _taylor(wide * scale[..., None, None].astype(wide.dtype))

    def square(i: jax.Array, out: jax.Array) -> jax.Array:
        return jnp.where((i < squarings)[..., None, None], _product(out, out), out)

    return lax.fori_loop(0, jnp.max(squarings), square, start).astype(x.dtype)
