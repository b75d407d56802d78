"""Eigenvalues and singular values.

The sign or phase of a vector is open in torch; on the host it is eager's, elsewhere that of XLA's own algorithm.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering import lapack
from portable.lowering.context import Context
from portable.lowering.linalg import adjoint, identity_like
from portable.lowering.registry import lower

aten = torch.ops.aten


@lower(aten._linalg_eigh.default)
def eigh(ctx: Context, x: jax.Array, UPLO: str = "L", compute_v: bool = True) -> tuple[jax.Array, ...]:
    if x.size == 0:
        return tuple(jnp.zeros(r.shape, r.jax_dtype) for r in ctx.result)
    lower = UPLO.upper() == "L"
    if lapack.here(ctx):
        values, vectors, info = lapack.eigh(x, lower=lower, vectors=compute_v)
        ctx.check(lax.reduce_max(info, tuple(range(info.ndim))), _refuse_unconverged, lax.max)
    else:
        vectors, values = ctx.alone(functools.partial(lax.linalg.eigh, lower=lower, symmetrize_input=False), x)
    return values, vectors if compute_v else jnp.zeros((0,), x.dtype)


def _refuse_unconverged(info: torch.Tensor) -> None:
    if info:
        raise torch.linalg.LinAlgError(
            "linalg.eigh: The algorithm failed to converge because the input matrix is ill-conditioned or has too many "
            f"repeated eigenvalues (error code: {info.item()})."
        )


@lower(aten.linalg_eig.default)
def eig(ctx: Context, x: jax.Array) -> tuple[jax.Array, ...]:
    if x.size == 0:
        return tuple(jnp.zeros(r.shape, r.jax_dtype) for r in ctx.result)
    values, vectors = ctx.alone(functools.partial(lax.linalg.eig, compute_left_eigenvectors=False), x)
    return values, vectors


@lower(aten._linalg_eigvals.default)
def eigvals(ctx: Context, x: jax.Array) -> jax.Array:
    if x.size == 0:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    roots = functools.partial(lax.linalg.eig, compute_left_eigenvectors=False, compute_right_eigenvectors=False)
    values: jax.Array = ctx.alone(roots, x)[0]
    return values


def _refuse_nan(found: torch.Tensor) -> None:
    if found:
        raise torch.linalg.LinAlgError(
            "linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values."
        )


def singular(ctx: Context, x: jax.Array, full: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """U, S and V^H; where a dimension is empty U and V are the identity."""
    m, n = x.shape[-2:]
    if x.size == 0:
        k = min(m, n)
        batch = x.shape[:-2]
        u = identity_like(jnp.zeros((*batch, m, m if full else k), x.dtype))
        vh = identity_like(jnp.zeros((*batch, n if full else k, n), x.dtype))
        return u, jnp.zeros((*batch, k), jnp.zeros((), x.dtype).real.dtype), vh
    if lapack.here(ctx):
        u, s, vh, _ = lapack.svd(x, full=full)
    else:
        u, s, vh = ctx.alone(functools.partial(lax.linalg.svd, full_matrices=full), x)
    return u, s, vh


@lower(aten._linalg_svd.default)
def svd(
    ctx: Context, x: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    ctx.check(jnp.any(lax.ne(x, x)), _refuse_nan, lax.bitwise_or)
    if compute_uv:
        return singular(ctx, x, full_matrices)
    absent = jnp.zeros((0,), x.dtype)
    s = ctx.alone(functools.partial(lax.linalg.svd, compute_uv=False), x) if x.size else singular(ctx, x, False)[1]
    return absent, s, absent


@lower(aten.linalg_pinv.atol_rtol_tensor)
def pinv(
    ctx: Context,
    x: jax.Array,
    *,
    atol: jax.Array | None = None,
    rtol: jax.Array | None = None,
    hermitian: bool = False,
) -> jax.Array:
    """``V S⁻¹ U^H`` over the singular values above ``max(atol, rtol · σ₁)``.

    rtol is ``max(m, n) · eps`` where neither is given, 0 where atol alone is and is positive.
    """
    if x.size == 0:
        return jnp.zeros(ctx.result.shape, x.dtype)
    if hermitian:
        vectors, values = ctx.alone(functools.partial(lax.linalg.eigh, symmetrize_input=False), x)
        size, u, vh = lax.abs(values), vectors, adjoint(vectors)
        largest = lax.reduce_max(size, (size.ndim - 1,))
    else:
        u, values, vh = ctx.alone(functools.partial(lax.linalg.svd, full_matrices=False), x)
        size, largest = values, values[..., 0]
    kind = size.dtype
    default = jnp.asarray(max(x.shape[-2:]) * jnp.finfo(kind).eps, kind)
    atol = jnp.zeros((), kind) if atol is None else atol
    given = atol > 0
    if rtol is None:
        rtol = jnp.where(given, 0.0, default)
    bound = lax.max(*jnp.broadcast_arrays(*_promoted(atol, rtol * largest)))
    inverse = jnp.where(size > bound[..., None], 1 / values, jnp.zeros_like(values)).astype(x.dtype)
    return jnp.matmul(adjoint(vh) * inverse[..., None, :], adjoint(u), precision=lax.Precision.HIGHEST)


def _promoted(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    kind = jnp.promote_types(x.dtype, y.dtype)
    return x.astype(kind), y.astype(kind)
