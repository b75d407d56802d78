"""Views, joins and splits: ops that rearrange elements and compute nothing.

XLA values have no storage, so a view and its ``_copy`` twin are one rule. What depends on the storage layout
(``as_strided``) is in ``strided.py``; what writes into a view is in ``view_scatter.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering import bounds
from portable.lowering.context import Context
from portable.lowering.registry import TracedScalar, broadcast, cast, lower

aten, prims = torch.ops.aten, torch.ops.prims


@lower(
    aten.alias.default,
    aten.alias_copy.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten._lazy_clone.default,
    prims.clone.default,
    prims.copy_strided.default,
    prims.device_put.default,
    prims.view_of.default,
)
def identity(ctx: Context, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return x


@lower(
    aten.view.default,
    aten.view_copy.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten._reshape_alias_copy.default,
    aten._reshape_copy.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
    aten.unsqueeze.default,
    aten.unsqueeze_copy.default,
    prims.collapse.default,
    prims.collapse_view.default,
    prims.reshape.default,
    prims.split_dim.default,
    prims.squeeze.default,
)
def reshape(ctx: Context, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return lax.reshape(x, ctx.result.shape)


@lower(aten.expand.default, aten.expand_copy.default)
def expand(ctx: Context, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return broadcast(x, ctx.result.shape)


@lower(prims.broadcast_in_dim.default)
def broadcast_in_dim(ctx: Context, x: jax.Array, shape: Sequence[int], dims: Sequence[int]) -> jax.Array:
    return lax.broadcast_in_dim(x, ctx.result.shape, tuple(dims))


@lower(aten.permute.default, aten.permute_copy.default, prims.transpose.default)
def permute(ctx: Context, x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return lax.transpose(x, [d % x.ndim for d in dims]) if x.ndim else x


@lower(aten.t.default, aten.t_copy.default)
def t(ctx: Context, x: jax.Array) -> jax.Array:
    return lax.transpose(x, (1, 0)) if x.ndim == 2 else x


@lower(aten.transpose.int, aten.transpose_copy.int)
def transpose(ctx: Context, x: jax.Array, dim0: int, dim1: int) -> jax.Array:
    if x.ndim < 2:
        return x
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return lax.transpose(x, order)


@lower(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(
    ctx: Context, x: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    return lax.slice_in_dim(x, start, max(start, end), step, dim % x.ndim)


@lower(aten.narrow_copy.default)
def narrow_copy(ctx: Context, x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    start += x.shape[dim] if start < 0 else 0
    return lax.slice_in_dim(x, start, start + length, 1, dim % x.ndim)


@lower(aten.select.int, aten.select_copy.int)
def select(ctx: Context, x: jax.Array, dim: int, index: int | TracedScalar) -> jax.Array:
    if isinstance(index, TracedScalar):
        n = x.shape[dim]
        bounds.within(ctx, index.value, n, bounds.OF_DIM, dim=dim, negative=True)
        place = jnp.where(index.value < 0, index.value + n, index.value)
        return lax.dynamic_index_in_dim(x, place, dim % x.ndim, keepdims=False)
    return lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


def pieces(x: jax.Array, sizes: Sequence[int], dim: int) -> list[jax.Array]:
    """``x`` cut along ``dim`` into consecutive pieces of these sizes."""
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64)).tolist()
    return [lax.slice_in_dim(x, end - n, end, 1, dim % x.ndim) for n, end in zip(sizes, ends, strict=True)]


@lower(
    aten.split.Tensor,
    aten.split_copy.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
def split(ctx: Context, x: jax.Array, _: Any, dim: int = 0) -> list[jax.Array]:
    return pieces(x, [part.shape[dim] for part in ctx.result], dim)


@lower(aten.unbind.int, aten.unbind_copy.int)
def unbind(ctx: Context, x: jax.Array, dim: int = 0) -> list[jax.Array]:
    return [lax.index_in_dim(x, i, dim % x.ndim, keepdims=False) for i in range(x.shape[dim])]


@lower(aten.cat.default, prims.cat.default)
def cat(ctx: Context, tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    kept = [cast(x, ctx.result.dtype) for x in tensors if x.shape != (0,)]
    if not kept:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    return lax.concatenate(kept, dim % len(ctx.result.shape)) if len(kept) > 1 else kept[0]


@lower(aten.stack.default, aten._stack.default)
def stack(ctx: Context, tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    dim %= len(ctx.result.shape)
    return lax.concatenate([lax.expand_dims(cast(x, ctx.result.dtype), (dim,)) for x in tensors], dim)


@lower(aten._chunk_cat.default)
def chunk_cat(ctx: Context, tensors: Sequence[jax.Array], dim: int, num_chunks: int) -> jax.Array:
    """Each tensor cut into ``num_chunks`` along ``dim`` (padded with zeros), the rest flattened, joined by chunk."""
    rows = []
    for x in tensors:
        dim %= x.ndim
        size = -(-x.shape[dim] // num_chunks)
        padding = [(0, 0, 0)] * x.ndim
        padding[dim] = (0, size * num_chunks - x.shape[dim], 0)
        x = lax.pad(cast(x, ctx.result.dtype), np.zeros((), ctx.result.jax_dtype), padding)
        rows.append(lax.reshape(x, (*x.shape[:dim], num_chunks, size * int(np.prod(x.shape[dim + 1 :])))))
    return lax.concatenate(rows, dim + 1)


@lower(aten.repeat.default)
def repeat(ctx: Context, x: jax.Array, repeats: Sequence[int]) -> jax.Array:
    extra = len(repeats) - x.ndim
    paired = [n for r, size in zip(repeats, (1,) * extra + x.shape, strict=True) for n in (r, size)]
    kept = tuple(2 * (extra + i) + 1 for i in range(x.ndim))
    return lax.reshape(lax.broadcast_in_dim(x, tuple(paired), kept), ctx.result.shape)


@lower(aten.flip.default, prims.rev.default)
def flip(ctx: Context, x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return lax.rev(x, tuple(d % x.ndim for d in dims)) if x.ndim else x


@lower(aten.roll.default)
def roll(ctx: Context, x: jax.Array, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> jax.Array:
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    if not dims:
        return lax.reshape(_rolled(lax.reshape(x, (x.size,)), shifts[0], 0), x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(x, shift, dim % x.ndim)
    return x


def _rolled(x: jax.Array, shift: int, dim: int) -> jax.Array:
    if x.size == 0 or shift % x.shape[dim] == 0:
        return x
    cut = x.shape[dim] - shift % x.shape[dim]
    head, tail = pieces(x, (cut, x.shape[dim] - cut), dim)
    return lax.concatenate((tail, head), dim)


@lower(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(ctx: Context, x: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """The two dims go last and flat; the diagonal is then a strided slice of stride columns + 1."""
    dim1, dim2 = dim1 % x.ndim, dim2 % x.ndim
    rest = [d for d in range(x.ndim) if d not in (dim1, dim2)]
    x = lax.transpose(x, [*rest, dim1, dim2])
    *batch, rows, columns = x.shape
    length = ctx.result.shape[-1]
    if length == 0:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    flat = lax.reshape(x, (*batch, rows * columns))
    first = offset if offset >= 0 else -offset * columns
    return lax.slice_in_dim(flat, first, first + (length - 1) * (columns + 1) + 1, columns + 1, len(batch))


@lower(aten.diag_embed.default)
def diag_embed(ctx: Context, x: jax.Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> jax.Array:
    shape = ctx.result.shape
    dim1, dim2 = dim1 % len(shape), dim2 % len(shape)
    rows = lax.broadcasted_iota(np.int32, shape, dim1)
    columns = lax.broadcasted_iota(np.int32, shape, dim2)
    rest = [d for d in range(len(shape)) if d not in (dim1, dim2)]
    # along the columns' dim lies x itself where it is a diagonal above the main one: pad x to the square's size
    before = max(offset, 0)
    edge = (before, shape[dim1] - x.shape[-1] - before, 0)
    padded = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [edge])
    spread = lax.broadcast_in_dim(padded, shape, (*rest, dim2))
    on_diagonal = lax.eq(columns - rows, np.int32(offset))
    return lax.select(on_diagonal, spread, lax.full_like(spread, 0))


@lower(aten.unfold.default, aten.unfold_copy.default)
def unfold(ctx: Context, x: jax.Array, dim: int, size: int, step: int) -> jax.Array:
    if x.ndim == 0:
        return broadcast(x, ctx.result.shape)
    dim %= x.ndim
    count = ctx.result.shape[dim]
    windows = np.arange(count)[:, None] * step + np.arange(size)
    taken = take(x, windows.reshape(-1), dim)
    taken = lax.reshape(taken, (*x.shape[:dim], count, size, *x.shape[dim + 1 :]))
    order = [d for d in range(taken.ndim) if d != dim + 1] + [dim + 1]
    return lax.transpose(taken, order)


def take(x: jax.Array, index: np.ndarray | jax.Array, dim: int) -> jax.Array:
    """``x`` at the positions of the 1-D ``index`` along ``dim``. The positions are in bounds, or are clamped by XLA."""
    kept = tuple(d for d in range(x.ndim) if d != dim)
    if x.shape[dim] == 0:  # nothing can be read, and XLA wants a slice of size 1
        shape = tuple(index.shape[0] if d == dim else n for d, n in enumerate(x.shape))
        return jnp.zeros(shape, x.dtype)
    numbers = lax.GatherDimensionNumbers(offset_dims=kept, collapsed_slice_dims=(dim,), start_index_map=(dim,))
    sizes = tuple(1 if d == dim else n for d, n in enumerate(x.shape))
    return lax.gather(x, jnp.asarray(index)[:, None], numbers, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


@lower(aten.pixel_shuffle.default)
def pixel_shuffle(ctx: Context, x: jax.Array, factor: int) -> jax.Array:
    *batch, channels, height, width = x.shape
    n = len(batch)
    x = lax.reshape(x, (*batch, channels // factor**2, factor, factor, height, width))
    return lax.reshape(lax.transpose(x, [*range(n), n, n + 3, n + 1, n + 4, n + 2]), ctx.result.shape)


@lower(aten.pixel_unshuffle.default)
def pixel_unshuffle(ctx: Context, x: jax.Array, factor: int) -> jax.Array:
    *batch, channels, height, width = x.shape
    n = len(batch)
    x = lax.reshape(x, (*batch, channels, height // factor, factor, width // factor, factor))
    return lax.reshape(lax.transpose(x, [*range(n), n, n + 2, n + 4, n + 1, n + 3]), ctx.result.shape)


@lower(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(ctx: Context, x: jax.Array, groups: int) -> jax.Array:
    batch, channels, *rest = x.shape
    x = lax.reshape(x, (batch, groups, channels // groups, *rest))
    return lax.reshape(lax.transpose(x, [0, 2, 1, *range(3, x.ndim)]), ctx.result.shape)
