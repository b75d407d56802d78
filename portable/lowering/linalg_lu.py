"""LU with partial pivoting, and what torch computes from it: solve, inv, det, slogdet."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from portable.lowering.assertions import check_info
from portable.lowering.context import Context
from portable.lowering.linalg import (
    adjoint,
    diagonal,
    first,
    identity_like,
    same_batch,
    solve_triangular,
    transposed,
    triangle,
)
from portable.lowering.registry import lower

aten = torch.ops.aten


def factor(ctx: Context, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """LAPACK's getrf: L (unit diagonal) below U in one matrix, and 1-based int32 pivots."""
    if x.size == 0:
        return x, jnp.ones((*x.shape[:-2], min(x.shape[-2:])), jnp.int32)
    lu, pivots, _ = ctx.alone(lax.linalg.lu, x)
    return lu, pivots + 1


def _info(ctx: Context, lu: jax.Array, checked_as: str | None) -> jax.Array:
    """getrf's info: the position of the first pivot that is exactly zero; an error where it is checked."""
    d = diagonal(lu)
    info = first(lax.eq(d, lax.full_like(d, 0)))
    if checked_as:
        check_info(ctx, info, checked_as, is_matrix=lu.ndim == 2)
    return info


def permutation(pivots: jax.Array, rows: int) -> jax.Array:
    """The row of ``x`` that each row of ``L U`` is."""
    if pivots.shape[-1] == 0 or pivots.size == 0:
        return lax.broadcasted_iota(jnp.int32, (*pivots.shape[:-1], rows), pivots.ndim - 1)
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, rows)


def unpack(lu: jax.Array) -> tuple[jax.Array, jax.Array]:
    """L (unit diagonal) and U."""
    k = min(lu.shape[-2:])
    return triangle(lu[..., :, :k], lower=True, unit=True), triangle(lu[..., :k, :], lower=False)


def permutation_matrix(permuted: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """P of ``x = P L U``."""
    rows = permuted.shape[-1]
    row = lax.broadcasted_iota(jnp.int32, (*permuted.shape, rows), permuted.ndim - 1)
    return lax.convert_element_type(lax.eq(row, permuted[..., None, :].astype(jnp.int32)), dtype)


def solve_factored(
    ctx: Context, lu: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint_of: bool = False
) -> jax.Array:
    """Solve ``op(A) X = B``, or ``X op(A) = B``, where op is the adjoint if ``adjoint_of``."""
    if not left:
        return adjoint(solve_factored(ctx, lu, pivots, adjoint(b), adjoint_of=not adjoint_of))
    lu, b, pivots = same_batch(lu, b, pivots[..., None])
    if b.size == 0:
        return b
    permuted = permutation(pivots[..., 0], lu.shape[-1])
    if adjoint_of:
        inner = solve_triangular(ctx, lu, b, lower=False, transpose=True, conjugate=True)
        inner = solve_triangular(ctx, lu, inner, lower=True, transpose=True, conjugate=True, unit=True)
        return jnp.take_along_axis(inner, jnp.argsort(permuted, axis=-1)[..., None], axis=-2)
    inner = jnp.take_along_axis(b, permuted[..., None], axis=-2)
    inner = solve_triangular(ctx, lu, inner, lower=True, unit=True)
    return solve_triangular(ctx, lu, inner, lower=False)


@functools.cache
def _factors_transpose(op: OpOverload, position: int) -> bool:
    """Whether torch's ``op`` factors the transpose of a real, contiguous matrix: versions of torch differ."""
    with _disable_current_modes():
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        arguments = (x, x) if op is aten._linalg_solve_ex.default else (x,)
        return bool(op(*arguments)[position][0, 0] == 2)


def _torch_factor(ctx: Context, x: jax.Array, position: int) -> tuple[jax.Array, jax.Array, bool]:
    """`factor` of what torch factors: the op's first argument or its transpose, as the third result says.

    The LU is a result of the op (at ``position``) that the gradient reads, with the same rule.
    """
    strides = ctx.strides[0] if ctx.strides else None
    contiguous = strides is None or _is_contiguous(x.shape, strides)
    real = not jnp.issubdtype(x.dtype, jnp.complexfloating)
    flipped = real and contiguous and _factors_transpose(ctx.op, position)
    return (*factor(ctx, transposed(x) if flipped else x), flipped)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True
    return all(n == 1 or s == math.prod(shape[i + 1 :]) for i, (n, s) in enumerate(zip(shape, strides, strict=True)))


@lower(aten.linalg_lu_factor_ex.default)
def lu_factor_ex(
    ctx: Context, x: jax.Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if not pivot:
        ctx.refuse("LU without pivoting does not exist on the CPU in torch either")
    lu, pivots = factor(ctx, x)
    return lu, pivots, _info(ctx, lu, "torch.linalg.lu_factor_ex" if check_errors else None)


@lower(aten.linalg_lu.default)
def lu(ctx: Context, x: jax.Array, *, pivot: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    if not pivot:
        ctx.refuse("LU without pivoting does not exist on the CPU in torch either")
    packed, pivots = factor(ctx, x)
    return (permutation_matrix(permutation(pivots, x.shape[-2]), x.dtype), *unpack(packed))


@lower(aten.lu_unpack.default)
def lu_unpack(
    ctx: Context, packed: jax.Array, pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[jax.Array, ...]:
    absent = jnp.zeros((0,), packed.dtype)
    p = permutation_matrix(permutation(pivots, packed.shape[-2]), packed.dtype) if unpack_pivots else absent
    return (p, *(unpack(packed) if unpack_data else (absent, absent)))


@lower(aten.linalg_lu_solve.default)
def lu_solve(
    ctx: Context,
    packed: jax.Array,
    pivots: jax.Array,
    b: jax.Array,
    *,
    left: bool = True,
    adjoint: bool = False,
) -> jax.Array:
    return solve_factored(ctx, packed, pivots, b, left=left, adjoint_of=adjoint)


@lower(aten._linalg_solve_ex.default)
def solve_ex(
    ctx: Context, a: jax.Array, b: jax.Array, *, left: bool = True, check_errors: bool = False
) -> tuple[jax.Array, ...]:
    packed, pivots, flipped = _torch_factor(ctx, a, 1)
    is_vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    column = b[..., None] if is_vector else b
    x = solve_factored(ctx, packed, pivots, column, left=left or is_vector, adjoint_of=flipped)
    info = _info(ctx, packed, "linalg.solve_ex" if check_errors else None)
    return x[..., 0] if is_vector else x, packed, pivots, info


@lower(aten.linalg_inv_ex.default)
def inv_ex(ctx: Context, a: jax.Array, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    packed, pivots = factor(ctx, a)
    return solve_factored(ctx, packed, pivots, identity_like(a)), _info(
        ctx, packed, "linalg.inv_ex" if check_errors else None
    )


def _parity(pivots: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The sign of the permutation: -1 for an odd number of row exchanges."""
    place = lax.broadcasted_iota(jnp.int32, pivots.shape, pivots.ndim - 1) + 1
    odd = lax.rem(lax.reduce_sum((pivots != place).astype(jnp.int32), (pivots.ndim - 1,)), jnp.int32(2))
    return (1 - 2 * odd).astype(dtype)


@lower(aten._linalg_det.default)
def det(ctx: Context, a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    packed, pivots, _ = _torch_factor(ctx, a, 1)
    d = diagonal(packed)
    return lax.mul(_parity(pivots, a.dtype), lax.reduce_prod(d, (d.ndim - 1,))), packed, pivots


@lower(aten._linalg_slogdet.default)
def slogdet(ctx: Context, a: jax.Array) -> tuple[jax.Array, ...]:
    packed, pivots, _ = _torch_factor(ctx, a, 2)
    d = diagonal(packed)
    sign = lax.mul(_parity(pivots, a.dtype), lax.reduce_prod(lax.sign(d), (d.ndim - 1,)))
    return sign, lax.reduce_sum(lax.log(lax.abs(d)), (d.ndim - 1,)), packed, pivots
