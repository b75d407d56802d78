"""Triangular solves, cross products, and what all families of linear algebra share.

LAPACK runs through JAX's primitives, which XLA:CPU serves by the same LAPACK routines that torch calls (getrf, potrf,
geqrf, syevd, gesdd, geev, trsm); other platforms have implementations of their own. LAPACK's info is computed from the
factors. Where eager raises LinAlgError (a singular matrix, say) so does the call, once the program has run.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import NO_OPMATH, broadcast, elementwise, lower

aten = torch.ops.aten


def transposed(x: jax.Array) -> jax.Array:
    """The last two axes swapped."""
    return lax.transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of the last two axes."""
    x = transposed(x)
    return lax.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def same_batch(*matrices: jax.Array) -> list[jax.Array]:
    """Matrices with their batch axes broadcast against each other."""
    batch = jnp.broadcast_shapes(*(x.shape[:-2] for x in matrices))
    return [broadcast(x, batch + x.shape[-2:]) for x in matrices]


def triangle(x: jax.Array, *, lower: bool, unit: bool = False) -> jax.Array:
    """The triangle of ``x``, zero elsewhere; with ones on the diagonal where ``unit``."""
    row = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 2)
    column = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    if unit:
        x = lax.select(lax.eq(row, column), lax.full_like(x, 1), x)
    return lax.select(lax.ge(row, column) if lower else lax.le(row, column), x, lax.full_like(x, 0))


def diagonal(x: jax.Array) -> jax.Array:
    """The main diagonal of the last two axes."""
    k = min(x.shape[-2:])
    x = x[..., :k, :k]
    row = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 2)
    column = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return lax.reduce_sum(lax.select(lax.eq(row, column), x, lax.full_like(x, 0)), (x.ndim - 1,))


def identity_like(x: jax.Array) -> jax.Array:
    """The identity in the shape of ``x``."""
    row = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 2)
    return lax.convert_element_type(lax.eq(row, lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)), x.dtype)


def solve_triangular(
    ctx: Context,
    a: jax.Array,
    b: jax.Array,
    *,
    lower: bool,
    left: bool = True,
    unit: bool = False,
    transpose: bool = False,
    conjugate: bool = False,
) -> jax.Array:
    """``op(a) x = b`` (``x op(a) = b`` where not ``left``); ``lower`` says which triangle of ``a`` itself is read."""
    a, b = same_batch(a, b)
    if 0 in a.shape or 0 in b.shape:
        return b
    conjugate = conjugate and jnp.issubdtype(a.dtype, jnp.complexfloating)
    solve = functools.partial(
        lax.linalg.triangular_solve,
        left_side=left,
        lower=lower,
        transpose_a=transpose,
        conjugate_a=conjugate,
        unit_diagonal=unit,
    )
    solution: jax.Array = ctx.alone(solve, a, b)
    return solution


@lower(aten.linalg_solve_triangular.default)
def linalg_solve_triangular(
    ctx: Context, a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    return solve_triangular(ctx, a, b, lower=not upper, left=left, unit=unitriangular)


@lower(aten.triangular_solve.default)
def triangular_solve(
    ctx: Context, b: jax.Array, a: jax.Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[jax.Array, jax.Array]:
    a, b = same_batch(a, b)
    return solve_triangular(ctx, a, b, lower=not upper, transpose=transpose, unit=unitriangular), a


@elementwise(aten.linalg_cross.default, promote=NO_OPMATH, operands=(0, 1))
def _cross(x: jax.Array, y: jax.Array, *, dim: int = -1) -> jax.Array:
    """torch rounds half precision after each operation here."""
    axis = dim % x.ndim
    (x0, x1, x2), (y0, y1, y2) = ([lax.slice_in_dim(v, i, i + 1, axis=axis) for i in range(3)] for v in (x, y))
    parts = ((x1, y2, x2, y1), (x2, y0, x0, y2), (x0, y1, x1, y0))
    return lax.concatenate([lax.sub(lax.mul(a, b), lax.mul(c, d)) for a, b, c, d in parts], axis)


def first(failed: jax.Array) -> jax.Array:
    """LAPACK's info: the 1-based position of the first True along the last axis, 0 where there is none."""
    n = failed.shape[-1]
    if n == 0:
        return jnp.zeros(failed.shape[:-1], jnp.int32)
    position = lax.broadcasted_iota(jnp.int32, failed.shape, failed.ndim - 1)
    found = lax.reduce_min(lax.select(failed, position, lax.full_like(position, n)), (failed.ndim - 1,))
    return jnp.where(found == n, 0, found + 1).astype(jnp.int32)
