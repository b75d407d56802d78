"""The Cholesky family. A matrix that is not positive-definite gives NaN and LAPACK's info."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.linalg import adjoint, identity_like, same_batch, solve_triangular, triangle
from portable.lowering.registry import lower

aten = torch.ops.aten


def _factor(x: jax.Array, upper: bool) -> jax.Array:
    """The factor, from the named triangle of ``x`` alone; a matrix that has none is all NaN."""
    if x.size == 0:
        return x
    factor = lax.linalg.cholesky(adjoint(x) if upper else x, symmetrize_input=False)
    return adjoint(factor) if upper else factor


def _order_of_failure(x: jax.Array) -> jax.Array:
    """The order of the first leading minor that is not positive, 0 if none: the pivots of an unblocked elimination.

    ``x`` holds its values in the lower triangle.
    """
    n = x.shape[-1]

    def eliminate(j: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rest, info = state
        column = lax.dynamic_index_in_dim(rest, j, rest.ndim - 1, keepdims=False)
        pivot = lax.real(lax.dynamic_index_in_dim(column, j, column.ndim - 1, keepdims=False)) if _is_complex(x) else (
            lax.dynamic_index_in_dim(column, j, column.ndim - 1, keepdims=False)
        )
        failed = (info == 0) & ~(pivot > 0)
        info = jnp.where(failed, (j + 1).astype(jnp.int32), info)
        scaled = column / pivot[..., None].astype(column.dtype)
        conjugate = jnp.conj(column) if _is_complex(x) else column
        return rest - scaled[..., :, None] * conjugate[..., None, :], info

    start = jnp.zeros(x.shape[:-2], jnp.int32)
    return lax.fori_loop(0, n, eliminate, (x, start))[1]


def _is_complex(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


@lower(aten.linalg_cholesky_ex.default)
def cholesky_ex(
    ctx: Context, x: jax.Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array]:
    factor = _factor(x, upper)
    if x.size == 0:
        return factor, jnp.zeros(ctx.result[1].shape, jnp.int32)
    corner = factor[..., 0, 0]
    failed = lax.ne(corner, corner)
    info = lax.cond(
        jnp.any(failed),
        lambda a: jnp.where(failed, _order_of_failure(a), 0),
        lambda a: jnp.zeros(a.shape[:-2], jnp.int32),
        adjoint(x) if upper else x,
    )
    return factor, info


@lower(aten.cholesky.default)
def cholesky(ctx: Context, x: jax.Array, upper: bool = False) -> jax.Array:
    return _factor(x, upper)


@lower(aten.cholesky_inverse.default)
def cholesky_inverse(ctx: Context, factor: jax.Array, upper: bool = False) -> jax.Array:
    """``inverse(L L^H)``, as the product of the inverted factors."""
    if factor.size == 0:
        return factor
    inverse = solve_triangular(factor, identity_like(factor), lower=not upper)
    batch = tuple(range(factor.ndim - 2))
    axes = ((factor.ndim - 2,), (factor.ndim - 2,)) if not upper else ((factor.ndim - 1,), (factor.ndim - 1,))
    left, right = (adjoint(inverse), inverse) if not upper else (inverse, adjoint(inverse))
    del axes
    dims = (((factor.ndim - 1,), (factor.ndim - 2,)), (batch, batch))
    return lax.dot_general(left, right, dims, precision=lax.Precision.HIGHEST)


@lower(aten.cholesky_solve.default, aten._cholesky_solve_helper.default)
def cholesky_solve(ctx: Context, b: jax.Array, factor: jax.Array, upper: bool = False) -> jax.Array:
    factor, b = same_batch(factor, b)
    inner = solve_triangular(factor, b, lower=not upper, transpose=upper, conjugate=True)
    return solve_triangular(factor, inner, lower=not upper, transpose=not upper, conjugate=not upper)
