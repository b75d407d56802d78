"""Sampling an image or a volume at the points of a grid, and its gradients.

Points are in [-1, 1], x first. A sample is a sum over the corners around its point (or 16 bicubic taps) of weight times
value; values outside the image count as 0 after the padding mode has moved the point. Half precision is rounded after
each step, forward and backward, and summed in the order of torch's CPU kernels: a coordinate rounded once more or less
lands in another cell, whose slope is another one. The kernel of images and that of volumes differ in their steps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.dtypes import to_torch
from portable.lowering.context import Context, Strides
from portable.lowering.elementwise import num, true_div, where
from portable.lowering.registry import cast, lower, narrowed

aten = torch.ops.aten
BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2
HALF = (torch.bfloat16, torch.float16)
LANES = 16  # half precision numbers in a vector of AVX2
# of each corner of a cell, for each dim whether it is the next one
CORNERS = {rank: list(itertools.product((0, 1), repeat=rank)) for rank in (2, 3)}
Round = Callable[[jax.Array], jax.Array]


class Sampling(NamedTuple):
    """How to sample an image of this ``size`` and ``dtype``. Half precision is computed in wider arrays."""

    size: tuple[int, ...]
    dtype: torch.dtype
    mode: int
    padding_mode: int
    align_corners: bool

    def round(self, x: jax.Array) -> jax.Array:
        return narrowed(x, self.dtype)

    def pixels(self, grid: jax.Array) -> list[jax.Array]:
        """From [-1, 1] to pixels, for each dim of the image: -1 and 1 are the centres of the corner pixels
        (align_corners) or their outer edges. The grid lists x first, the image has it last."""
        r, at = self.round, [grid[..., d] for d in reversed(range(len(self.size)))]
        if self.align_corners:
            return [r(r(r(p + 1) / 2) * r(lax.full_like(p, n - 1))) for p, n in zip(at, self.size, strict=True)]
        return [r(r(r(r(p + 1) * r(lax.full_like(p, n))) - 1) / 2) for p, n in zip(at, self.size, strict=True)]

    def moved(self, x: jax.Array, size: int, nan: float = 0.0) -> jax.Array:
        """The pixel coordinate moved into the image, if the padding mode says so; NaN becomes ``nan``."""
        if self.padding_mode == ZEROS:
            return x
        if self.padding_mode == REFLECTION:
            x, _ = self.reflected(x, size)
        return jnp.clip(where(lax.ne(x, x), nan, x), 0, size - 1)

    def reflected(self, x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Mirrored at the centres of the corner pixels or at their outer edges until it is between them, and whether
        it then runs the other way."""
        r = self.round
        low, span = (0.0, size - 1) if self.align_corners else (-0.5, size)
        if span == 0:
            return lax.full_like(x, 0), lax.full_like(x, 0, np.bool_)
        x = r(x - low)
        negative, x = lax.lt(x, num(0, x)), lax.abs(x)
        if len(self.size) == 2:
            twice = r(lax.full_like(x, 2 * span))
            extra = r(x - r(jnp.trunc(r(true_div(x, twice))) * twice))
            other = r(twice - extra)
            return r(lax.min(extra, other) + low), lax.ne(lax.gt(extra, other), negative)
        length = r(lax.full_like(x, span))
        extra = lax.rem(x, length)
        flips = lax.floor(r(true_div(x, length)))
        odd = lax.ne(lax.rem(flips, lax.full_like(flips, 2)), num(0, flips))
        return lax.select(odd, r(r(length - extra) + low), r(extra + low)), lax.ne(odd, negative)

    def slope(self, x: jax.Array, size: int) -> jax.Array:
        """The derivative by the grid of the moved pixel coordinate, at the unmoved ``x``: 0 at the border."""
        scale = self.round(self.round(lax.full_like(x, size - 1 if self.align_corners else size)) / 2)
        if self.padding_mode == ZEROS or self.mode == BICUBIC:  # which moves its taps, and not the point
            return scale
        if self.padding_mode == REFLECTION:
            x, back = self.reflected(x, size)
            scale = lax.select(back, -scale, scale)
        beyond = lax.bitwise_or(lax.le(x, num(0, x)), lax.ge(x, num(size - 1, x)))
        return lax.select(beyond, lax.full_like(x, 0), scale)


def _flat(at: Sequence[jax.Array], size: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """The row-major index of integer-valued positions, one of the image where they are outside, and whether inside."""
    inside = jnp.ones(at[0].shape, np.bool_)
    flat = jnp.zeros(at[0].shape, np.int32)
    for p, n in zip(at, size, strict=True):
        inside = inside & (p >= 0) & (p <= n - 1)
        index = lax.convert_element_type(jnp.clip(lax.select(lax.ne(p, p), lax.full_like(p, 0), p), 0, n - 1), np.int32)
        flat = flat * n + index
    return flat, inside


def fetch(image: jax.Array, at: Sequence[jax.Array]) -> jax.Array:
    """(N, C, \\*size) at integer-valued positions, each (N, \\*points) → (N, C, \\*points); 0 outside."""
    size = image.shape[2:]
    flat, inside = _flat(at, size)
    rows = lax.reshape(image, (*image.shape[:2], int(np.prod(size))))
    index = lax.reshape(flat, (flat.shape[0], 1, flat.size // flat.shape[0]))
    taken = jnp.take_along_axis(rows, index, axis=2, mode="clip")
    taken = lax.reshape(taken, (*image.shape[:2], *flat.shape[1:]))
    return where(_over_channels(inside, taken), taken, 0)


def _over_channels(weight: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(weight, like.shape, (0, *range(2, like.ndim)))


def _sides(at: Sequence[jax.Array], r: Round) -> tuple[list[jax.Array], list[tuple[jax.Array, jax.Array]]]:
    """The corner before each point, and for each dim the weights of that corner and of the next one."""
    floors = [lax.floor(p) for p in at]
    if len(at) == 2:
        after = [r(p - low) for p, low in zip(at, floors, strict=True)]
        return floors, [(r(1 - a), a) for a in after]
    return floors, [(r(r(low + 1) - p), r(p - low)) for p, low in zip(at, floors, strict=True)]


def _corners(at: Sequence[jax.Array], r: Round) -> tuple[list[list[jax.Array]], list[jax.Array]]:
    """Positions and weights of the corners around each point."""
    floors, sides = _sides(at, r)
    positions, weights = [], []
    for corner in CORNERS[len(at)]:
        positions.append([low + high for low, high in zip(floors, corner, strict=True)])
        factors = [side[high] for side, high in zip(sides, corner, strict=True)]
        weights.append(functools.reduce(lambda a, b: r(a * b), reversed(factors)))
    return positions, weights


def _cubic_weights(t: jax.Array, r: Round) -> list[jax.Array]:
    """Keys' cubic convolution (1981) with A = -0.75 at distances 1 + t, t, 1 - t, 2 - t."""
    a = -0.75

    def near(x: jax.Array) -> jax.Array:
        return r(r(r(r(r((a + 2) * x) - (a + 3)) * x) * x) + 1)

    def far(x: jax.Array) -> jax.Array:
        return r(r(r(r(r(r(a * x) - 5 * a) * x) + 8 * a) * x) - 4 * a)

    return [far(r(t + 1)), near(t), near(r(1 - t)), far(r(2 - t))]


def _cubic_slopes(t: jax.Array, r: Round) -> list[jax.Array]:
    """The derivatives of these weights, negated."""
    a = -0.75

    def slope(x: jax.Array, square: float, linear: float, constant: float = 0) -> jax.Array:
        return r(r(r(r(square * x) - linear) * x) + constant)

    first = slope(r(-1 - t), -3 * a, 10 * a, -8 * a)
    second = slope(-t, -3 * (a + 2), 2 * (a + 3))
    return [first, second, slope(r(1 - t), 3 * (a + 2), 2 * (a + 3)), slope(r(2 - t), 3 * a, 10 * a, 8 * a)]


def _taps(at: Sequence[jax.Array], how: Sampling) -> tuple[list[jax.Array], list[list[jax.Array]]]:
    """For each dim the offset of the point behind the pixel before it, and the positions of the four taps."""
    r, floors = how.round, [lax.floor(p) for p in at]
    positions = [[how.moved(r(p + i), n) for i in range(-1, 3)] for p, n in zip(floors, how.size, strict=True)]
    return [r(p - low) for p, low in zip(at, floors, strict=True)], positions


def _nearest(at: Sequence[jax.Array]) -> list[jax.Array]:
    return [lax.round(p, lax.RoundingMethod.TO_NEAREST_EVEN) for p in at]


def sample(image: jax.Array, grid: jax.Array, how: Sampling) -> jax.Array:
    """(N, C, \\*size), (N, \\*points, rank) → (N, C, \\*points)."""
    r, at = how.round, how.pixels(grid)

    def weighted(weights: Sequence[jax.Array], values: Sequence[jax.Array]) -> jax.Array:
        terms = [r(v * _over_channels(w, v)) for w, v in zip(weights, values, strict=True)]
        return functools.reduce(lambda a, b: r(a + b), terms)

    if how.mode == BICUBIC:
        behind, (ys, xs) = _taps(at, how)
        across, along = (_cubic_weights(t, r) for t in behind)
        return weighted(across, [weighted(along, [fetch(image, [y, x]) for x in xs]) for y in ys])
    at = [how.moved(p, n) for p, n in zip(at, how.size, strict=True)]
    if how.mode == NEAREST:
        return fetch(image, _nearest(at))
    positions, weights = _corners(at, r)
    return weighted(weights, [fetch(image, p) for p in positions])


def spread(
    positions: Sequence[Sequence[jax.Array]], values: Sequence[jax.Array], size: Sequence[int], lanes: int, rows: int
) -> jax.Array:
    """The transpose of `fetch` at several positions, summed: each of ``values`` (N, C, \\*points) is added there.

    The sum is one by one in the values' dtype: of ``lanes`` points in turn all values at the first positions, then at
    the second ones. A point is never in turn with one of another of the ``rows`` into which the points are divided.
    """
    n, c, *points = values[0].shape
    row = int(np.prod(points)) // rows
    lanes = min(lanes, row)
    blocks = -(-row // lanes)

    def ordered(v: jax.Array) -> jax.Array:  # (taps, N, *, *points) → (N, additions, *)
        v = lax.reshape(v, (len(values), n, v.size // (len(values) * n * rows * row), rows, row))
        if blocks * lanes > row:
            v = lax.pad(v, num(0, v), [(0, 0, 0)] * 4 + [(0, blocks * lanes - row, 0)])
        v = lax.reshape(v, (*v.shape[:4], blocks, lanes))
        v = lax.transpose(v, (1, 3, 4, 0, 5, 2))
        return lax.reshape(v, (n, rows * blocks * len(values) * lanes, v.shape[-1]))

    flat, inside = zip(*(_flat(at, size) for at in positions), strict=True)
    kept = [where(_over_channels(i, v), v, 0) for i, v in zip(inside, values, strict=True)]
    index, updates = ordered(jnp.stack(flat)), ordered(jnp.stack(kept))
    image = lax.broadcasted_iota(np.int32, index.shape, 0)
    total = lax.scatter_add(
        jnp.zeros((n, int(np.prod(size)), c), updates.dtype),
        lax.concatenate([image, index], 2),
        updates,
        lax.ScatterDimensionNumbers((2,), (0, 1), (0, 1)),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return lax.reshape(lax.transpose(total, (0, 2, 1)), (n, c, *size))


def _summed(terms: Sequence[jax.Array], how: Sampling) -> jax.Array:
    """(N, C, \\*points) each → (N, \\*points): all terms of the first channel one after the other, then of the next."""
    stacked = jnp.stack(terms, 2)
    n, c, k, *points = stacked.shape
    stacked = lax.reshape(stacked, (n, c * k, *points))
    if how.dtype not in HALF:
        return lax.reduce_sum(stacked, (1,))
    start = jnp.zeros((n, *points), stacked.dtype)
    return lax.scan(lambda total, term: (how.round(total + term), None), start, jnp.moveaxis(stacked, 1, 0))[0]


def _linear_slopes(
    g: jax.Array, image: jax.Array, at: Sequence[jax.Array], positions: Sequence[Sequence[jax.Array]], how: Sampling
) -> list[jax.Array]:
    """For each dim the gradient of the moved pixel coordinate."""
    r, values = how.round, [fetch(image, p) for p in positions]
    sides = [[_over_channels(side, g) for side in pair] for pair in _sides(at, r)[1]]
    if len(at) == 2:
        nw, ne, sw, se = values
        (s, n), (e, w) = sides
        by_y = r(r(r(r(sw - nw) * e) + r(r(se - ne) * w)) * g)
        by_x = r(r(r(r(ne - nw) * s) + r(r(se - sw) * n)) * g)
        return [_summed([by_y], how), _summed([by_x], how)]
    inside = [_over_channels(_flat(p, how.size)[1], g) for p in positions]
    slopes = []
    for d in range(len(at)):
        terms = []
        for value, kept, corner in zip(values, inside, CORNERS[len(at)], strict=True):
            others = [sides[i][high] for i, high in enumerate(corner) if i != d]
            term = r(functools.reduce(lambda a, b: r(a * b), reversed(others), value) * g)
            terms.append(where(kept, term if corner[d] else -term, 0))
        slopes.append(_summed(terms, how))
    return slopes


def gradients(
    g: jax.Array, image: jax.Array, grid: jax.Array, how: Sampling, lanes: int, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Of the image and of the grid; the first is summed in the image's own dtype, see `spread`."""
    r, pixels, to_grid = how.round, how.pixels(grid), lax.full_like(grid, 0)
    if how.mode == BICUBIC:
        positions, weighted, by_pixel = _cubic_gradients(g, image, pixels, how)
    else:
        planar_nearest = how.mode == NEAREST and len(how.size) == 2
        at = [how.moved(p, n, 0.0 if planar_nearest else np.nan) for p, n in zip(pixels, how.size, strict=True)]
        if how.mode == NEAREST:
            positions, weighted, by_pixel = [_nearest(at)], [g], []
        else:
            positions, weights = _corners(at, r)
            weighted = [r(_over_channels(w, g) * g) for w in weights]
            by_pixel = _linear_slopes(g, image, at, positions, how)
    if by_pixel:
        slopes = [how.slope(p, n) for p, n in zip(pixels, how.size, strict=True)]
        to_grid = jnp.stack([r(a * b) for a, b in zip(reversed(slopes), reversed(by_pixel), strict=True)], -1)
    return spread(positions, [cast(v, how.dtype) for v in weighted], how.size, lanes, rows), to_grid


def _cubic_gradients(
    g: jax.Array, image: jax.Array, pixels: Sequence[jax.Array], how: Sampling
) -> tuple[list[list[jax.Array]], list[jax.Array], list[jax.Array]]:
    """Positions of the taps, what each adds to the image's gradient, and the gradients of the pixel coordinates."""
    r = how.round
    behind, (ys, xs) = _taps(pixels, how)
    across, along = ([_over_channels(w, g) for w in _cubic_weights(t, r)] for t in behind)
    down, right = ([_over_channels(w, g) for w in _cubic_slopes(t, r)] for t in behind)
    positions, weighted, by_y, by_x = [], [], [], []
    for i, j in itertools.product(range(4), repeat=2):
        positions.append([ys[j], xs[i]])
        weighted.append(r(r(g * along[i]) * across[j]))
        value = r(fetch(image, positions[-1]) * g)
        by_x.append(-r(r(value * right[i]) * across[j]))
        by_y.append(-r(r(value * down[j]) * along[i]))
    return positions, weighted, [_summed(by_y, how), _summed(by_x, how)]


def wide(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


@lower(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(
    ctx: Context, image: jax.Array, grid: jax.Array, mode: int, padding_mode: int, align_corners: bool
) -> jax.Array:
    if 0 in ctx.result.shape:
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    how = Sampling(image.shape[2:], ctx.result.dtype, mode, padding_mode, align_corners)
    return cast(sample(wide(image), wide(grid), how), ctx.result.dtype)


def _in_turn(shape: Sequence[int], strides: Strides | None, dtype: torch.dtype) -> tuple[int, int]:
    """How torch's kernel goes over a grid of this shape: ``lanes`` and ``rows`` of `spread`, which matter where sums
    are rounded. That of images takes in turn as many points as a vector of AVX2 holds (it is not built for wider ones),
    beyond the end of a row only if the grid's memory allows.
    """
    if len(shape) == 5 or dtype not in HALF:
        return 1, 1
    _, h, w, _ = shape
    if strides is None:
        return LANES, 1
    _, by_row, by_column, by_axis = strides
    dense = h == 1 or by_row == w * (by_column if w > 1 else by_axis)
    by_step = w == 1 or by_column == 1 or (by_column == 2 and by_axis == 1)
    return LANES, 1 if dense and by_step else h


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
    dtype = to_torch(image.dtype)
    how = Sampling(image.shape[2:], dtype, mode, padding_mode, align_corners)
    in_turn = _in_turn(grid.shape, ctx.strides[2] if ctx.strides else None, dtype)
    results = gradients(wide(g), wide(image), wide(grid), how, *in_turn)
    return tuple(r and cast(v, r.dtype) for v, r in zip(results, ctx.result, strict=True))
