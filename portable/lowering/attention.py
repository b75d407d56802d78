"""Scaled dot product attention, forward and backward: ``softmax(q kᵀ · scale + mask) v``.

Scores and softmax are float32 for half precision. A row in which everything is masked gives zeros and the log-sum-exp
0, as torch's CPU kernel does. The backward recomputes the weights from the log-sum-exp (Dao et al. 2022, algorithm 2).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import broadcast, cast, lower

aten = torch.ops.aten
HALF = (jnp.bfloat16, jnp.float16)


def product(ctx: Context, x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Batched over the first two axes, contracted ``over`` (axis of x, axis of y); accumulated in float32 for half."""
    wide = jnp.float32 if x.dtype in HALF else x.dtype
    dims = (((over[0],), (over[1],)), ((0, 1), (0, 1)))
    return lax.dot_general(x, y, dims, precision=ctx.precision, preferred_element_type=wide)


def grouped(x: jax.Array, heads: int) -> jax.Array:
    """(B, H, L, E) → (B, heads, H/heads * L, E): the query heads that share a key head become rows of one."""
    b, h, n, e = x.shape
    return x if h == heads else lax.reshape(x, (b, heads, h // heads * n, e))


def scores(
    ctx: Context, q: jax.Array, k: jax.Array, is_causal: bool, attn_mask: jax.Array | None, scale: float | None
) -> jax.Array:
    """(B, H, L, S), masked with -inf."""
    b, h, rows, e = q.shape
    columns = k.shape[2]
    s = product(ctx, grouped(q, k.shape[1]), k, (3, 3))
    s = lax.reshape(s, (b, h, rows, columns))
    s = s * lax.full_like(s, 1 / math.sqrt(e) if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype == np.bool_:
        s = lax.select(broadcast(attn_mask, s.shape), s, lax.full_like(s, -np.inf))
    elif attn_mask is not None:
        s = s + broadcast(lax.convert_element_type(attn_mask, s.dtype), s.shape)
    if is_causal:
        below = lax.broadcasted_iota(np.int32, (rows, columns), 1) <= lax.broadcasted_iota(np.int32, (rows, columns), 0)
        s = lax.select(broadcast(below, s.shape), s, lax.full_like(s, -np.inf))
    return s


def _column(v: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(v, like.shape, (0, 1, 2))


@lower(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(
    ctx: Context,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    if dropout_p > 0:
        ctx.refuse("dropout inside this kernel; torch's CPU kernel refuses it too")
    s = scores(ctx, q, k, is_causal, attn_mask, scale)
    top = lax.reduce_max(s, (3,))
    masked = lax.eq(top, lax.full_like(top, -np.inf))
    zero, one = lax.full_like(top, 0), lax.full_like(top, 1)
    top = lax.select(masked, zero, top)
    weights = lax.exp(s - _column(top, s))
    sums = lax.select(masked, one, lax.reduce_sum(weights, (3,)))
    weights = lax.convert_element_type(lax.div(weights, _column(sums, weights)), v.dtype)
    out = product(ctx, grouped(weights, v.shape[1]), v, (3, 2))
    out = cast(lax.reshape(out, ctx.result[0].shape), ctx.result[0].dtype)
    return out, cast(top + lax.log(sums), ctx.result[1].dtype)


@lower(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(
    ctx: Context,
    g: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, ...]:
    if dropout_p > 0:
        ctx.refuse("dropout inside this kernel; torch's CPU kernel refuses it too")
    s = scores(ctx, q, k, is_causal, attn_mask, scale)
    weights = lax.exp(s - _column(lax.convert_element_type(logsumexp, s.dtype), s))
    heads = k.shape[1]
    rows = grouped(g, heads)
    dv = product(ctx, grouped(lax.convert_element_type(weights, v.dtype), heads), rows, (2, 2))
    dp = lax.reshape(product(ctx, rows, v, (3, 3)), s.shape)
    delta = lax.reduce_sum(lax.convert_element_type(g, s.dtype) * lax.convert_element_type(out, s.dtype), (3,))
    ds = weights * (dp - _column(delta, s)) * lax.full_like(s, 1 / math.sqrt(q.shape[3]) if scale is None else scale)
    ds = grouped(lax.convert_element_type(ds, q.dtype), heads)
    dq = lax.reshape(product(ctx, ds, k, (3, 2)), q.shape)
    dk = product(ctx, ds, grouped(q, heads), (2, 2))
    return tuple(cast(x, r.dtype) for x, r in zip((dq, dk, dv), ctx.result, strict=True))
