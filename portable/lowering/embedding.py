"""Embedding: rows of a table by index, the gradient of the table, the renormalisation of its rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.bounds import within
from portable.lowering.context import Context
from portable.lowering.gather import IN_BOUNDS
from portable.lowering.registry import cast, lower
from portable.lowering.scatter import rows, widened

aten = torch.ops.aten


@lower(aten.embedding.default)
def embedding(ctx: Context, weight: jax.Array, indices: jax.Array, *_: Any, **__: Any) -> jax.Array:
    if weight.shape[0] == 0 and indices.size:
        ctx.refuse("an index into an empty dimension is out of range")
    if 0 in ctx.result.shape:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    within(ctx, indices, weight.shape[0])
    last = tuple(range(indices.ndim, indices.ndim + weight.ndim - 1))
    numbers = lax.GatherDimensionNumbers(offset_dims=last, collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(
        weight, lax.expand_dims(indices, (indices.ndim,)), numbers, (1, *weight.shape[1:]), mode=IN_BOUNDS
    )


@lower(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    ctx: Context, grad: jax.Array, indices: jax.Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> jax.Array:
    """The rows of ``grad`` summed by index, those of ``padding_idx`` left out, optionally divided by their number."""
    shape = ctx.result.shape
    if grad.size == 0 or indices.size == 0:
        return jnp.zeros(shape, ctx.result.jax_dtype)
    index = lax.reshape(indices, (indices.size,))
    (grad,) = widened(lax.reshape(grad, (index.size, *shape[1:])))
    if padding_idx >= 0:
        index = lax.select(lax.eq(index, lax.full_like(index, padding_idx)), lax.full_like(index, num_weights), index)
    total = rows(lax.scatter_add, jnp.zeros(shape, grad.dtype), 0, index, grad)
    if scale_grad_by_freq:
        count = rows(
            lax.scatter_add, jnp.zeros((num_weights,), grad.dtype), 0, index, jnp.ones(index.shape, grad.dtype)
        )
        count = lax.max(count, lax.full_like(count, 1))
        total = lax.div(total, lax.broadcast_in_dim(count, shape, (0,)))
    return cast(total, ctx.result.dtype)


@lower(aten.embedding_renorm.default)
def embedding_renorm(
    ctx: Context, weight: jax.Array, indices: jax.Array, max_norm: float, norm_type: float
) -> jax.Array:
    """Rows that occur in ``indices`` and whose norm exceeds ``max_norm`` are scaled by max_norm / (norm + 1e-7)."""
    if indices.size == 0:
        return weight
    index = lax.reshape(indices, (indices.size,))
    hit = rows(lax.scatter_max, jnp.zeros((weight.shape[0],), np.int32), 0, index, jnp.ones(index.shape, np.int32))

    def scale(w: torch.Tensor, touched: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(w, norm_type, dim=1, keepdim=True)
        over = (norm > max_norm) & (touched > 0).unsqueeze(1)
        return torch.where(over, w * (max_norm / (norm + 1e-7)), w)

    return ctx.torch(scale, weight, hit)
