"""Pooling over regular windows: average and maximum, with their gradients.

Windows may overhang the padded input at its end (ceil_mode); how many there are is torch's answer (``ctx.result``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.elementwise import true_div
from portable.lowering.registry import cast, lower

aten = torch.ops.aten
HALF = (jnp.bfloat16, jnp.float16)


def each(value: Any, rank: int) -> tuple[int, ...]:
    """One number for each spatial dimension, from an int or a list of one or ``rank`` numbers."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values


@dataclass(frozen=True)
class Pool:
    """Pooling windows over the last ``rank`` dimensions of an input."""

    size: tuple[int, ...]
    count: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(
        cls, rank: int, x: Sequence[int], out: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any = 1
    ) -> Pool:
        kernel = each(kernel, rank)
        stride = kernel if not isinstance(stride, int) and not stride else each(stride, rank)
        return cls(tuple(x[-rank:]), tuple(out[-rank:]), kernel, stride, each(padding, rank), each(dilation, rank))

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def pads(self) -> list[tuple[int, int]]:
        """Padding with which exactly ``count`` windows fit; negative where no window reads the input's end."""
        reach = [
            (n - 1) * s + (k - 1) * d + 1
            for n, s, k, d in zip(self.count, self.stride, self.kernel, self.dilation, strict=True)
        ]
        return [(p, r - n - p) for p, r, n in zip(self.padding, reach, self.size, strict=True)]

    def window(self, ndim: int) -> dict[str, Any]:
        """Arguments of ``lax.reduce_window`` for an array of ``ndim`` dimensions (without the padding)."""
        ones = (1,) * (ndim - self.rank)
        return {
            "window_dimensions": ones + self.kernel,
            "window_strides": ones + self.stride,
            "window_dilation": ones + self.dilation,
        }

    def trimmed(self, x: jax.Array, fill: Any) -> jax.Array:
        """``x`` padded with ``fill``, or cut, so that exactly the windows fit."""
        config = [(0, 0, 0)] * (x.ndim - self.rank) + [(lo, hi, 0) for lo, hi in self.pads()]
        return lax.pad(x, jnp.asarray(fill, x.dtype), config)

    def spans(self, include_pad: bool) -> list[np.ndarray]:
        """For each dimension, how many elements each window counts; padding counts if ``include_pad``."""
        lengths = []
        for n, count, k, s, p in zip(self.size, self.count, self.kernel, self.stride, self.padding, strict=True):
            start = np.arange(count) * s - p
            end = np.minimum(start + k, n + p)
            lengths.append(end - start if include_pad else np.maximum(np.minimum(end, n) - np.maximum(start, 0), 0))
        return lengths


def divisors(pool: Pool, include_pad: bool, override: int | None) -> np.ndarray:
    """What each window's sum is divided by; 1 for a window that holds nothing."""
    if override is not None:
        return np.full(pool.count, override)
    return np.maximum(functools.reduce(np.multiply, np.ix_(*pool.spans(include_pad))), 1)


def window_sums(x: jax.Array, pool: Pool) -> jax.Array:
    x = pool.trimmed(x, 0)
    if 0 in x.shape:
        return jnp.zeros((*x.shape[: -pool.rank], *pool.count), x.dtype)
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, padding="VALID", **pool.window(x.ndim))


def window_spread(g: jax.Array, pool: Pool) -> jax.Array:
    """The transpose of ``window_sums``: each window's number is added to all that it read."""
    if 0 in g.shape or 0 in pool.size:
        return jnp.zeros((*g.shape[: -pool.rank], *pool.size), g.dtype)
    config = [(0, 0, 0)] * (g.ndim - pool.rank)
    for k, s, p, n, count in zip(pool.kernel, pool.stride, pool.padding, pool.size, pool.count, strict=True):
        first = k - 1 - p
        config.append((first, n + k - 1 - first - ((count - 1) * s + 1), s - 1))
    g = lax.pad(g, np.zeros((), g.dtype), config)
    ones = (1,) * (g.ndim - pool.rank)
    return lax.reduce_window(g, np.zeros((), g.dtype), lax.add, ones + pool.kernel, (1,) * g.ndim, "VALID")


def accumulating(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32) if x.dtype in HALF else x


@lower(aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    ctx: Context,
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> jax.Array:
    rank = 2 if ctx.op is aten.avg_pool2d.default else 3
    pool = Pool.of(rank, x.shape, ctx.result.shape, kernel_size, stride, padding)
    sums = window_sums(accumulating(x), pool)
    by = divisors(pool, count_include_pad, divisor_override).astype(sums.dtype)
    return cast(true_div(sums, jnp.broadcast_to(by, sums.shape)), ctx.result.dtype)


@lower(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    ctx: Context,
    g: jax.Array,
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] | int,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> jax.Array:
    rank = 2 if ctx.op is aten.avg_pool2d_backward.default else 3
    pool = Pool.of(rank, x.shape, g.shape, kernel_size, stride, padding)
    g = accumulating(g)
    by = divisors(pool, count_include_pad, divisor_override).astype(g.dtype)
    return cast(window_spread(lax.div(g, jnp.broadcast_to(by, g.shape)), pool), ctx.result.dtype)


def lowest(dtype: Any) -> np.ndarray:
    """The least value of a dtype: -inf, or the least integer."""
    return np.asarray(-np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min, dtype)


def later_maximum(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The greater of two (value, position) pairs as torch's pooling loop leaves it.

    The loop replaces its maximum by a greater value or by any NaN: of equal values the first one stays, of NaNs the
    last.
    """
    (va, ia), (vb, ib) = a, b
    nan_a, nan_b = lax.ne(va, va), lax.ne(vb, vb)
    greater = (vb > va) | ((vb == va) & (ib < ia))
    take = (nan_b & (~nan_a | (ib > ia))) | (~nan_a & greater)
    return lax.select(take, vb, va), lax.select(take, ib, ia)


LAST = np.int32(np.iinfo(np.int32).max)


def positions(size: Sequence[int], shape: Sequence[int]) -> jax.Array:
    """The flat spatial position of each element, broadcast over the leading dimensions."""
    flat = np.arange(int(np.prod(size)), dtype=np.int32).reshape(tuple(size))
    return lax.broadcast_in_dim(flat, tuple(shape), tuple(range(len(shape) - len(size), len(shape))))


@lower(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_with_indices(
    ctx: Context,
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1,
    ceil_mode: bool = False,
) -> tuple[jax.Array, ...]:
    rank = 2 if ctx.op is aten.max_pool2d_with_indices.default else 3
    pool = Pool.of(rank, x.shape, ctx.result[0].shape, kernel_size, stride, padding, dilation)
    if 0 in ctx.result[0].shape:
        return tuple(jnp.zeros(r.shape, r.jax_dtype) for r in ctx.result)
    window, least = pool.window(x.ndim), lowest(x.dtype)
    padded = pool.trimmed(x, least)
    values = lax.reduce_window(padded, least, lax.max, padding="VALID", **window)
    where = pool.trimmed(positions(pool.size, x.shape), LAST)
    # a reduction of its own: where nobody asks for the indices, XLA drops it, and the values take the fast path
    _, indices = lax.reduce_window((padded, where), (least, LAST), later_maximum, padding="VALID", **window)
    return values, cast(indices, torch.int64)


def scatter_flat(g: jax.Array, indices: jax.Array, size: Sequence[int]) -> jax.Array:
    """Add ``g`` (\\*batch, \\*spatial) at flat positions ``indices`` of zeros (\\*batch, \\*size)."""
    batch = g.shape[: g.ndim - len(size)]
    rows, area = int(np.prod(batch)), int(np.prod(size))
    if rows == 0 or area == 0 or 0 in g.shape:
        return jnp.zeros((*batch, *size), g.dtype)
    flat = accumulating(lax.reshape(g, (rows, g.size // rows)))
    at = lax.reshape(indices, flat.shape)
    zeros = jnp.zeros((rows, area), flat.dtype)
    out = jax.vmap(lambda z, i, u: z.at[i].add(u, mode="drop", wrap_negative_indices=False))(zeros, at, flat)
    return lax.convert_element_type(lax.reshape(out, (*batch, *size)), np.dtype(g.dtype))


@lower(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_backward(ctx: Context, g: jax.Array, x: jax.Array, *rest: Any) -> jax.Array:
    rank = 2 if ctx.op is aten.max_pool2d_with_indices_backward.default else 3
    return scatter_flat(g, rest[-1], x.shape[-rank:])
