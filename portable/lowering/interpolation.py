"""Resampling of images to another size, in all modes, and its gradients.

Along one dimension a resampling is a table: for each output the inputs that it reads and their weights. The dimensions
are independent, so an image is resampled one dimension at a time, and a gradient is the transposed table.

Source coordinates and weights are computed in float32 (float64 for float64), as torch does: in which input a coordinate
falls can depend on its last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import cast, register

aten = torch.ops.aten
HALF = (jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class Table:
    """(outputs, taps): which input each tap reads and its weight. A tap that reads nothing has ``inside`` False."""

    index: np.ndarray
    weight: np.ndarray
    inside: np.ndarray

    def transposed(self, inputs: int) -> Table:
        """The table from outputs to inputs."""
        reads: list[list[tuple[int, Any]]] = [[] for _ in range(inputs)]
        for out in range(len(self.index)):
            for i, w, there in zip(self.index[out], self.weight[out], self.inside[out], strict=True):
                if there:
                    reads[i].append((out, w))
        taps = max((len(r) for r in reads), default=0)
        index, weight = np.zeros((inputs, taps), np.int64), np.zeros((inputs, taps), self.weight.dtype)
        inside = np.zeros((inputs, taps), bool)
        for i, row in enumerate(reads):
            for t, (out, w) in enumerate(row):
                index[i, t], weight[i, t], inside[i, t] = out, w, True
        return Table(index, weight, inside)

    @property
    def copies(self) -> bool:
        """Each output is one input, unweighted."""
        return self.index.shape[1] == 1 and bool(self.inside.all()) and bool((self.weight == 1).all())

    def _taken(self, x: jax.Array, axis: int) -> jax.Array:
        """``axis`` of ``x`` as (outputs, taps); no gather where inputs are repeated or read in order."""
        outputs, taps = self.index.shape
        shape = (*x.shape[:axis], outputs, taps, *x.shape[axis + 1 :])
        if taps * outputs == x.shape[axis] and (self.index.ravel() == np.arange(taps * outputs)).all():
            return lax.reshape(x, shape)
        times, rest = divmod(outputs, x.shape[axis])
        if taps == 1 and not rest and (self.index[:, 0] == np.arange(outputs) // times).all():
            wide = lax.expand_dims(x, (axis + 1,))
            repeated = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
            return lax.reshape(lax.broadcast_in_dim(wide, repeated, tuple(range(wide.ndim))), shape)
        return jnp.take(x, self.index, axis=axis, mode="clip")

    def apply(self, x: jax.Array, axis: int) -> jax.Array:
        """Resample ``axis`` of ``x``."""
        outputs, taps = self.index.shape
        shape = (*x.shape[:axis], outputs, *x.shape[axis + 1 :])
        if taps == 0 or x.size == 0:
            return jnp.zeros(shape, x.dtype)
        taken = self._taken(x, axis)
        if self.copies:
            return lax.reshape(taken, shape)
        weight = lax.broadcast_in_dim(self.weight.astype(x.dtype), taken.shape, (axis, axis + 1))
        inside = lax.broadcast_in_dim(self.inside, taken.shape, (axis, axis + 1))
        return lax.reduce_sum(lax.select(inside, taken * weight, lax.full_like(taken, 0)), (axis + 1,))


def source_scale(inputs: int, outputs: int, align_corners: bool, factor: float | None, real: type) -> Any:
    """How far the source moves for one output: the inverse of the given factor, else the ratio of the sizes."""
    if align_corners:
        return real(inputs - 1) / real(outputs - 1) if outputs > 1 else real(0)
    return real(1.0 / factor) if factor else real(inputs) / real(outputs)


def _nearest(index: np.ndarray, inputs: int, real: type) -> Table:
    index = np.minimum(index.astype(np.int64), inputs - 1)[:, None]
    return Table(index, np.ones(index.shape, real), np.ones(index.shape, bool))


def nearest_scaled(inputs: int, outputs: int, align_corners: bool, factor: float | None, real: type) -> Table:
    scale = source_scale(inputs, outputs, False, factor, real)
    return _nearest(np.floor(np.arange(outputs).astype(real) * scale), inputs, real)


def nearest(inputs: int, outputs: int, align_corners: bool, factor: float | None, real: type) -> Table:
    """An unchanged or doubled size is copied or repeated, whatever factor was given.

    So do torch's kernels in two dimensions and all its gradients, but not the kernels in one and three dimensions.
    """
    if outputs in (inputs, 2 * inputs):
        return _nearest(np.arange(outputs) * inputs // outputs, inputs, real)
    return nearest_scaled(inputs, outputs, align_corners, factor, real)


def nearest_exact(inputs: int, outputs: int, align_corners: bool, factor: float | None, real: type) -> Table:
    scale = source_scale(inputs, outputs, False, factor, real)
    return _nearest(np.floor((np.arange(outputs).astype(real) + real(0.5)) * scale), inputs, real)


def _sources(inputs: int, outputs: int, align_corners: bool, factor: float | None, real: type) -> np.ndarray:
    scale = source_scale(inputs, outputs, align_corners, factor, real)
    i: np.ndarray = np.arange(outputs).astype(real)
    return scale * i if align_corners else scale * (i + real(0.5)) - real(0.5)


def linear(inputs: int, outputs: int, align_corners: bool, factor: float | None, real: type) -> Table:
    at = np.maximum(_sources(inputs, outputs, align_corners, factor, real), real(0))
    if inputs == outputs:  # torch copies, whatever factor was given
        at = np.arange(outputs).astype(real)
    low = np.minimum(at.astype(np.int64), inputs - 1)
    high = np.minimum(low + 1, inputs - 1)
    fraction = np.clip(at - low.astype(real), real(0), real(1))
    weight = np.stack([real(1) - fraction, fraction], 1)
    return Table(np.stack([low, high], 1), weight, np.ones(weight.shape, bool))


def keys(x: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic convolution kernel (1981)."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0)).astype(x.dtype)


def cubic(inputs: int, outputs: int, align_corners: bool, factor: float | None, real: type) -> Table:
    at = _sources(inputs, outputs, align_corners, factor, real)
    low = np.floor(at)
    taps = np.arange(-1, 3)
    weight = keys((at - low)[:, None] - taps.astype(real), -0.75)
    index = np.clip(low.astype(np.int64)[:, None] + taps, 0, inputs - 1)
    return Table(index, weight, np.ones(weight.shape, bool))


def _sinc(x: np.ndarray) -> np.ndarray:
    return np.sinc(x).astype(x.dtype)


# name: (kernel, taps at scale 1)
KERNELS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], int]] = {
    "linear": (lambda x: np.maximum(1 - np.abs(x), 0).astype(x.dtype), 2),
    "cubic": (lambda x: keys(x, -0.5), 4),
    "lanczos": (lambda x: np.where(np.abs(x) < 3, _sinc(x) * _sinc(x / 3), 0).astype(x.dtype), 6),
}


def antialiased(kernel: str) -> Callable[..., Table]:
    """The kernel stretched by the scale when the image shrinks; weights normalised to sum 1 (PIL's method)."""
    function, width = KERNELS[kernel]

    def table(inputs: int, outputs: int, align_corners: bool, factor: float | None, real: type) -> Table:
        scale = source_scale(inputs, outputs, align_corners, factor, real)
        stretch = max(scale, real(1))
        support = real(width * 0.5) * stretch
        centre = scale * (np.arange(outputs).astype(real) + real(0.5))
        start = np.maximum((centre - support + real(0.5)).astype(np.int64), 0)
        end = np.minimum((centre + support + real(0.5)).astype(np.int64), inputs)
        index = start[:, None] + np.arange(max(int((end - start).max(initial=0)), 1))
        inside = index < end[:, None]
        weight = function(((index - centre[:, None]).astype(real) + real(0.5)) * (real(1) / stretch)) * inside
        sums = weight.sum(1, keepdims=True)
        weight = (weight / np.where(sums == 0, real(1), sums)).astype(real)
        return Table(np.minimum(index, inputs - 1), weight, inside)

    return table


def _tables(
    make: Callable[..., Table],
    dtype: Any,
    sizes: Sequence[int],
    outputs: Sequence[int],
    align_corners: bool,
    factors: Sequence[float | None],
) -> list[Table]:
    real = np.float64 if dtype == np.float64 else np.float32
    return [make(n, m, align_corners, f, real) for n, m, f in zip(sizes, outputs, factors, strict=True)]


def _wide(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32) if x.dtype in HALF else x


def _parameters(rank: int, has_align: bool, rest: Sequence[Any]) -> tuple[bool, list[float | None]]:
    """(align_corners, one scale factor or None for each dimension) from an op's trailing arguments."""
    align_corners, given = (bool(rest[0]), rest[1:]) if has_align else (False, rest)
    return align_corners, [*given, *[None] * (rank - len(given))]


def _forward(make: Callable[..., Table], rank: int, has_align: bool) -> Callable[..., jax.Array]:
    def rule(ctx: Context, x: jax.Array, output_size: Sequence[int], *rest: Any) -> jax.Array:
        if make not in (nearest, nearest_scaled, nearest_exact) and not jnp.issubdtype(x.dtype, jnp.floating):
            ctx.refuse("integer images: torch's fixed-point arithmetic is not reproduced")
        align_corners, factors = _parameters(rank, has_align, rest)
        tables = _tables(make, x.dtype, x.shape[2:], output_size, align_corners, factors)
        out = _wide(x)
        for axis in reversed(range(2, x.ndim)):
            out = tables[axis - 2].apply(out, axis)
        return cast(out, ctx.result.dtype)

    return rule


def _backward(make: Callable[..., Table], rank: int, has_align: bool) -> Callable[..., jax.Array]:
    def rule(
        ctx: Context, g: jax.Array, output_size: Sequence[int], input_size: Sequence[int], *rest: Any
    ) -> jax.Array:
        align_corners, factors = _parameters(rank, has_align, rest)
        sizes = input_size[2:]
        if make is cubic and list(sizes) == list(output_size):
            return g  # torch copies, whatever factor was given
        tables = _tables(make, g.dtype, sizes, output_size, align_corners, factors)
        out = _wide(g)
        for axis, (table, n) in enumerate(zip(tables, sizes, strict=True), 2):
            out = table.transposed(n).apply(out, axis)
        return cast(out, ctx.result.dtype)

    return rule


# (op, table, spatial dimensions, takes align_corners)
FORWARD = [
    (aten.upsample_linear1d.default, linear, 1, True),
    (aten.upsample_bilinear2d.default, linear, 2, True),
    (aten.upsample_trilinear3d.default, linear, 3, True),
    (aten.upsample_bicubic2d.default, cubic, 2, True),
    (aten.upsample_nearest1d.default, nearest_scaled, 1, False),
    (aten.upsample_nearest2d.default, nearest, 2, False),
    (aten.upsample_nearest3d.default, nearest_scaled, 3, False),
    (aten._upsample_nearest_exact1d.default, nearest_exact, 1, False),
    (aten._upsample_nearest_exact2d.default, nearest_exact, 2, False),
    (aten._upsample_nearest_exact3d.default, nearest_exact, 3, False),
    (aten._upsample_bilinear2d_aa.default, antialiased("linear"), 2, True),
    (aten._upsample_bicubic2d_aa.default, antialiased("cubic"), 2, True),
]
BACKWARD = [
    (aten._upsample_bilinear2d_aa_backward.default, antialiased("linear"), 2, True),
    (aten._upsample_bicubic2d_aa_backward.default, antialiased("cubic"), 2, True),
    (aten.upsample_linear1d_backward.default, linear, 1, True),
    (aten.upsample_bilinear2d_backward.default, linear, 2, True),
    (aten.upsample_trilinear3d_backward.default, linear, 3, True),
    (aten.upsample_bicubic2d_backward.default, cubic, 2, True),
    (aten.upsample_nearest1d_backward.default, nearest, 1, False),
    (aten.upsample_nearest2d_backward.default, nearest, 2, False),
    (aten.upsample_nearest3d_backward.default, nearest, 3, False),
    (aten._upsample_nearest_exact1d_backward.default, nearest_exact, 1, False),
    (aten._upsample_nearest_exact2d_backward.default, nearest_exact, 2, False),
    (aten._upsample_nearest_exact3d_backward.default, nearest_exact, 3, False),
]
if hasattr(aten, "_upsample_lanczos2d_aa"):  # newer torch
    FORWARD.append((aten._upsample_lanczos2d_aa.default, antialiased("lanczos"), 2, True))
for _op, _make, _rank, _has_align in FORWARD:
    register(_op, _forward(_make, _rank, _has_align), f"{__file__}: FORWARD")
for _op, _make, _rank, _has_align in BACKWARD:
    register(_op, _backward(_make, _rank, _has_align), f"{__file__}: BACKWARD")
