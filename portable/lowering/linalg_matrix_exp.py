"""The matrix exponential: scaling, a Taylor polynomial of degree 18 in five products, squaring.

Bader, Blanes and Casas, "Computing the Matrix Exponential with an Optimized Taylor Polynomial Approximation"
(Mathematics 2019, 7, 1174): the coefficients are those of their T18, the norms up to which its backward error stays
below half a unit in the last place are those of their table 2. torch's kernel evaluates the same polynomial.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.linalg import identity_like
from portable.lowering.registry import lower

aten = torch.ops.aten
THETA = {
    "float64": 1.090863719290036,
    "complex128": 1.090863719290036,
}
# Row by row: the polynomials B1 … B5 in (1, x, x², x³, x⁶).
T18 = (
    (0.0, -1.00365581030144618291e-01, -8.02924648241156932449e-03, -8.92138498045729985177e-04, 0.0),
    (
        0.0,
        3.97849749499645077844e-01,
        1.36783778460411720168e00,
        4.98289622525382669416e-01,
        -6.37898194594723280150e-04,
    ),
    (
        -1.09676396052962061844e01,
        1.68015813878906206114e00,
        5.71779846478865511061e-02,
        -6.98210122488052056106e-03,
        3.34975017086070470649e-05,
    ),
    (
        -9.04316832390810593223e-02,
        -6.76404519071381882256e-02,
        6.75961301770459654925e-02,
        2.95552570429315521194e-02,
        -1.39180257516060693404e-05,
    ),
    (0.0, 0.0, -9.23364619367118555360e-02, -1.69364939002081722752e-02, -1.40086798182036094347e-05),
)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _taylor(x: jax.Array) -> jax.Array:
    """T18(x) = B2 + (B3 + A) A with A = B1 B5 + B4."""
    square = _product(x, x)
    cube = _product(x, square)
    powers = (identity_like(x), x, square, cube, _product(cube, cube))

    def combined(row: tuple[float, ...]) -> jax.Array:
        return functools.reduce(jnp.add, (c * p for c, p in zip(row, powers, strict=True) if c))

    b1, b2, b3, b4, b5 = map(combined, T18)
    a = _product(b1, b5) + b4
    return b2 + _product(b3 + a, a)


@lower(aten.linalg_matrix_exp.default)
def matrix_exp(ctx: Context, x: jax.Array) -> jax.Array:
    if x.size == 0:
        return x
    if x.dtype not in (jnp.float64, jnp.complex128):
        ctx.refuse(
            "its rounding in less than float64 cannot be reproduced (torch's own error reaches 1e-3): use float64"
        )
    if x.shape[-1] == 1:
        return lax.exp(x)
    norm = jnp.max(jnp.sum(jnp.abs(x), axis=-2), axis=-1)
    exponent = jnp.ceil(jnp.log2(norm / THETA[x.dtype.name]))
    squarings = jnp.clip(jnp.where(jnp.isfinite(exponent), exponent, 0), 0, 1100).astype(jnp.int32)
    scale = jnp.exp2(-squarings.astype(norm.dtype))
    start = _taylor(x * scale[..., None, None].astype(x.dtype))

    def square(i: jax.Array, out: jax.Array) -> jax.Array:
        return jnp.where((i < squarings)[..., None, None], _product(out, out), out)

    return lax.fori_loop(0, jnp.max(squarings), square, start)
