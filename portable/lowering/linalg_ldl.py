"""LDL factorization with Bunch and Kaufman's diagonal pivoting, and its solves: LAPACK's ?sytrf and ?sytrs (?hetrf and
?hetrs where Hermitian) of the lower triangle.

One column, or a block of two, is eliminated a step; pivots are LAPACK's: ``p > 0`` is a 1×1 block whose row was
exchanged with row ``p``, two times ``-p`` a 2×2 block whose second row was. The rows of finished columns of L are not
exchanged. Of a matrix with NaN the pivots are not those of every LAPACK: they differ between LAPACKs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering.assertions import check_info
from portable.lowering.context import Context
from portable.lowering.linalg import same_batch, triangle
from portable.lowering.registry import lower

aten = torch.ops.aten
ALPHA = (1 + math.sqrt(17)) / 8  # bounds the growth of elements over a 1×1 and a 2×2 step alike


def _size(x: jax.Array) -> jax.Array:
    """LAPACK's cheap absolute value: ``|re| + |im|``."""
    return lax.abs(lax.real(x)) + lax.abs(lax.imag(x)) if jnp.iscomplexobj(x) else lax.abs(x)


def _batched(function: Callable[..., Any], x: jax.Array, *others: jax.Array) -> Any:
    for _ in range(x.ndim - 2):
        function = jax.vmap(function)
    return function(x, *others)


def _mirrored(x: jax.Array, hermitian: bool) -> jax.Array:
    """The whole matrix, from its lower triangle."""
    below = jnp.tril(x, -1)
    main = jnp.diagonal(x)
    if hermitian:
        main = lax.real(main).astype(x.dtype)
    return below + jnp.diag(main) + (lax.conj(below) if hermitian else below).T


def _pivot(rest: jax.Array, k: jax.Array, hermitian: bool) -> tuple[jax.Array, ...]:
    """How to go on at column ``k``: which row to exchange, whether by a 1×1 block, whether there is nothing to do."""
    index = jnp.arange(rest.shape[0], dtype=jnp.int32)
    on_diagonal = lax.abs(lax.real(jnp.diagonal(rest))) if hermitian else _size(jnp.diagonal(rest))
    here = on_diagonal[k]
    column = jnp.where(index > k, _size(rest[:, k]), -1)
    other = jnp.argmax(column).astype(jnp.int32)
    largest = lax.max(column[other], jnp.zeros((), column.dtype))
    in_row = jnp.max(jnp.where((index >= k) & (index != other), _size(rest[:, other]), 0))
    nothing = (lax.max(here, largest) == 0) | jnp.isnan(here)
    keep = nothing | (here >= ALPHA * largest) | (here >= ALPHA * largest * (largest / in_row))
    single = keep | (on_diagonal[other] >= ALPHA * in_row)
    return jnp.where(keep, k, other), single, nothing


def _factor(x: jax.Array, *, hermitian: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One matrix: L below D in one matrix, pivots and info."""
    n = x.shape[0]
    index = jnp.arange(n, dtype=jnp.int32)
    flip = lax.conj if hermitian else lambda v: v

    def step(state: Any) -> Any:
        k, rest, ld, pivots, info = state
        target, single, nothing = _pivot(rest, k, hermitian)
        source = jnp.where(single, k, k + 1)
        order = jnp.where(index == source, target, jnp.where(index == target, source, index))
        rest = rest[order][:, order]
        after = jnp.where(single, k, k + 1)
        beyond = (index > after)[:, None]
        pair = jnp.where(beyond, jnp.stack([rest[:, k], rest[:, k + 1]], axis=1), 0)
        a, b, c = rest[k, k], rest[k + 1, k], rest[k + 1, k + 1]

        one = jnp.stack([pair[:, 0] * (1 / a), jnp.zeros((n,), x.dtype)], axis=1)
        scale = jnp.sqrt(lax.real(b) ** 2 + lax.imag(b) ** 2).astype(x.dtype) if hermitian else b
        d11, d22, d21 = c / scale, a / scale, b / scale
        t = 1 / (d11 * d22 - 1) / scale
        two = jnp.stack([t * (d11 * pair[:, 0] - d21 * pair[:, 1]), t * (d22 * pair[:, 1] - flip(d21) * pair[:, 0])], 1)
        factor = jnp.where(beyond, jnp.where(nothing, pair, jnp.where(single, one, two)), 0)

        columns = jnp.where((index == k)[:, None], jnp.stack([a, jnp.zeros_like(a)]), factor)
        second = jnp.where((index == k + 1)[:, None], jnp.stack([b, c]), columns)
        columns = jnp.where(single, columns, second)
        ld = jnp.where(index == k, columns[:, :1], jnp.where(~single & (index == k + 1), columns[:, 1:], ld))
        used = jnp.where(single, jnp.where(jnp.array([True, False]), pair, 0), pair)
        update = used[:, 0][:, None] * flip(factor[:, 0])[None] + used[:, 1][:, None] * flip(factor[:, 1])[None]
        rest = jnp.where(nothing, rest, rest - update)
        rest = jnp.where(beyond & beyond.T, rest, 0)
        if hermitian:
            main = index[:, None] == index
            rest = jnp.where(main, lax.real(rest).astype(x.dtype), rest)
        named = jnp.where(single, target + 1, -(target + 1))
        pivots = jnp.where((index == k) | (index == after), named, pivots)
        return after + 1, rest, ld, pivots, jnp.where(nothing & (info == 0), k + 1, info)

    zero = jnp.zeros((), jnp.int32)
    start = (zero, _mirrored(x, hermitian), jnp.zeros_like(x), jnp.zeros((n,), jnp.int32), zero)
    _, _, ld, pivots, info = lax.while_loop(lambda state: state[0] < n, step, start)
    return ld, pivots, info


@lower(aten.linalg_ldl_factor_ex.default)
def ldl_factor_ex(
    ctx: Context, x: jax.Array, *, hermitian: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if x.size == 0:
        return x, jnp.zeros(x.shape[:-1], jnp.int32), jnp.zeros(x.shape[:-2], jnp.int32)
    hermitian = hermitian and jnp.iscomplexobj(x)
    ld, pivots, info = _batched(functools.partial(_factor, hermitian=hermitian), triangle(x, lower=True))
    if check_errors:
        check_info(ctx, info, "torch.linalg.ldl_factor_ex", is_matrix=x.ndim == 2)
    return ld, pivots, info


def _exchanged(b: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """The rows ``i`` and ``j`` of ``b`` exchanged."""
    index = jnp.arange(b.shape[0], dtype=jnp.int32)
    return b[jnp.where(index == i, j, jnp.where(index == j, i, index))]


def _solve(ld: jax.Array, b: jax.Array, pivots: jax.Array, *, hermitian: bool) -> jax.Array:
    """One matrix: ``L D``, then the transpose of L, with the exchanges of rows in between."""
    n = ld.shape[0]
    index = jnp.arange(n, dtype=jnp.int32)
    flip = lax.conj if hermitian else lambda v: v

    def forward(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        k, b = state
        single = pivots[k] > 0
        after = jnp.where(single, k, k + 1)
        b = _exchanged(b, after, jnp.abs(pivots[k]) - 1)
        top, bottom = b[k], b[k + 1]
        known = ld[:, k, None] * top + jnp.where(single, 0, ld[:, k + 1, None] * bottom)
        b = jnp.where((index > after)[:, None], b - known, b)
        corner, link = ld[k, k], ld[k + 1, k]
        d11, d22 = corner / flip(link), ld[k + 1, k + 1] / link
        upper, lower = top / flip(link), bottom / link
        determinant = d11 * d22 - 1
        one = top / (lax.real(corner).astype(b.dtype) if hermitian else corner)
        b = jnp.where((index == k)[:, None], jnp.where(single, one, (d22 * upper - lower) / determinant), b)
        return after + 1, jnp.where((~single & (index == k + 1))[:, None], (d11 * lower - upper) / determinant, b)

    def backward(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        k, b = state
        single = pivots[k] > 0

        def row(j: jax.Array) -> jax.Array:
            return b[j] - jnp.sum(jnp.where((index > k)[:, None], flip(ld[:, j, None]) * b, 0), axis=0)

        before = jnp.where(single, k, k - 1)
        solved = jnp.where((index == k)[:, None], row(k), jnp.where((index == before)[:, None], row(before), b))
        return before - 1, _exchanged(solved, k, jnp.abs(pivots[k]) - 1)

    b = lax.while_loop(lambda state: state[0] < n, forward, (jnp.int32(0), b))[1]
    return lax.while_loop(lambda state: state[0] >= 0, backward, (jnp.int32(n - 1), b))[1]


@lower(aten.linalg_ldl_solve.default)
def ldl_solve(ctx: Context, ld: jax.Array, pivots: jax.Array, b: jax.Array, *, hermitian: bool = False) -> jax.Array:
    ld, b, pivots = same_batch(ld, b, pivots[..., None])
    if b.size == 0 or ld.size == 0:
        return b
    hermitian = hermitian and jnp.iscomplexobj(ld)
    solve = functools.partial(_solve, hermitian=hermitian)
    solution: jax.Array = _batched(solve, ld, b, pivots[..., 0].astype(jnp.int32))
    return solution
