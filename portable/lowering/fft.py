"""Discrete Fourier transforms and their frequencies. shift, stft and istft decompose to these and to views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch._prims_common import get_computation_dtype

from portable.lowering.context import Context
from portable.lowering.elementwise import num
from portable.lowering.registry import cast, lower

aten = torch.ops.aten
NONE, BY_ROOT_N, BY_N = range(3)  # ATen's fft_norm_mode


def _along(x: jax.Array, axis: int, kind: lax.FftType, length: int) -> jax.Array:
    """A transform of one axis; it is the last one for ``lax.fft``."""
    if x.size == 0:
        shape = list(x.shape)
        shape[axis] = length // 2 + 1 if kind == lax.FftType.RFFT else length
        return jnp.zeros(shape, x.dtype)
    x = jnp.moveaxis(x, axis, -1)
    return jnp.moveaxis(lax.fft(x, kind, (length,)), -1, axis)


def _scaled(x: jax.Array, count: int, normalization: int) -> jax.Array:
    """ATen's normalization of a transform over ``count`` points, which XLA has left unscaled."""
    if normalization == NONE:
        return x
    return x * jnp.asarray(1 / (math.sqrt(count) if normalization == BY_ROOT_N else count), x.dtype)


def _complex(x: jax.Array, axes: Sequence[int], forward: bool) -> jax.Array:
    """Unscaled complex transforms; XLA divides its inverse by the length, which is undone here."""
    for axis in axes:
        n = x.shape[axis]
        x = _along(x, axis, lax.FftType.FFT if forward else lax.FftType.IFFT, n)
        x = x if forward else x * jnp.asarray(n, x.dtype)
    return x


@lower(aten._fft_c2c.default)
def c2c(ctx: Context, x: jax.Array, dim: Sequence[int], normalization: int, forward: bool) -> jax.Array:
    return _scaled(_complex(x, dim, forward), math.prod(x.shape[d] for d in dim), normalization)


@lower(aten._fft_r2c.default)
def r2c(ctx: Context, x: jax.Array, dim: Sequence[int], normalization: int, onesided: bool) -> jax.Array:
    """The last of ``dim`` is halved where ``onesided``."""
    count = math.prod(x.shape[d] for d in dim)
    if not onesided:
        return _scaled(_complex(x.astype(ctx.result.jax_dtype), dim, True), count, normalization)
    half = _along(x, dim[-1], lax.FftType.RFFT, x.shape[dim[-1]]).astype(ctx.result.jax_dtype)
    return _scaled(_complex(half, dim[:-1], True), count, normalization)


@lower(aten._fft_c2r.default)
def c2r(ctx: Context, x: jax.Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> jax.Array:
    """The inverse of `r2c`: ``last_dim_size`` is the length of the last of ``dim`` in the result."""
    count = math.prod(ctx.result.shape[d] for d in dim)
    x = _complex(x, dim[:-1], False)
    half = last_dim_size // 2 + 1
    x = lax.slice_in_dim(x, 0, min(half, x.shape[dim[-1]]), axis=dim[-1] % x.ndim)
    out = _along(x, dim[-1], lax.FftType.IRFFT, last_dim_size).astype(ctx.result.jax_dtype)
    return _scaled(out * jnp.asarray(last_dim_size, out.dtype), count, normalization)


def _frequencies(ctx: Context, index: Sequence[int], n: int, d: float) -> jax.Array:
    """``index / (n d)``, as a product with the inverse, which torch rounds to the result's type first."""
    dtype = ctx.result.dtype
    if n > 2 / torch.finfo(dtype).eps:
        ctx.refuse(f"{dtype} does not hold every integer up to {n}: torch counts in steps that round")
    counts = cast(np.asarray(index, np.int64), dtype)
    if not counts.size:
        return counts
    wide = cast(counts, get_computation_dtype(dtype))
    return cast(lax.mul(wide, num(num(1 / (n * d), counts), wide)), dtype)


@lower(aten.fft_fftfreq.default)
def fftfreq(ctx: Context, n: int, d: float = 1.0, **_: Any) -> jax.Array:
    return _frequencies(ctx, [*range((n + 1) // 2), *range(-(n // 2), 0)], n, d)


@lower(aten.fft_rfftfreq.default)
def rfftfreq(ctx: Context, n: int, d: float = 1.0, **_: Any) -> jax.Array:
    return _frequencies(ctx, range(n // 2 + 1), n, d)
