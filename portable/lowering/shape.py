"""Views, copies, concatenation and creation: ops that move elements or make them, and compute nothing."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import broadcast, cast, lower

aten = torch.ops.aten


@lower(aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default, aten.lift_fresh.default)
def identity(ctx: Context, x: jax.Array, **_: Any) -> jax.Array:
    return x


@lower(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
def reshape(ctx: Context, x: jax.Array, *_: Any) -> jax.Array:
    return lax.reshape(x, ctx.result.shape)


@lower(aten.expand.default)
def expand(ctx: Context, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return broadcast(x, ctx.result.shape)


@lower(aten.permute.default)
def permute(ctx: Context, x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return lax.transpose(x, [d % x.ndim for d in dims]) if x.ndim else x


@lower(aten.t.default)
def t(ctx: Context, x: jax.Array) -> jax.Array:
    return lax.transpose(x, (1, 0)) if x.ndim == 2 else x


@lower(aten.transpose.int)
def transpose(ctx: Context, x: jax.Array, dim0: int, dim1: int) -> jax.Array:
    if x.ndim < 2:
        return x
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return lax.transpose(x, order)


@lower(aten.slice.Tensor)
def slice_(ctx: Context, x: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> jax.Array:
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    return lax.slice_in_dim(x, start, max(start, end), step, dim % x.ndim)


@lower(aten.select.int)
def select(ctx: Context, x: jax.Array, dim: int, index: int) -> jax.Array:
    return lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


@lower(aten.cat.default)
def cat(ctx: Context, tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    kept = [cast(x, ctx.result.dtype) for x in tensors if x.shape != (0,)]
    if not kept:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    return lax.concatenate(kept, dim % len(ctx.result.shape))


@lower(aten.full.default, aten.full_like.default, aten.new_full.default)
def full(ctx: Context, first: Any, *rest: Any, **_: Any) -> jax.Array:
    value = rest[-1]
    return broadcast(cast(value, ctx.result.dtype), ctx.result.shape)


@lower(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def zeros(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)


@lower(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    return jnp.ones(ctx.result.shape, ctx.result.jax_dtype)


@lower(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default, aten.new_empty_strided.default)
def empty(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
