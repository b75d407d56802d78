"""Elementwise ops: one table row each, or one formula."""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import (
    ALWAYS_BOOL,
    INT_TO_FLOAT,
    broadcast,
    cast,
    elementwise,
    elementwise_table,
    lower,
)

aten = torch.ops.aten

elementwise_table(
    {
        aten.exp.default: lax.exp,
        aten.log.default: lax.log,
        aten.sin.default: lax.sin,
        aten.cos.default: lax.cos,
        aten.tanh.default: lax.tanh,
        aten.sigmoid.default: lax.logistic,
        aten.sqrt.default: lax.sqrt,
        aten.rsqrt.default: lax.rsqrt,
        aten.erf.default: lax.erf,
    },
    promote=INT_TO_FLOAT,
)
elementwise_table(
    {
        aten.eq.Tensor: lax.eq,
        aten.eq.Scalar: lax.eq,
        aten.ne.Tensor: lax.ne,
        aten.ne.Scalar: lax.ne,
        aten.lt.Tensor: lax.lt,
        aten.lt.Scalar: lax.lt,
        aten.le.Tensor: lax.le,
        aten.le.Scalar: lax.le,
        aten.gt.Tensor: lax.gt,
        aten.gt.Scalar: lax.gt,
        aten.ge.Tensor: lax.ge,
        aten.ge.Scalar: lax.ge,
    },
    promote=ALWAYS_BOOL,
)
elementwise_table({aten.neg.default: lax.neg, aten.relu.default: lambda x: lax.max(x, lax.full_like(x, 0))})


@elementwise(aten.add.Tensor, aten.add.Scalar)
def add(x: jax.Array, y: jax.Array, alpha: complex = 1) -> jax.Array:
    if x.dtype == jnp.bool_:
        return lax.bitwise_or(x, lax.bitwise_and(y, lax.full_like(y, bool(alpha))))
    return lax.add(x, y if alpha == 1 else lax.mul(y, lax.full_like(y, alpha)))


@elementwise(aten.sub.Tensor, aten.sub.Scalar)
def sub(x: jax.Array, y: jax.Array, alpha: complex = 1) -> jax.Array:
    return lax.sub(x, y if alpha == 1 else lax.mul(y, lax.full_like(y, alpha)))


@elementwise(aten.mul.Tensor, aten.mul.Scalar)
def mul(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.bitwise_and(x, y) if x.dtype == jnp.bool_ else lax.mul(x, y)


@elementwise(aten.div.Tensor, aten.div.Scalar, promote=INT_TO_FLOAT)
def div(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.div(x, y)


@elementwise(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar, operands=(1, 2))
def _where(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.select(broadcast(cast(condition, torch.bool), x.shape), x, y)


@lower(aten._to_copy.default)
def to_copy(ctx: Context, x: jax.Array, **_: Any) -> jax.Array:
    return cast(x, ctx.result.dtype)
