"""The Cholesky family. A matrix that is not positive-definite gives NaN and LAPACK's info."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering.assertions import check_info
from portable.lowering.context import Context
from portable.lowering.linalg import adjoint, diagonal, first, identity_like, same_batch, solve_triangular
from portable.lowering.registry import lower, lower_library

aten = torch.ops.aten


def _factor(ctx: Context, x: jax.Array, upper: bool) -> jax.Array:
    """The factor, from the named triangle of ``x`` alone; a matrix that has none is all NaN."""
    if x.size == 0:
        return x
    cholesky = functools.partial(lax.linalg.cholesky, symmetrize_input=False)
    factor = ctx.alone(cholesky, adjoint(x) if upper else x)
    return adjoint(factor) if upper else factor


def _order_of_failure(x: jax.Array) -> jax.Array:
    """The order of the first leading minor that is not positive: the pivots of an unblocked elimination.

    The factorization of ``x``, which holds its values in the lower triangle, has failed: where rounding hides it from
    this one, it is the last.
    """

    def eliminate(j: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rest, info = state
        column = lax.dynamic_index_in_dim(rest, j, rest.ndim - 1, keepdims=False)
        pivot = lax.dynamic_index_in_dim(column, j, column.ndim - 1, keepdims=False)
        failed = (info == 0) & ~(jnp.real(pivot) > 0)
        info = jnp.where(failed, lax.convert_element_type(j + 1, jnp.int32), info)
        return rest - (column / pivot[..., None])[..., :, None] * jnp.conj(column)[..., None, :], info

    start = jnp.zeros(x.shape[:-2], jnp.int32)
    info = lax.fori_loop(0, x.shape[-1], eliminate, (x, start))[1]
    return jnp.where(info == 0, jnp.int32(x.shape[-1]), info)


@lower(aten.linalg_cholesky_ex.default)
def cholesky_ex(
    ctx: Context, x: jax.Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array]:
    factor = _factor(ctx, x, upper)
    if x.size == 0:
        return factor, jnp.zeros(x.shape[:-2], jnp.int32)
    info = _info(factor, x, upper)
    if check_errors:
        check_info(ctx, info, "linalg.cholesky_ex", is_matrix=x.ndim == 2)
    return factor, info


def _info(factor: jax.Array, x: jax.Array, upper: bool) -> jax.Array:
    """potrf's info, computed only where a matrix has failed: its diagonal, or all of it, is NaN then."""
    pivots = diagonal(factor)
    failed = lax.reduce_or(lax.ne(pivots, pivots), (pivots.ndim - 1,))
    return lax.cond(
        jnp.any(failed),
        lambda a: jnp.where(failed, _order_of_failure(a), 0),
        lambda a: jnp.zeros(a.shape[:-2], jnp.int32),
        adjoint(x) if upper else x,
    )


@lower_library("aten::cholesky")  # torch 2.14 has none
def cholesky(ctx: Context, x: jax.Array, upper: bool = False) -> jax.Array:
    factor = _factor(ctx, x, upper)
    if x.size:
        check_info(ctx, _info(factor, x, upper), "cholesky", is_matrix=x.ndim == 2)
    return factor


@lower(aten.cholesky_inverse.default)
def cholesky_inverse(ctx: Context, factor: jax.Array, upper: bool = False) -> jax.Array:
    """``inverse(L L^H)``, as the product of the inverted factors."""
    if factor.size == 0:
        return factor
    pivots = diagonal(factor)
    check_info(ctx, first(lax.eq(pivots, lax.full_like(pivots, 0))), "cholesky_inverse", is_matrix=factor.ndim == 2)
    inverse = solve_triangular(ctx, factor, identity_like(factor), lower=not upper)
    batch = tuple(range(factor.ndim - 2))
    left, right = (inverse, adjoint(inverse)) if upper else (adjoint(inverse), inverse)
    dims = (((factor.ndim - 1,), (factor.ndim - 2,)), (batch, batch))
    return lax.dot_general(left, right, dims, precision=lax.Precision.HIGHEST)


@lower(aten.cholesky_solve.default, aten._cholesky_solve_helper.default)
def cholesky_solve(ctx: Context, b: jax.Array, factor: jax.Array, upper: bool = False) -> jax.Array:
    factor, b = same_batch(factor, b)
    inner = solve_triangular(ctx, factor, b, lower=not upper, transpose=upper, conjugate=upper)
    return solve_triangular(ctx, factor, inner, lower=not upper, transpose=not upper, conjugate=not upper)
