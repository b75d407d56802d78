"""Views of the same bits as another type: ``view.dtype``, complex as pairs of reals, lazy conjugation and negation."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from jax import lax

from portable import dtypes
from portable.lowering.context import Context
from portable.lowering.registry import cast, lower

aten, prims = torch.ops.aten, torch.ops.prims


@lower(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(ctx: Context, x: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(part, (x.ndim,)) for part in (lax.real(x), lax.imag(x))], x.ndim)


@lower(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(ctx: Context, x: jax.Array) -> jax.Array:
    if ctx.result.dtype not in (torch.complex64, torch.complex128):
        dtypes.to_jax(ctx.result.dtype)
    real, imaginary = (lax.index_in_dim(x, i, x.ndim - 1, keepdims=False) for i in (0, 1))
    return lax.complex(real, imaginary)


@lower(aten.view.dtype, aten.view_copy.dtype, prims.view_of_dtype.default)
def view_dtype(ctx: Context, x: jax.Array, _: Any) -> jax.Array:
    """Reinterpret the bits; between sizes the last dim grows or shrinks (little endian, as torch's hosts are).

    XLA bitcasts neither complex nor bool: they pass through pairs of reals and through bytes (0 and 1).
    """
    to = ctx.result.jax_dtype
    if x.dtype == to:
        return x
    if x.dtype == np.bool_:
        x = lax.convert_element_type(x, np.uint8)
    elif np.issubdtype(x.dtype, np.complexfloating):
        pairs = view_as_real(ctx, x)
        x = lax.reshape(pairs, (*x.shape[:-1], -1 if not x.ndim else 2 * x.shape[-1])) if x.ndim else pairs
    if np.issubdtype(to, np.complexfloating):
        part = np.dtype(f"f{to.itemsize // 2}")
        parts = _resized(x, part, (*ctx.result.shape, 2))
        return lax.complex(*(lax.index_in_dim(parts, i, parts.ndim - 1, keepdims=False) for i in (0, 1)))
    if to == np.bool_:
        return cast(_resized(x, np.dtype(np.uint8), ctx.result.shape), torch.bool)
    return _resized(x, to, ctx.result.shape)


def _resized(x: jax.Array, to: np.dtype, shape: tuple[int, ...]) -> jax.Array:
    """The bits of ``x`` in row-major order as an array of ``to`` of this shape."""
    ratio = to.itemsize // x.dtype.itemsize
    if ratio > 1:
        x = lax.reshape(x, (x.size // ratio, ratio))
    return lax.reshape(lax.bitcast_convert_type(x, to), shape)


@lower(aten._conj.default, aten._conj_copy.default, aten._conj_physical.default, prims.conj.default)
def conj(ctx: Context, x: jax.Array) -> jax.Array:
    return lax.conj(x) if np.issubdtype(x.dtype, np.complexfloating) else x


@lower(aten._neg_view.default, aten._neg_view_copy.default)
def neg_view(ctx: Context, x: jax.Array) -> jax.Array:
    return lax.neg(x)


@lower(prims.real.default)
def real(ctx: Context, x: jax.Array) -> jax.Array:
    return lax.real(x)


@lower(prims.imag.default)
def imag(ctx: Context, x: jax.Array) -> jax.Array:
    return lax.imag(x)
