"""Matrix products."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import cast, lower

aten = torch.ops.aten


def dot(ctx: Context, x: jax.Array, y: jax.Array) -> jax.Array:
    """``x @ y`` over the last axis of x and the second to last of y, batched over the leading axes.

    Half precision accumulates in float32, as torch does.
    """
    batch = tuple(range(x.ndim - 2))
    wide = jnp.float32 if x.dtype in (jnp.bfloat16, jnp.float16) else x.dtype
    out = lax.dot_general(
        x, y, (((x.ndim - 1,), (len(batch),)), (batch, batch)), precision=ctx.precision, preferred_element_type=wide
    )
    return lax.convert_element_type(out, x.dtype)


@lower(aten.mm.default, aten.bmm.default)
def mm(ctx: Context, x: jax.Array, y: jax.Array) -> jax.Array:
    return dot(ctx, x, y)
