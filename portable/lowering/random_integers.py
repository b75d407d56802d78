"""Random integers and permutations, see `random`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context, Spec
from portable.lowering.random import key_of, seeded
from portable.lowering.registry import TracedScalar, broadcast, cast, lower

aten = torch.ops.aten


def _integers(ctx: Context, spec: Spec, low: int, count: int, generator: Any = None) -> jax.Array:
    """Uniform in low, …, low + count - 1, from 64 bits, so that the bias of the remainder is below count / 2**64."""
    known = seeded(ctx, spec, lambda out, g: out.random_(low, low + count, generator=g), generator)
    if known is not None:
        return known
    bits = jax.random.bits(key_of(ctx, generator), spec.shape, np.uint64)
    if count < 1 << 64:
        bits = lax.rem(bits, lax.full_like(bits, count))
    value = lax.bitcast_convert_type(bits, np.int64)
    value = lax.add(value, lax.full_like(value, low)) if low else value
    if spec.dtype is torch.uint64:
        return lax.bitcast_convert_type(value, np.uint64)
    return cast(value, spec.dtype)


def _whole(ctx: Context, *numbers: Any) -> tuple[int, ...]:
    if any(isinstance(n, (TracedScalar, jax.Array)) for n in numbers):
        ctx.refuse("the range depends on the data")
    return tuple(int(n) for n in numbers)


@lower(aten.randint.default, aten.randint.generator)
def randint(ctx: Context, high: int, *_: Any, generator: Any = None, **__: Any) -> jax.Array:
    (high,) = _whole(ctx, high)
    return _integers(ctx, ctx.result, 0, high, generator)


@lower(aten.randint.low, aten.randint.low_generator)
def randint_low(ctx: Context, low: int, high: int, *_: Any, generator: Any = None, **__: Any) -> jax.Array:
    low, high = _whole(ctx, low, high)
    return _integers(ctx, ctx.result, low, high - low, generator)


@lower(aten.randint_like.default, aten.randint_like.generator)
def randint_like(ctx: Context, _: jax.Array, high: int, *, generator: Any = None, **__: Any) -> jax.Array:
    return randint(ctx, high, generator=generator)


@lower(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def randint_like_low(ctx: Context, _: jax.Array, low: int, high: int, *, generator: Any = None, **__: Any) -> jax.Array:
    return randint_low(ctx, low, high, generator=generator)


@lower(aten.randint_like.Tensor, aten.randint_like.Tensor_generator)
def randint_like_tensor(ctx: Context, _: jax.Array, high: jax.Array, *, generator: Any = None, **__: Any) -> jax.Array:
    bits = jax.random.bits(key_of(ctx, generator), ctx.result.shape, np.uint64)  # `key` refuses where it is seeded
    below = broadcast(lax.convert_element_type(high, np.uint64), ctx.result.shape)
    return cast(lax.bitcast_convert_type(lax.rem(bits, below), np.int64), ctx.result.dtype)


def _largest(dtype: torch.dtype) -> int:
    """The largest of the consecutive whole numbers that ``random_`` draws from: the type represents each exactly."""
    if dtype is torch.bool:
        return 1
    if dtype.is_floating_point:
        return 1 << {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    return torch.iinfo(dtype).max


@lower(aten.random.default)
def random(ctx: Context, x: jax.Array, *, generator: Any = None) -> jax.Array:
    known = seeded(ctx, ctx.result, lambda out, g: out.random_(generator=g), generator)
    if known is not None:
        return known
    return _integers(ctx, ctx.result, 0, _largest(ctx.result.dtype) + 1, generator)


@lower(aten.random.to)
def random_to(ctx: Context, x: jax.Array, high: int, *, generator: Any = None) -> jax.Array:
    (high,) = _whole(ctx, high)
    return _integers(ctx, ctx.result, 0, high, generator)


@lower(getattr(aten.random, "from"))
def random_from(ctx: Context, x: jax.Array, low: int, high: int | None, *, generator: Any = None) -> jax.Array:
    low, high = _whole(ctx, low, _largest(ctx.result.dtype) + 1 if high is None else high)
    return _integers(ctx, ctx.result, low, high - low, generator)


@lower(aten.randperm.default, aten.randperm.generator)
def randperm(ctx: Context, n: int, *, generator: Any = None, **_: Any) -> jax.Array:
    known = seeded(ctx, ctx.result, lambda out, g: torch.randperm(n, generator=g, out=out), generator)
    if known is not None:
        return known
    return cast(jax.random.permutation(key_of(ctx, generator), n), ctx.result.dtype)
