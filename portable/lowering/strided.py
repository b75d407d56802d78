"""``as_strided`` and its kin: reading and writing a tensor's storage by position.

XLA values have no storage. These rules know which position of the storage each element of a tensor has (by the strides
and offset that torch gives it). They refuse where a position is asked for that the tensor itself does not cover, or
where the layout is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import lower
from portable.lowering.scatter import rows
from portable.lowering.shape import take

aten, prims = torch.ops.aten, torch.ops.prims
LARGEST_TABLE = 1 << 22  # elements; a table of positions is a constant of the program


def _grid(sizes: Sequence[int], strides: Sequence[int], offset: int) -> np.ndarray:
    """The position in the storage of each element of a strided tensor."""
    total = np.full((1,) * len(sizes), offset, np.int64)
    for dim, (n, stride) in enumerate(zip(sizes, strides, strict=True)):
        total = total + (np.arange(n, dtype=np.int64) * stride).reshape(
            [-1 if d == dim else 1 for d in range(len(sizes))]
        )
    return np.broadcast_to(total, tuple(sizes))


def _elements(
    ctx: Context, x: jax.Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> np.ndarray:
    """For each element of the strided view the row-major index into ``x`` of the same position in the storage."""
    own = ctx.strides[0] if ctx.strides else None
    if own is None or own.offset is None:
        ctx.refuse("the storage layout of its input is not known here")
    offset = own.offset if storage_offset is None else storage_offset
    if max(math.prod(size), x.size) > LARGEST_TABLE:
        ctx.refuse(f"a strided view of more than {LARGEST_TABLE} elements would need a table of that size")
    wanted = _grid(size, stride, offset - own.offset)
    held = _grid(x.shape, own, 0).reshape(-1)
    if wanted.size == 0:
        return wanted
    if x.size == 0 or wanted.min() < 0 or wanted.max() > held.max():
        ctx.refuse("it reaches into storage outside of its input")
    table = np.full(int(held.max()) + 1, -1, np.int64)
    table[held] = np.arange(held.size)
    found = table[wanted]
    if (found < 0).any():
        ctx.refuse("it reaches into storage outside of its input")
    return found


@lower(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(
    ctx: Context, x: jax.Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> jax.Array:
    found = _elements(ctx, x, size, stride, storage_offset)
    if found.size == 0:
        return jnp.zeros(ctx.result.shape, x.dtype)
    flat, index = lax.reshape(x, (x.size,)), found.reshape(-1)
    first = int(index[0])
    if np.array_equal(index, np.arange(first, first + index.size)):
        return lax.reshape(lax.slice_in_dim(flat, first, first + index.size), ctx.result.shape)
    return lax.reshape(take(flat, index, 0), ctx.result.shape)


@lower(aten.as_strided_scatter.default, prims.as_strided_scatter.default)
def as_strided_scatter(
    ctx: Context,
    x: jax.Array,
    source: jax.Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> jax.Array:
    found = _elements(ctx, x, size, stride, storage_offset)
    if found.size == 0:
        return x
    index = found.reshape(-1)
    if np.unique(index).size != index.size:
        ctx.refuse("the strided view overlaps itself, so that a write to it has no defined order")
    flat, values = lax.reshape(x, (x.size,)), lax.reshape(source, (source.size,))
    return lax.reshape(rows(lax.scatter, flat, 0, jnp.asarray(index), values), x.shape)
