"""Convolutions of any rank, and their gradients.

All of them are three correlations over the same windows, in torch's terms (kernel tap ``k`` of output ``t`` reads input
``t * stride + k * dilation - padding``):

* ``correlate``: the convolution itself; also the input gradient of a transposed one.
* ``spread``: its transpose in the input; the transposed convolution.
* ``taps``: its transpose in the weight; the weight gradient of both.

Half precision accumulates in float32 and is rounded once, after the bias (but see `spread_by_taps`). A complex
convolution is three real ones (Gauss: ``re = a - b, im = c - a - b`` with ``a = re*re, b = im*im, c = (re + im)*(re +
im)``), which is what torch does on CPU, so that NaN and Inf spread alike, and no platform needs complex convolutions.
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

from portable import dtypes
from portable.lowering.context import Context
from portable.lowering.registry import cast, lower, narrowed

aten = torch.ops.aten
HALF = (jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class Windows:
    """Where the taps of a kernel fall; one number for each spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    precision: lax.Precision

    @classmethod
    def of(cls, ctx: Context, rank: int, stride: Any, padding: Any, dilation: Any, groups: int) -> Windows:
        def each(v: Sequence[int]) -> tuple[int, ...]:
            return tuple(v) * rank if len(v) == 1 else tuple(v)

        return cls(each(stride), each(padding), each(dilation), groups, ctx.precision)

    def reach(self, count: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """Padded input length that ``count`` windows of ``kernel`` taps cover."""
        return [
            (n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(count, self.stride, kernel, self.dilation, strict=True)
        ]

    def pads(self, size: Sequence[int], count: Sequence[int], kernel: Sequence[int]) -> list[tuple[int, int]]:
        """Padding such that exactly ``count`` windows fit; negative where the end is not read."""
        reach = self.reach(count, kernel)
        return [(p, r - n - p) for p, r, n in zip(self.padding, reach, size, strict=True)]


def wide(x: jax.Array) -> Any:
    """The dtype in which products of ``x`` accumulate."""
    return jnp.float32 if x.dtype in HALF else x.dtype


def gauss(product: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """A bilinear ``product`` of complex arrays from three products of real ones."""
    if not jnp.iscomplexobj(x):
        return product(x, y)
    a = product(lax.real(x), lax.real(y))
    b = product(lax.imag(x), lax.imag(y))
    c = product(lax.real(x) + lax.imag(x), lax.real(y) + lax.imag(y))
    return lax.complex(a - b, c - a - b)


def _layout(rank: int, batch: int = 0) -> tuple[int, ...]:
    """Dimension numbers with the batch (or output-channel) dimension at ``batch``, 0 or 1."""
    return (batch, 1 - batch, *range(2, rank + 2))


def correlate(x: jax.Array, w: jax.Array, at: Windows, count: Sequence[int]) -> jax.Array:
    """(N, I, \\*size), (O, I/groups, \\*kernel) → (N, O, \\*count)."""
    rank = len(count)
    if 0 in x.shape or 0 in w.shape:
        return jnp.zeros((x.shape[0], w.shape[0], *count), wide(x))
    return lax.conv_general_dilated(
        x,
        w,
        at.stride,
        at.pads(x.shape[2:], count, w.shape[2:]),
        rhs_dilation=at.dilation,
        dimension_numbers=lax.ConvDimensionNumbers(_layout(rank), _layout(rank), _layout(rank)),
        feature_group_count=at.groups,
        precision=at.precision,
        preferred_element_type=wide(x),
    )


def spread(g: jax.Array, w: jax.Array, at: Windows, size: Sequence[int]) -> jax.Array:
    """(N, O, \\*count), (O, I/groups, \\*kernel) → (N, I, \\*size): each window adds its taps to where it read them."""
    rank, kernel = len(size), w.shape[2:]
    inputs = w.shape[1] * at.groups
    if 0 in g.shape or 0 in w.shape or 0 in size:
        return jnp.zeros((g.shape[0], inputs, *size), wide(g))
    w = lax.reshape(w, (at.groups, w.shape[0] // at.groups, *w.shape[1:]))
    w = lax.reshape(lax.transpose(w, (0, 2, 1, *range(3, rank + 3))), (inputs, g.shape[1] // at.groups, *kernel))
    first = [d * (k - 1) - p for d, k, p in zip(at.dilation, kernel, at.padding, strict=True)]
    spans = [(n - 1) * s + 1 for n, s in zip(g.shape[2:], at.stride, strict=True)]
    last = [
        n + d * (k - 1) - span - lo for n, d, k, span, lo in zip(size, at.dilation, kernel, spans, first, strict=True)
    ]
    return lax.conv_general_dilated(
        g,
        lax.rev(w, tuple(range(2, rank + 2))),
        (1,) * rank,
        list(zip(first, last, strict=True)),
        lhs_dilation=at.stride,
        rhs_dilation=at.dilation,
        dimension_numbers=lax.ConvDimensionNumbers(_layout(rank), _layout(rank), _layout(rank)),
        feature_group_count=at.groups,
        precision=at.precision,
        preferred_element_type=wide(g),
    )


def spread_by_taps(g: jax.Array, w: jax.Array, at: Windows, size: Sequence[int]) -> jax.Array:
    """`spread` in half precision with the rounding of torch's own 3-d kernel (oneDNN takes no output_padding of the
    stride or more, and float16 on few processors): each tap's product is rounded, then the sum after each tap, in the
    order of the kernel."""
    kernel, inputs = w.shape[2:], w.shape[1] * at.groups
    total = jnp.zeros((g.shape[0], inputs, *size), np.float32)
    if 0 in g.shape or 0 in w.shape or 0 in size:
        return total
    x = lax.reshape(g, (g.shape[0], at.groups, g.shape[1] // at.groups, *g.shape[2:])).astype(np.float32)
    weights = lax.reshape(w, (at.groups, w.shape[0] // at.groups, *w.shape[1:])).astype(np.float32)
    spans = [(n - 1) * s + 1 for n, s in zip(g.shape[2:], at.stride, strict=True)]
    dtype = dtypes.to_torch(g.dtype)
    for tap in np.ndindex(*kernel):
        part = jnp.einsum("bgo...,goi->bgi...", x, weights[(..., *tap)], precision=lax.Precision.HIGHEST)
        part = narrowed(part, dtype)
        first = [t * d - p for t, d, p in zip(tap, at.dilation, at.padding, strict=True)]
        room = [(lo, n - span - lo, s - 1) for lo, n, span, s in zip(first, size, spans, at.stride, strict=True)]
        part = lax.pad(lax.reshape(part, (*total.shape[:2], *g.shape[2:])), np.float32(0), [(0, 0, 0)] * 2 + room)
        total = narrowed(total + part, dtype)
    return total


def taps(x: jax.Array, g: jax.Array, at: Windows, kernel: Sequence[int]) -> jax.Array:
    """(N, I, \\*size), (N, O, \\*count) → (O, I/groups, \\*kernel): what each tap read, weighted by ``g``."""
    rank = len(kernel)
    if 0 in x.shape or 0 in g.shape:
        return jnp.zeros((g.shape[1], x.shape[1] // at.groups, *kernel), wide(x))
    return lax.conv_general_dilated(
        x,
        g,
        at.dilation,
        at.pads(x.shape[2:], g.shape[2:], kernel),
        rhs_dilation=at.stride,
        dimension_numbers=lax.ConvDimensionNumbers(_layout(rank, 1), _layout(rank, 1), _layout(rank, 1)),
        batch_group_count=at.groups,
        precision=at.precision,
        preferred_element_type=wide(x),
    )


@lower(aten.convolution.default, aten._convolution.default)
def convolution(
    ctx: Context,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_: bool,
) -> jax.Array:
    if 0 in ctx.result.shape:  # without input channels torch gives no output channels either, whatever the weight has
        return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
    at = Windows.of(ctx, w.ndim - 2, stride, padding, dilation, groups)
    beyond = any(extra >= step for extra, step in zip(output_padding, at.stride, strict=False))
    without = x.dtype == jnp.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    by_taps = (beyond or without) and w.ndim == 5 and x.dtype in HALF
    apply = (spread_by_taps if by_taps else spread) if transposed else correlate
    out = gauss(lambda a, b: apply(a, b, at, ctx.result.shape[2:]), x, w)
    if bias is not None:
        bias = lax.convert_element_type(bias, out.dtype)
        out = lax.add(out, lax.broadcast_in_dim(bias, out.shape, (1,)))
    return cast(out, ctx.result.dtype)


@lower(aten.convolution_backward.default)
def convolution_backward(
    ctx: Context,
    g: jax.Array,
    x: jax.Array,
    w: jax.Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    at = Windows.of(ctx, w.ndim - 2, stride, padding, dilation, groups)
    gx = gw = gb = None
    apply = correlate if transposed else spread
    if output_mask[0]:
        gx = gauss(lambda a, b: apply(a, b, at, x.shape[2:]), g, _conj(w))
    if output_mask[1]:
        source, target = (g, _conj(x)) if transposed else (_conj(x), g)
        gw = gauss(lambda a, b: taps(a, b, at, w.shape[2:]), source, target)
    if output_mask[2]:
        gb = lax.reduce_sum(lax.convert_element_type(g, wide(g)), (0, *range(2, g.ndim)))
    grads = [None if v is None else lax.convert_element_type(v, np.dtype(x.dtype)) for v in (gx, gw, gb)]
    return tuple(grads)


def _conj(x: jax.Array) -> jax.Array:
    return lax.conj(x) if dtypes.to_torch(x.dtype).is_complex else x
