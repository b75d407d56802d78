"""Reading by index.

An index that is out of range raises after the run, as in eager (`bounds`). Negative indices count from the end, where
torch allows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.bounds import OF_DIM, within
from portable.lowering.context import Context
from portable.lowering.registry import broadcast, cast, lower
from portable.lowering.shape import take

aten = torch.ops.aten
IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def wrapped(index: jax.Array, size: int) -> jax.Array:
    """Indices into a dim of ``size`` with the negative ones counted from its end."""
    if not jnp.issubdtype(index.dtype, jnp.signedinteger):
        return lax.convert_element_type(index, np.int64)
    if index.dtype.itemsize < 4:  # a narrow index type may not hold the size
        index = lax.convert_element_type(index, np.int32)
    return lax.select(lax.lt(index, lax.full_like(index, 0)), lax.add(index, lax.full_like(index, size)), index)


def with_masks(indices: Sequence[jax.Array | None]) -> list[jax.Array | None]:
    """The indices with those of type uint8 as the masks that torch takes them for."""
    return [cast(i, torch.bool) if i is not None and i.dtype == np.uint8 else i for i in indices]


def coordinates(ctx: Context, shape: Sequence[int], indices: Sequence[jax.Array | None]) -> tuple[jax.Array, list[int]]:
    """The indices of advanced indexing as one array (*broadcast shape, indexed dims), and the dims that they index."""
    given = {d: index for d, index in enumerate(indices) if index is not None}
    if any(index.dtype == np.bool_ for index in given.values()):
        ctx.refuse("a boolean index selects a number of elements that depends on the data")
    common = np.broadcast_shapes(*(index.shape for index in given.values()))
    if any(shape[d] == 0 for d in given) and 0 not in common:
        ctx.refuse("an index into an empty dimension is out of range")
    kind = np.int64 if any(index.dtype == np.int64 for index in given.values()) else np.int32
    columns = [lax.convert_element_type(broadcast(wrapped(i, shape[d]), common), kind) for d, i in given.items()]
    return lax.concatenate([lax.expand_dims(c, (c.ndim,)) for c in columns], len(common)), list(given)


def all_within(ctx: Context, shape: Sequence[int], indices: Sequence[jax.Array | None]) -> None:
    """Check the indices of advanced indexing."""
    for d, index in enumerate(indices):
        if index is not None:
            within(ctx, index, shape[d], OF_DIM, dim=d, negative=True)


def placement(dims: Sequence[int], ndim: int, batch: int) -> tuple[int, ...]:
    """Where the dims that are not indexed go in the result.

    The ``batch`` dims of the indices take the place of the first indexed dim where those are adjacent, and come
    first where they are not (numpy's rule, and torch's).
    """
    adjacent = dims[-1] - dims[0] == len(dims) - 1
    first = dims[0] if adjacent else 0
    rest = ndim - len(dims)
    return tuple(i if i < first else i + batch for i in range(rest))


def _positions(ctx: Context, indices: Sequence[jax.Array | None]) -> list[jax.Array | None]:
    """A mask as the positions where it holds, one index for each of its dims.

    Their number is the size of the result there: it is known where the trace knew it, as for a mask that is a constant.
    """
    (first, mask), *others = ((d, i) for d, i in enumerate(indices) if i is not None)
    if others:
        ctx.refuse("a boolean index beside another one selects a number of elements that depends on the data")
    if mask.ndim == 0:
        ctx.refuse("a boolean scalar as an index selects a number of elements that depends on the data")
    count = ctx.result.shape[first]
    _, order = lax.sort(
        (lax.bitwise_not(lax.reshape(mask, (mask.size,))), lax.iota(np.int64, mask.size)), is_stable=True, num_keys=1
    )
    flat = lax.slice_in_dim(order, 0, count)
    found: list[jax.Array] = []
    for n in reversed(mask.shape):
        found.insert(0, lax.rem(flat, lax.full_like(flat, max(n, 1))))
        flat = lax.div(flat, lax.full_like(flat, max(n, 1)))
    return [*indices[:first], *found, *indices[first + 1 :]]


@lower(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(ctx: Context, x: jax.Array, indices: Sequence[jax.Array | None]) -> jax.Array:
    indices = with_masks(indices)
    if all(i is None for i in indices):
        return x
    if any(i is not None and i.dtype == np.bool_ for i in indices):
        indices = _positions(ctx, indices)
    elif ctx.op is aten.index.Tensor:
        all_within(ctx, x.shape, indices)
    if 0 in ctx.result.shape:
        coordinates(ctx, x.shape, indices)
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    where, dims = coordinates(ctx, x.shape, indices)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=placement(dims, x.ndim, where.ndim - 1),
        collapsed_slice_dims=tuple(dims),
        start_index_map=tuple(dims),
    )
    sizes = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    return lax.gather(x, where, numbers, sizes, mode=IN_BOUNDS)


def clamped(indices: Sequence[jax.Array | None], shape: Sequence[int]) -> list[jax.Array | None]:
    """Each index clamped to the range that its dim allows, negative ones included."""
    sized = zip(indices, shape, strict=False)
    return [None if i is None else lax.clamp(lax.full_like(i, -n), i, lax.full_like(i, n - 1)) for i, n in sized]


@lower(aten._unsafe_masked_index.default)
def unsafe_masked_index(
    ctx: Context, x: jax.Array, mask: jax.Array, indices: Sequence[jax.Array | None], fill: Any
) -> jax.Array:
    """``x`` at the indices where the mask holds, else ``fill``; the indices may be out of range where it does not."""
    shape = ctx.result.shape
    if 0 in x.shape:
        return broadcast(cast(fill, ctx.result.dtype), shape)
    taken = index(ctx, x, clamped(indices, x.shape))
    return lax.select(broadcast(mask, shape), taken, broadcast(cast(fill, ctx.result.dtype), shape))


@lower(aten.index_select.default)
def index_select(ctx: Context, x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    if x.ndim == 0:
        return lax.reshape(x, ctx.result.shape)
    dim %= x.ndim
    if x.shape[dim] == 0 and index.size:
        ctx.refuse("an index into an empty dimension is out of range")
    if ctx.op is aten.index_select.default:
        within(ctx, index, x.shape[dim])
    return take(x, lax.reshape(index, (index.size,)), dim)


@lower(aten.gather.default)
def gather(ctx: Context, x: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    if x.ndim == 0 or index.ndim == 0:
        x, index = lax.reshape(x, (x.size,)), lax.reshape(index, (index.size,))
    if index.size == 0:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    dim %= x.ndim
    if x.shape[dim] == 0:
        ctx.refuse("an index into an empty dimension is out of range")
    within(ctx, index, x.shape[dim], OF_DIM, dim=dim, error=RuntimeError)
    return lax.reshape(gather_along(x, dim, index), ctx.result.shape)


def gather_along(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    """``out[i, j, k] = x[i, index[i, j, k], k]`` for dim 1; ``index`` is not larger than ``x`` in the other dims."""
    kept = tuple(d for d in range(x.ndim) if d != dim)
    x = lax.slice(x, (0,) * x.ndim, tuple(n if d == dim else index.shape[d] for d, n in enumerate(x.shape)))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        operand_batching_dims=kept,
        start_indices_batching_dims=kept,
    )
    return lax.gather(x, lax.expand_dims(index, (index.ndim,)), numbers, (1,) * x.ndim, mode=IN_BOUNDS)


def flat_within(ctx: Context, index: jax.Array, size: int) -> None:
    """Check the indices into the elements of a tensor."""
    message = "out of range: tried to access index {index} on a tensor of {size} elements."
    within(ctx, index, size, message, negative=True)


@lower(aten.take.default)
def take_flat(ctx: Context, x: jax.Array, index: jax.Array) -> jax.Array:
    if x.size == 0 and index.size:
        ctx.refuse("an index into an empty tensor is out of range")
    flat_within(ctx, index, x.size)
    flat = take(lax.reshape(x, (x.size,)), wrapped(lax.reshape(index, (index.size,)), x.size), 0)
    return lax.reshape(flat, ctx.result.shape)
