"""Matrix products. Half precision accumulates in float32 and integers wrap around, as in torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.utils._python_dispatch import _disable_current_modes

from portable import dtypes
from portable.lowering.context import Context
from portable.lowering.registry import NO_OPMATH, broadcast, cast, elementwise, lower, place_scalar

aten = torch.ops.aten
HALVES = (jnp.bfloat16, jnp.float16)


def contract(
    ctx: Context,
    x: jax.Array,
    y: jax.Array,
    axes: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> jax.Array:
    """``lax.dot_general`` in torch's precision; the result of half precision inputs is the float32 accumulator."""
    wide = jnp.float32 if x.dtype in HALVES else x.dtype
    return lax.dot_general(x, y, (axes, batch), precision=ctx.precision, preferred_element_type=wide)


def dot_wide(ctx: Context, x: jax.Array, y: jax.Array) -> jax.Array:
    """``x @ y`` over the last axis of x and the second to last of y, batched over the leading axes; see `contract`."""
    batch = tuple(range(x.ndim - 2))
    return contract(ctx, x, y, ((x.ndim - 1,), (len(batch),)), (batch, batch))


def dot(ctx: Context, x: jax.Array, y: jax.Array) -> jax.Array:
    """`dot_wide`, in the dtype of ``x``."""
    return lax.convert_element_type(dot_wide(ctx, x, y), x.dtype)


@lower(aten.mm.default, aten.bmm.default)
def mm(ctx: Context, x: jax.Array, y: jax.Array) -> jax.Array:
    return dot(ctx, x, y)


@lower(aten.mm.dtype, aten.bmm.dtype)
def mm_dtype(ctx: Context, x: jax.Array, y: jax.Array, out_dtype: torch.dtype) -> jax.Array:
    return cast(dot_wide(ctx, x, y), out_dtype)


@lower(aten._int_mm.default)
def int_mm(ctx: Context, x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


@lower(aten._scaled_mm.default)
def scaled_mm(
    ctx: Context,
    x: jax.Array,
    y: jax.Array,
    scale_x: jax.Array,
    scale_y: jax.Array,
    bias: jax.Array | None = None,
    scale_result: jax.Array | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> jax.Array:
    """float8 products in float32, with one scale, or one for each row of ``x`` and column of ``y``."""
    scales = ((scale_x, (x.shape[0], 1)), (scale_y, (1, y.shape[1])))
    if scale_result is not None or any(s.size != 1 and s.shape != shape for s, shape in scales):
        ctx.refuse("scales of blocks, or of the result")
    wide = [lax.convert_element_type(v, jnp.float32) for v in (x, y)]
    scaled = [
        lax.mul(v, broadcast(s.reshape((1, 1)) if s.size == 1 else s, v.shape))
        for v, (s, _) in zip(wide, scales, strict=True)
    ]
    product = dot_wide(ctx, *scaled)
    if bias is not None:
        product = lax.add(product, broadcast(cast(bias, torch.float32), product.shape))
    result = cast(product, ctx.result.dtype)
    if not _overflows(ctx.result.dtype):
        return result
    fits = lax.le(lax.abs(product), lax.full_like(product, torch.finfo(ctx.result.dtype).max))
    return lax.select(fits, result, lax.full_like(result, jnp.nan))


@functools.cache
def _overflows(dtype: torch.dtype) -> bool:
    """Whether torch's kernel gives NaN for a product that float8 does not hold: on some processors it saturates."""
    if dtype.itemsize > 1:
        return False
    with _disable_current_modes():
        large = torch.full((16, 16), 256.0).to(torch.float8_e4m3fn)
        one = torch.ones(())
        return bool(torch._scaled_mm(large, large.t(), one, one, out_dtype=dtype).float().isnan().any())


@lower(aten.mv.default, aten.dot.default)
def mv(ctx: Context, x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.convert_element_type(contract(ctx, x, y, ((x.ndim - 1,), (0,))), x.dtype)


@lower(aten.vdot.default)
def vdot(ctx: Context, x: jax.Array, y: jax.Array) -> jax.Array:
    return mv(ctx, lax.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x, y)


@lower(aten.linear.default)
def linear(ctx: Context, x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    out = contract(ctx, x, weight, ((x.ndim - 1,), (weight.ndim - 1,)))
    if bias is not None:
        out = lax.add(out, broadcast(lax.convert_element_type(bias, out.dtype), out.shape))
    return cast(out, ctx.result.dtype)


@lower(aten.linear_backward.default)
def linear_backward(
    ctx: Context, x: jax.Array, grad: jax.Array, weight: jax.Array, output_mask: Sequence[bool]
) -> tuple[jax.Array | None, ...]:
    rows = tuple(range(grad.ndim - 1))
    to_x, to_weight, to_bias = output_mask
    d_x = cast(contract(ctx, grad, weight, ((grad.ndim - 1,), (0,))), ctx.result[0].dtype) if to_x else None
    d_weight = cast(contract(ctx, grad, x, (rows, rows)), ctx.result[1].dtype) if to_weight else None
    wide = jnp.float32 if grad.dtype in HALVES else grad.dtype
    d_bias = cast(lax.reduce_sum(lax.convert_element_type(grad, wide), rows), ctx.result[2].dtype) if to_bias else None
    return d_x, d_weight, d_bias


@lower(aten.matmul.default)
def matmul(ctx: Context, x: jax.Array, y: jax.Array) -> jax.Array:
    """numpy's matmul: a 1-d operand is a row on the left, a column on the right; batch axes broadcast."""
    if y.ndim <= 2:
        return cast(contract(ctx, x, y, ((x.ndim - 1,), (max(y.ndim - 2, 0),))), ctx.result.dtype)
    x = x[None] if x.ndim == 1 else x
    batch = jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    out = dot(ctx, broadcast(x, batch + x.shape[-2:]), broadcast(y, batch + y.shape[-2:]))
    return lax.reshape(out, ctx.result.shape)


def blend(ctx: Context, x: jax.Array, product: jax.Array, beta: complex, alpha: complex) -> jax.Array:
    """``beta * x + alpha * product``, computed in the accumulator's dtype; a beta of 0 ignores NaN and Inf in ``x``."""
    if jnp.issubdtype(product.dtype, jnp.integer):
        alpha, beta = int(alpha.real), int(beta.real)
    if alpha != 1:
        product = lax.mul(product, place_scalar(alpha, product))
    if beta != 0:
        x = broadcast(lax.convert_element_type(x, product.dtype), product.shape)
        product = lax.add(product, x if beta == 1 else lax.mul(x, place_scalar(beta, x)))
    return cast(product, ctx.result.dtype)


def _product(ctx: Context, x: jax.Array, y: jax.Array, alpha: complex) -> jax.Array:
    """``x @ y``; as in BLAS an alpha of 0 does not read the operands, so that their NaN does not count."""
    if alpha == 0 and x.dtype not in HALVES:
        return jnp.zeros(x.shape[:-1] + y.shape[x.ndim - 1 :], x.dtype)
    return contract(ctx, x, y, ((x.ndim - 1,), (0,)))


@lower(aten.addmm.default, aten.addmv.default)
def addmm(
    ctx: Context, x: jax.Array, a: jax.Array, b: jax.Array, *, beta: complex = 1, alpha: complex = 1
) -> jax.Array:
    return blend(ctx, x, _product(ctx, a, b, alpha), beta, alpha)


@lower(aten.addmm.dtype)
def addmm_dtype(
    ctx: Context,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    out_dtype: torch.dtype,
    *,
    beta: complex = 1,
    alpha: complex = 1,
) -> jax.Array:
    return blend(ctx, x, _product(ctx, a, b, alpha), beta, alpha)


@lower(aten.baddbmm.default)
def baddbmm(
    ctx: Context, x: jax.Array, a: jax.Array, b: jax.Array, *, beta: complex = 1, alpha: complex = 1
) -> jax.Array:
    return blend(ctx, x, dot_wide(ctx, a, b), beta, alpha)


@lower(aten.baddbmm.dtype)
def baddbmm_dtype(
    ctx: Context,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    out_dtype: torch.dtype,
    *,
    beta: complex = 1,
    alpha: complex = 1,
) -> jax.Array:
    return blend(ctx, x, dot_wide(ctx, a, b), beta, alpha)


@lower(aten.addbmm.default)
def addbmm(
    ctx: Context, x: jax.Array, a: jax.Array, b: jax.Array, *, beta: complex = 1, alpha: complex = 1
) -> jax.Array:
    """The batch is one more contracted axis; half precision rounds after each member of the batch, as in torch."""
    if a.dtype in HALVES and len(a):
        first = blend(ctx, x, dot_wide(ctx, a[0], b[0]), beta, alpha)
        return lax.fori_loop(1, len(a), lambda i, sofar: blend(ctx, sofar, dot_wide(ctx, a[i], b[i]), 1, alpha), first)
    if alpha == 0:
        return blend(ctx, x, jnp.zeros(ctx.result.shape, a.dtype), beta, alpha)
    return blend(ctx, x, contract(ctx, a, b, ((0, 2), (0, 1))), beta, alpha)


@elementwise(aten.addr.default, operands=(0,), promote=NO_OPMATH)
def _addr(x: jax.Array, a: jax.Array, b: jax.Array, *, beta: complex = 1, alpha: complex = 1) -> jax.Array:
    """``beta * x + (alpha * a) b``; on booleans `or` and `and`; a beta of 0 ignores NaN in ``x``.

    torch rounds half precision after each operation here.
    """
    kind = dtypes.to_torch(x.dtype)
    a, b = broadcast(cast(a, kind)[:, None], x.shape), broadcast(cast(b, kind)[None], x.shape)
    if x.dtype == jnp.bool_:
        product = lax.bitwise_and(a, b) if alpha else lax.full_like(x, False)
        return lax.bitwise_or(x, product) if beta else product
    product = lax.mul(lax.mul(place_scalar(alpha, x), a), b)
    return lax.add(lax.mul(place_scalar(beta, x), x), product) if beta != 0 else product


@lower(aten._trilinear.default)
def trilinear(
    ctx: Context,
    x: jax.Array,
    y: jax.Array,
    z: jax.Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> jax.Array:
    """The sum over ``sumdim`` of ``x * y * z``, each unsqueezed at its ``expand`` axes."""
    ndim = x.ndim + len(expand1)
    added = [{e % ndim for e in expand} for expand in (expand1, expand2, expand3)]
    names = [[a for a in range(ndim) if a not in new] for new in added]
    summed = {d % ndim for d in sumdim}
    kept = tuple(a for a in range(ndim) if a not in summed)
    wide = jnp.float32 if x.dtype in HALVES else None
    sized = []
    for operand, axes in zip((x, y, z), names, strict=True):
        sized += [operand, axes]
    out = jnp.einsum(*sized, list(kept), precision=ctx.precision, preferred_element_type=wide)
    return cast(lax.reshape(out, ctx.result.shape), ctx.result.dtype)
