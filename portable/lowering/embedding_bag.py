"""Sums, means and maxima of bags of rows of a table (``embedding_bag``), with their gradients.

Bag ``b`` holds ``indices[offsets[b] : offsets[b + 1]]``; entries equal to ``padding_idx`` do not take part; an empty
bag gives zeros.

With ``include_last_offset`` indices may follow the last offset. torch's fast kernel (float32 and half precision, rows
that lie side by side, no padding, not the maximum) leaves them out of the last bag's sum, but counts them in its size,
and so in the mean's divisor; its other kernels, and the gradients of all but that sum, put them into the last bag.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.bounds import within
from portable.lowering.context import Context
from portable.lowering.registry import cast, lower

aten = torch.ops.aten
HALF = (jnp.bfloat16, jnp.float16)
SUM, MEAN, MAX = 0, 1, 2


def _wide(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32) if x.dtype in HALF else x


@dataclass(frozen=True)
class Bags:
    """The bag of each index, whether it takes part, and how many do in each bag."""

    count: int
    of: jax.Array
    valid: jax.Array

    @classmethod
    def at(cls, indices: jax.Array, offsets: jax.Array, padding_idx: int, count: int | None = None) -> Bags:
        """``count`` bags start at ``offsets``; what follows an offset beyond them is in no bag."""
        count = offsets.shape[0] if count is None else count
        position = lax.broadcasted_iota(offsets.dtype, (indices.shape[0], 1), 0)
        begun = lax.convert_element_type(position >= lax.expand_dims(offsets, (0,)), np.int32)
        return cls(count, lax.reduce_sum(begun, (1,)) - 1, lax.ne(indices, lax.full_like(indices, padding_idx)))

    def to_the_end(self) -> Bags:
        """The same, but the last bag holds what follows the last offset too."""
        return replace(self, of=lax.min(self.of, lax.full_like(self.of, self.count - 1)))

    def sums(self, rows: jax.Array) -> jax.Array:
        """(indices, \\*rest) → (bags, \\*rest)."""
        keep = lax.broadcast_in_dim(self.valid, rows.shape, (0,))
        rows = lax.select(keep, rows, lax.full_like(rows, 0))
        return jnp.zeros((self.count, *rows.shape[1:]), rows.dtype).at[self.of].add(rows, mode="drop")

    def sizes(self) -> jax.Array:
        return self.sums(lax.convert_element_type(self.valid, np.int32))

    def per_index(self, v: jax.Array) -> jax.Array:
        """The bag's row of ``v`` for each index."""
        return jnp.take(v, self.of, axis=0, mode="clip")


def _rows(weight: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take(_wide(weight), indices, axis=0, mode="clip")


def _divided(v: jax.Array, sizes: jax.Array) -> jax.Array:
    by = lax.convert_element_type(lax.max(sizes, lax.full_like(sizes, 1)), v.dtype)
    return v / lax.broadcast_in_dim(by, v.shape, (0,))


def maxima(bags: Bags, rows: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first greatest and its table row. A NaN counts only as the first of its bag, as in torch."""
    n, width = rows.shape
    valid = lax.broadcast_in_dim(bags.valid, rows.shape, (0,))
    position = lax.broadcasted_iota(np.int32, (n, width), 0)
    last = lax.full_like(position, n)
    ends = jnp.full((bags.count, width), n, np.int32)
    first = bags.per_index(ends.at[bags.of].min(lax.select(valid, position, last), mode="drop"))
    least = lax.full_like(rows, -np.inf)
    late_nan = lax.ne(rows, rows) & lax.ne(position, first)
    rows = lax.select(valid & ~late_nan, rows, least)
    top = jnp.full((bags.count, width), -np.inf, rows.dtype).at[bags.of].max(rows, mode="drop")
    mine = bags.per_index(top)
    hit = valid & (lax.eq(rows, mine) | (lax.ne(rows, rows) & lax.ne(mine, mine)))
    at = ends.at[bags.of].min(lax.select(hit, position, last), mode="drop")
    some = at < n
    index = jnp.take(indices, at, mode="clip") if n else jnp.zeros(at.shape, indices.dtype)
    return (
        lax.select(some, top, lax.full_like(top, 0)),
        lax.select(some, index, lax.full_like(index, 0)),
    )


def _is_fast(ctx: Context, weight: jax.Array, padding_idx: int) -> bool:
    """Whether torch's fast kernel runs: ``is_fast_path_index_select`` of ATen/native/EmbeddingBag.cpp."""
    strides = ctx.strides[0] if ctx.strides else None
    side_by_side = strides is None or strides[1] == 1
    return weight.dtype.itemsize <= 4 and side_by_side and padding_idx < 0


def _check_offsets(ctx: Context, offsets: jax.Array, count: int) -> None:
    """The first is 0, and the last at most the number of indices, as torch requires on the host."""
    if offsets.shape[0] and ctx.platform == "cpu":
        first = "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0. "
        within(ctx, offsets[:1], 1, first + "However, got {index}", error=RuntimeError)
        last = f"offsets[-1] can not be greater than input's length {count} but got offsets[-1] of "
        within(ctx, offsets[-1:], count + 1, last + "{index}", error=RuntimeError)


@lower(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    ctx: Context,
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[jax.Array, ...]:
    out, of, sizes, origin = ctx.result
    bounded = Bags.at(indices, offsets, padding_idx, out.shape[0])
    bags = bounded.to_the_end()
    _check_offsets(ctx, offsets, indices.shape[0])
    within(
        ctx,
        indices,
        weight.shape[0],
        "input takes value {index} which is not in the valid range [0, {size})",
        error=RuntimeError,
    )
    rows = _rows(weight, indices)
    counts = bags.sizes()
    where = jnp.zeros(origin.shape, origin.jax_dtype)
    if mode == MAX:
        values, where = maxima(bags, rows, indices)
    else:
        if per_sample_weights is not None:
            rows = rows * lax.expand_dims(lax.convert_element_type(per_sample_weights, rows.dtype), (1,))
        values = (bounded if _is_fast(ctx, weight, padding_idx) else bags).sums(rows)
        values = _divided(values, counts) if mode == MEAN else values
    padded = jnp.zeros(sizes.shape, counts.dtype).at[: counts.shape[0]].set(counts)
    bag_of = bags.of if of.shape == bags.of.shape else jnp.zeros(of.shape, np.int32)
    return cast(values, out.dtype), cast(bag_of, of.dtype), cast(padded, sizes.dtype), cast(where, origin.dtype)


def _frequency(indices: jax.Array, rows: int) -> jax.Array:
    """What torch's CPU kernel divides the gradient of each index by.

    Not the index's own frequency, but that of the entry of the sorted indices at the index's rank among the distinct
    ones.
    """
    counts = jnp.zeros((rows,), np.int32).at[indices].add(1)
    rank = jnp.cumsum(lax.gt(counts, lax.full_like(counts, 0)), dtype=np.int32) - 1
    looked_up = jnp.take(lax.sort(indices), jnp.take(rank, indices, mode="clip"), mode="clip")
    return jnp.take(counts, looked_up, mode="clip")


def _weight_gradient(
    ctx: Context,
    g: jax.Array,
    indices: jax.Array,
    bags: Bags,
    origin: jax.Array,
    rows: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: jax.Array | None,
) -> jax.Array:
    g = _wide(g)
    out = jnp.zeros((rows, g.shape[1]), g.dtype)
    if mode == MAX:
        full = lax.broadcast_in_dim(lax.gt(bags.sizes(), np.int32(0)), g.shape, (0,))
        column = lax.broadcasted_iota(np.int32, g.shape, 1)
        origin = origin[: g.shape[0]]
        return cast(out.at[origin, column].add(lax.select(full, g, lax.full_like(g, 0))), ctx.result.dtype)
    each = bags.per_index(_divided(g, bags.sizes()) if mode == MEAN else g)
    if per_sample_weights is not None:
        each = each * lax.expand_dims(lax.convert_element_type(per_sample_weights, each.dtype), (1,))
    if scale_grad_by_freq:
        each = each / lax.expand_dims(lax.convert_element_type(_frequency(indices, rows), each.dtype), (1,))
    each = lax.select(lax.broadcast_in_dim(bags.valid, each.shape, (0,)), each, lax.full_like(each, 0))
    return cast(out.at[indices].add(each), ctx.result.dtype)


@lower(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    ctx: Context,
    g: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    offset2bag: jax.Array,
    bag_size: jax.Array,
    maximum_indices: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: jax.Array | None,
    padding_idx: int = -1,
) -> jax.Array:
    if sparse:
        ctx.refuse("a sparse gradient")
    bags = Bags.at(indices, offsets, padding_idx, g.shape[0])
    if offset2bag.shape == indices.shape:  # not left out, as it is where the sum is that of the fast kernel
        bags = bags.to_the_end()
    return _weight_gradient(
        ctx, g, indices, bags, maximum_indices, num_weights, scale_grad_by_freq, mode, per_sample_weights
    )


@lower(aten._embedding_bag_dense_backward.default)
def embedding_bag_dense_backward(
    ctx: Context,
    g: jax.Array,
    indices: jax.Array,
    offset2bag: jax.Array,
    bag_size: jax.Array,
    maximum_indices: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: jax.Array | None,
    padding_idx: int = -1,
) -> jax.Array:
    valid = lax.ne(indices, lax.full_like(indices, padding_idx))
    bags = Bags(g.shape[0], lax.convert_element_type(offset2bag, np.int32), valid)
    return _weight_gradient(
        ctx, g, indices, bags, maximum_indices, num_weights, scale_grad_by_freq, mode, per_sample_weights
    )


@lower(aten._embedding_bag_per_sample_weights_backward.default)
def per_sample_weights_backward(
    ctx: Context,
    g: jax.Array,
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    offset2bag: jax.Array,
    mode: int,
    padding_idx: int = -1,
) -> jax.Array:
    bags = Bags.at(indices, offsets, padding_idx, g.shape[0])
    if offset2bag.shape == indices.shape:
        bags = bags.to_the_end()
    products = lax.reduce_sum(bags.per_index(_wide(g)) * _rows(weight, indices), (1,))
    return cast(lax.select(bags.valid, products, lax.full_like(products, 0)), ctx.result.dtype)
