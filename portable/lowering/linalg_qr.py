"""Householder reflections and QR."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.linalg import identity_like, triangle
from portable.lowering.registry import lower

aten = torch.ops.aten


def reflectors(ctx: Context, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """LAPACK's geqrf: R above the Householder vectors in one matrix, and their scales tau."""
    from jax._src.lax.linalg import geqrf

    if x.size == 0:
        return x, jnp.zeros((*x.shape[:-2], min(x.shape[-2:])), x.dtype)
    packed, tau = ctx.alone(geqrf, x)
    return packed, tau


def product_of(ctx: Context, vectors: jax.Array, tau: jax.Array) -> jax.Array:
    """The first columns of the product of the reflections (LAPACK's orgqr)."""
    if vectors.size == 0:
        return vectors
    if tau.shape[-1] == 0:
        return identity_like(vectors)
    product: jax.Array = ctx.alone(lax.linalg.householder_product, vectors, tau)
    return product


@lower(aten.geqrf.default)
def geqrf_(ctx: Context, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return reflectors(ctx, x)


@lower(aten.linalg_qr.default)
def qr(ctx: Context, x: jax.Array, mode: str = "reduced") -> tuple[jax.Array, jax.Array]:
    m, n = x.shape[-2:]
    packed, tau = reflectors(ctx, x)
    k = m if mode == "complete" else min(m, n)
    r = triangle(packed[..., :k, :], lower=False)
    if mode == "r":
        return jnp.zeros((0,), x.dtype), r
    vectors = packed[..., :, :k]
    if k > n:
        vectors = jnp.concatenate([vectors, jnp.zeros((*x.shape[:-1], k - n), x.dtype)], axis=-1)
    return product_of(ctx, vectors, tau), r


@lower(aten.linalg_householder_product.default)
def householder_product(ctx: Context, vectors: jax.Array, tau: jax.Array) -> jax.Array:
    return product_of(ctx, vectors, tau)


@lower(aten.ormqr.default)
def ormqr(
    ctx: Context, vectors: jax.Array, tau: jax.Array, x: jax.Array, left: bool = True, transpose: bool = False
) -> jax.Array:
    if x.size == 0 or tau.size == 0:
        return x
    multiply = functools.partial(lax.linalg.ormqr, left=left, transpose=transpose)
    product: jax.Array = ctx.alone(multiply, vectors, tau, x)
    return product
