"""Matrix products of groups of rows, one matrix a group: a mixture of experts once its tokens are sorted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.matmul import dot
from portable.lowering.registry import cast, lower, lower_library

aten = torch.ops.aten


def group_sizes(offsets: jax.Array) -> jax.Array:
    """int32[groups]: rows of each group, from the cumulative ends of the groups."""
    ends = lax.convert_element_type(offsets, jnp.int32)
    starts = lax.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]], 0)
    return lax.max(lax.sub(ends, starts), jnp.zeros_like(ends))


def rows_by_matrix(ctx: Context, x: jax.Array, y: jax.Array, offsets: jax.Array) -> jax.Array:
    """``x[rows of g] @ y[g]`` for each group g; rows after the last group are zero.

    x: [S, K], y: [G, K, N] → [S, N].
    """
    wide = jnp.float32 if x.dtype in (jnp.bfloat16, jnp.float16) else x.dtype
    out = lax.ragged_dot(x, y, group_sizes(offsets), precision=ctx.precision, preferred_element_type=wide)
    return lax.convert_element_type(out, x.dtype)


def rows_by_rows(ctx: Context, x: jax.Array, y: jax.Array, offsets: jax.Array) -> jax.Array:
    """``x[rows of g]ᵀ @ y[rows of g]`` for each group g. x: [S, K], y: [S, N] → [G, K, N]."""
    ends = lax.convert_element_type(offsets, jnp.int32)
    starts = lax.sub(ends, group_sizes(offsets))
    row = lax.broadcasted_iota(jnp.int32, (ends.shape[0], x.shape[0]), 1)
    inside = lax.bitwise_and(lax.ge(row, starts[:, None]), lax.lt(row, ends[:, None]))
    spread = lambda rows: jnp.where(inside[:, :, None], rows[None], jnp.zeros((), rows.dtype))  # noqa: E731
    return dot(ctx, lax.transpose(spread(x), (0, 2, 1)), spread(y))


@lower(aten._grouped_mm.default)
def grouped_mm(
    ctx: Context,
    x: jax.Array,
    y: jax.Array,
    offs: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: torch.dtype | None = None,
) -> jax.Array:
    if bias is not None:
        ctx.refuse("torch's CPU kernel takes no bias")
    if x.ndim == 3 and y.ndim == 3 and offs is None:
        out = dot(ctx, x, y)
    elif offs is not None and x.ndim == 2 and y.ndim == 3:
        out = rows_by_matrix(ctx, x, y, offs)
    elif offs is not None and x.ndim == 2 and y.ndim == 2:
        out = rows_by_rows(ctx, lax.transpose(x, (1, 0)), y, offs)
    else:
        ctx.refuse("groups of columns of the second operand")
    return cast(out, ctx.result.dtype)


@lower_library("transformers::grouped_mm_fallback")
def transformers_grouped_mm(ctx: Context, x: jax.Array, weight: jax.Array, offs: jax.Array) -> jax.Array:
    return rows_by_matrix(ctx, x, weight, offs)


@lower_library("transformers::grouped_mm_fallback_backward")
def transformers_grouped_mm_backward(
    ctx: Context, x: jax.Array, weight: jax.Array, offs: jax.Array, grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return rows_by_matrix(ctx, grad, lax.transpose(weight, (0, 2, 1)), offs), rows_by_rows(ctx, x, grad, offs)
