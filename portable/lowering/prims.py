"""``prims.*`` that torch's decompositions produce: mostly the rule of the ATen op of the same name.

Prims that only move elements are in ``shape.py``, ``creation.py`` and ``bitcast.py``.
"""

from __future__ import annotations

from typing import Any

import jax
import torch
from jax import lax

from portable.lowering import (  # noqa: F401 - they fill RULES
    bessel,
    comparison,
    division,
    elementwise,
    power,
    reduction,
    special,
)
from portable.lowering.context import Context
from portable.lowering.registry import (
    ALWAYS_BOOL,
    DEFAULT,
    RULES,
    apply_elementwise,
    cast,
    elementwise_table,
    lower,
    lower_library,
    register,
)

aten, prims = torch.ops.aten, torch.ops.prims

_UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil conj_physical cos cosh digamma erf erfc exp exp2 expm1 "
    "floor frexp lgamma log log10 log1p log2 neg reciprocal round rsqrt sign signbit sin sinh sqrt tan tanh trunc"
).split()
_BINARY = "atan2 fmax fmin gcd hypot igamma igammac maximum minimum nextafter".split()
_BINARY_OF_TENSORS = "add sub mul bitwise_and bitwise_or bitwise_xor eq ne lt le gt ge fmod remainder".split()
_RENAMED = {
    prims.bessel_i0.default: aten.i0.default,
    prims.bessel_i0e.default: aten.special_i0e.default,
    prims.bessel_i1.default: aten.special_i1.default,
    prims.bessel_i1e.default: aten.special_i1e.default,
    prims.bessel_j0.default: aten.special_bessel_j0.default,
    prims.bessel_j1.default: aten.special_bessel_j1.default,
    prims.erf_inv.default: aten.erfinv.default,
    prims.erfcx.default: aten.special_erfcx.default,
    prims.frexp.default: aten.frexp.Tensor,
    prims.ndtri.default: aten.special_ndtri.default,
    prims.pow.default: aten.pow.Tensor_Tensor,
    prims.shift_left.default: aten.bitwise_left_shift.Tensor,
    prims.shift_right_arithmetic.default: aten.bitwise_right_shift.Tensor,
    prims.spherical_bessel_j0.default: aten.special_spherical_bessel_j0.default,
    prims.where.default: aten.where.self,
    prims.zeta.default: aten.special_zeta.default,
}


def _same(name: str, overload: str = "default") -> tuple[Any, Any]:
    return getattr(prims, name).default, getattr(getattr(aten, name), overload)


_COUNTERPARTS = {
    **dict(_same(name) for name in (*_UNARY, *_BINARY) if name != "frexp"),
    **dict(_same(name, "Tensor") for name in _BINARY_OF_TENSORS),
    **_RENAMED,
}
for _prim, _op in _COUNTERPARTS.items():
    register(_prim, RULES[_op].apply, RULES[_op].where)

elementwise_table({prims.isfinite.default: special.is_finite}, promote=ALWAYS_BOOL)
elementwise_table(
    {
        prims.cbrt.default: lax.cbrt,
        # of integers too: rounded toward zero
        prims.div.default: division.true_div,
    }
)


@lower_library("prims::fma")  # torch registers it when Inductor is first imported
def fma(ctx: Context, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """``a * b + c``, rounded as in eager: Dynamo's form of ``addcmul_``, ``addcdiv_`` and ``add_`` with a factor."""
    return apply_elementwise(_multiply_add, DEFAULT, None, ctx, a, b, c)


def _multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return a * b + c


@lower(prims.convert_element_type.default)
def convert_element_type(ctx: Context, x: jax.Array, dtype: torch.dtype) -> jax.Array:
    return cast(x, dtype)


# An empty list of dims reduces nothing, unlike in ATen; None reduces all.


def _axes(x: jax.Array, dims: Any) -> tuple[int, ...]:
    return tuple(range(x.ndim)) if dims is None else tuple(dims)


@lower(prims.sum.default)
def sum_(ctx: Context, x: jax.Array, dims: Any, *, output_dtype: Any = None) -> jax.Array:
    x = reduction.widened(x if output_dtype is None else cast(x, output_dtype))
    return reduction.finish(lax.reduce_sum(x, _axes(x, dims)), ctx.result)


@lower(prims.prod.default)
def prod(ctx: Context, x: jax.Array, dims: Any, *, output_dtype: Any = None) -> jax.Array:
    x = reduction.widened(x if output_dtype is None else cast(x, output_dtype))
    return reduction.finish(lax.reduce_prod(x, _axes(x, dims)), ctx.result)


@lower(prims.xor_sum.default)
def xor_sum(ctx: Context, x: jax.Array, dims: Any, *, output_dtype: Any = None) -> jax.Array:
    return reduction.finish(lax.reduce_xor(x, _axes(x, dims)), ctx.result)


@lower(prims.amax.default)
def amax(ctx: Context, x: jax.Array, dims: Any, *, output_dtype: Any = None) -> jax.Array:
    return reduction.finish(reduction.reduce_max(x, _axes(x, dims)), ctx.result)


@lower(prims.amin.default)
def amin(ctx: Context, x: jax.Array, dims: Any, *, output_dtype: Any = None) -> jax.Array:
    return reduction.finish(reduction.reduce_min(x, _axes(x, dims)), ctx.result)


@lower(prims.var.default)
def var(ctx: Context, x: jax.Array, dims: Any, correction: float | None = 1, *, output_dtype: Any = None) -> jax.Array:
    x = reduction.widened(x)
    variance, _ = reduction.moments(x, _axes(x, dims), 1 if correction is None else correction)
    return reduction.finish(variance, ctx.result)
