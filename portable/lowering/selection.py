"""Ops whose result is as long as the caller says: positions of non-zeros, repeats. And hashes of elements."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.reduction import axes
from portable.lowering.registry import cast, lower
from portable.lowering.scatter import rows
from portable.lowering.sorting import search

aten = torch.ops.aten


@lower(aten.nonzero_static.default)
def nonzero_static(ctx: Context, x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    """The first ``size`` positions of non-zeros in row-major order, then rows of ``fill_value``."""
    shape = ctx.result.shape
    filled = jnp.full(shape, fill_value, np.int64)
    if 0 in shape or x.size == 0:
        return filled
    hit = lax.reshape(cast(x, torch.bool), (x.size,))
    rank = lax.sub(lax.cumsum(lax.convert_element_type(hit, np.int64)), lax.full_like(hit, 1, np.int64))
    where = lax.select(hit, rank, lax.full_like(rank, size))  # a write beyond the end is dropped
    positions = [lax.reshape(lax.broadcasted_iota(np.int64, x.shape, d), (x.size, 1)) for d in range(x.ndim)]
    return rows(lax.scatter, filled, 0, where, lax.concatenate(positions, 1))


@lower(aten.repeat_interleave.Tensor)
def repeat_interleave(ctx: Context, repeats: jax.Array, *, output_size: int | None = None) -> jax.Array:
    """Each index i, ``repeats[i]`` times; ``output_size``, their sum, is given by the caller."""
    (size,) = ctx.result.shape
    if repeats.size == 0 or size == 0:
        return jnp.zeros((size,), ctx.result.jax_dtype)
    ends = lax.cumsum(lax.convert_element_type(repeats, np.int64))
    return cast(search(ends, lax.iota(np.int64, size), True), ctx.result.dtype)


@lower(aten.hash_tensor.default)
def hash_tensor(
    ctx: Context, x: jax.Array, dim: int | Sequence[int] = (), *, keepdim: bool = False, mode: int = 0
) -> jax.Array:
    """The exclusive or of the elements' bits: integers as int64, floats as float64."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(lax.convert_element_type(x, np.float64), np.uint64)
    else:
        bits = lax.convert_element_type(lax.convert_element_type(x, np.int64), np.uint64)
    total = lax.reduce(bits, np.zeros((), bits.dtype), lax.bitwise_xor, axes(bits.ndim, dim))
    return lax.reshape(total, ctx.result.shape)
