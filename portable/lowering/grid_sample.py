"""Sampling an image or a volume at the points of a grid, and its gradients.

Points are in [-1, 1], x first. A sample is a sum over the corners around its point (or 16 bicubic taps) of weight times
value; values outside the image count as 0 after the padding mode has moved the point. Half precision is rounded after
each step on the coordinates, as torch's CPU kernel computes: a coordinate rounded once more or less lands in another
cell. The gradients are JAX's of the forward formula, whose corner positions are integers and have none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.elementwise import true_div
from portable.lowering.registry import cast, lower, narrowed

aten = torch.ops.aten
BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2
HALF = (jnp.bfloat16, jnp.float16)
Round = Callable[[jax.Array], jax.Array]


def pixel(point: jax.Array, size: int, align_corners: bool, r: Round) -> jax.Array:
    """From [-1, 1] to pixels: -1 and 1 are the centres of the corner pixels (align_corners) or their outer edges."""
    if align_corners:
        return r(r(r(point + 1) / 2) * (size - 1))
    return r(r(r(r(point + 1) * size) - 1) / 2)


def clipped(x: jax.Array, size: int) -> jax.Array:
    """To [0, size - 1]; NaN becomes 0."""
    return jnp.clip(lax.select(lax.ne(x, x), lax.full_like(x, 0), x), 0, size - 1)


def reflected(x: jax.Array, low: float, high: float, r: Round) -> jax.Array:
    """Mirrored at ``low`` and ``high`` (twice the bounds, so that they are integers) until it is between them."""
    if low == high:
        return lax.full_like(x, 0)
    least, span = low / 2, (high - low) / 2
    x = r(lax.abs(r(x - least)))
    extra = lax.rem(x, lax.full_like(x, span))
    flips = lax.floor(r(true_div(x, lax.full_like(x, span))))
    even = lax.eq(lax.rem(flips, lax.full_like(flips, 2)), lax.full_like(flips, 0))
    return lax.select(even, r(extra + least), r(r(span - extra) + least))


def padded(x: jax.Array, size: int, padding_mode: int, align_corners: bool, r: Round) -> jax.Array:
    """The pixel coordinate moved into the image, if the padding mode says so."""
    if padding_mode == BORDER:
        return clipped(x, size)
    if padding_mode == REFLECTION:
        bounds = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
        return clipped(reflected(x, *bounds, r), size)
    return x


def fetch(image: jax.Array, at: Sequence[jax.Array]) -> jax.Array:
    """(N, C, \\*size) at integer-valued positions, each (N, \\*points) → (N, C, \\*points); 0 outside."""
    size = image.shape[2:]
    inside = jnp.ones(at[0].shape, np.bool_)
    flat = jnp.zeros(at[0].shape, np.int32)
    for p, n in zip(at, size, strict=True):
        inside = inside & (p >= 0) & (p <= n - 1)
        index = lax.convert_element_type(jnp.clip(lax.select(lax.ne(p, p), lax.full_like(p, 0), p), 0, n - 1), np.int32)
        flat = flat * n + index
    rows = lax.reshape(image, (*image.shape[:2], int(np.prod(size))))
    index = lax.reshape(flat, (flat.shape[0], 1, flat.size // flat.shape[0]))
    taken = jnp.take_along_axis(rows, index, axis=2, mode="clip")
    taken = lax.reshape(taken, (*image.shape[:2], *flat.shape[1:]))
    keep = lax.broadcast_in_dim(inside, taken.shape, (0, *range(2, taken.ndim)))
    return lax.select(keep, taken, lax.full_like(taken, 0))


def _over_channels(weight: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(weight, like.shape, (0, *range(2, like.ndim)))


def _linear(image: jax.Array, at: Sequence[jax.Array], r: Round) -> jax.Array:
    floors = [lax.stop_gradient(lax.floor(p)) for p in at]
    terms = []
    for corner in itertools.product((0, 1), repeat=len(at)):
        sides = [r(p - low) if high else r(r(low + 1) - p) for p, low, high in zip(at, floors, corner, strict=True)]
        weight = functools.reduce(lambda a, b: r(a * b), sides)
        taken = fetch(image, [low + high for low, high in zip(floors, corner, strict=True)])
        terms.append(r(taken * _over_channels(weight, taken)))
    return functools.reduce(lambda a, b: r(a + b), terms)


def _cubic_weights(t: jax.Array, r: Round) -> list[jax.Array]:
    """Keys' cubic convolution (1981) with A = -0.75 at distances 1 + t, t, 1 - t, 2 - t."""
    a = -0.75

    def near(x: jax.Array) -> jax.Array:
        return r(r(r(r(r((a + 2) * x) - (a + 3)) * x) * x) + 1)

    def far(x: jax.Array) -> jax.Array:
        return r(r(r(r(r(r(a * x) - 5 * a) * x) + 8 * a) * x) - 4 * a)

    return [far(r(t + 1)), near(t), near(r(1 - t)), far(r(r(1 - t) + 1))]


def _cubic(image: jax.Array, at: Sequence[jax.Array], move: Sequence[Round], r: Round) -> jax.Array:
    """``move`` applies the padding mode to each tap of a dimension."""
    floors = [lax.stop_gradient(lax.floor(p)) for p in at]
    weights = [_cubic_weights(r(p - low), r) for p, low in zip(at, floors, strict=True)]
    rows = []
    for i in range(4):
        y = move[0](floors[0] + (i - 1))
        terms = []
        for j in range(4):
            taken = fetch(image, [y, move[1](floors[1] + (j - 1))])
            terms.append(r(taken * _over_channels(weights[1][j], taken)))
        row = functools.reduce(lambda a, b: r(a + b), terms)
        rows.append(r(row * _over_channels(weights[0][i], row)))
    return functools.reduce(lambda a, b: r(a + b), rows)


def sample(image: jax.Array, grid: jax.Array, mode: int, padding_mode: int, align_corners: bool, r: Round) -> jax.Array:
    """(N, C, \\*size), (N, \\*points, rank) → (N, C, \\*points)."""
    size = image.shape[2:]
    rank = len(size)
    # the grid lists x first, the image has it last
    at = [pixel(grid[..., rank - 1 - d], n, align_corners, r) for d, n in enumerate(size)]

    def mover(n: int) -> Round:
        return lambda p: padded(p, n, padding_mode, align_corners, r)

    if mode == BICUBIC:
        return _cubic(image, at, [mover(n) for n in size], r)
    at = [mover(n)(p) for p, n in zip(at, size, strict=True)]
    if mode == NEAREST:
        return fetch(image, [lax.round(lax.stop_gradient(p), lax.RoundingMethod.TO_NEAREST_EVEN) for p in at])
    return _linear(image, at, r)


def wide(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32) if x.dtype in HALF else x


@lower(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(
    ctx: Context, image: jax.Array, grid: jax.Array, mode: int, padding_mode: int, align_corners: bool
) -> jax.Array:
    if 0 in ctx.result.shape:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    rounded = functools.partial(narrowed, dtype=ctx.result.dtype)
    out = sample(wide(image), wide(grid), mode, padding_mode, align_corners, rounded)
    return cast(out, ctx.result.dtype)


@lower(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    ctx: Context,
    g: jax.Array,
    image: jax.Array,
    grid: jax.Array,
    mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    if g.size == 0:
        return tuple(r and jnp.zeros(r.shape, r.jax_dtype) for r in ctx.result)
    _, pull = jax.vjp(
        lambda i, p: sample(i, p, mode, padding_mode, align_corners, lambda v: v), wide(image), wide(grid)
    )
    return tuple(r and cast(v, r.dtype) for v, r in zip(pull(wide(g)), ctx.result, strict=True))
