"""Random numbers. The key comes from torch's generator state: `torch.manual_seed` reproduces, two calls differ.

The distributions are torch's; the streams are not, since XLA draws from another generator (Threefry). A generator
that is passed explicitly has a state of its own, which is not part of the program: it is refused.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable import dtypes
from portable.lowering.context import Context, Spec
from portable.lowering.registry import TracedScalar, broadcast, cast, lower
from portable.lowering.sorting import search

aten, prims = torch.ops.aten, torch.ops.prims


def _key(ctx: Context, generator: Any = None) -> jax.Array:
    if generator is not None:
        ctx.refuse("an explicit torch.Generator is not part of the program; use torch.manual_seed")
    return ctx.key()


def _wide(dtype: torch.dtype) -> np.dtype:
    """The type to draw in: float64 for float64, else float32."""
    return np.dtype(np.float64 if dtype in (torch.float64, torch.complex128) else np.float32)


def _uniform(ctx: Context, spec: Spec, generator: Any = None) -> jax.Array:
    """In [0, 1), in the type to draw in."""
    return jax.random.uniform(_key(ctx, generator), spec.shape, _wide(spec.dtype))


def _positive_uniform(ctx: Context, spec: Spec, generator: Any = None) -> jax.Array:
    """In (0, 1]."""
    u = _uniform(ctx, spec, generator)
    return lax.sub(lax.full_like(u, 1), u)


def _normal(ctx: Context, spec: Spec, generator: Any = None) -> jax.Array:
    kind = spec.jax_dtype if spec.dtype.is_complex else _wide(spec.dtype)
    return jax.random.normal(_key(ctx, generator), spec.shape, kind)


def _constant(like: jax.Array, value: Any) -> jax.Array:
    return broadcast(cast(value, dtypes.to_torch(like.dtype)), like.shape)


@lower(aten.rand.default, aten.rand.generator)
def rand(ctx: Context, *_: Any, generator: Any = None, **__: Any) -> jax.Array:
    spec = ctx.result
    if spec.dtype.is_complex:
        parts = Spec(spec.shape, torch.float64 if spec.dtype == torch.complex128 else torch.float32)
        return lax.complex(_uniform(ctx, parts, generator), _uniform(ctx, parts, generator))
    return jax.random.uniform(_key(ctx, generator), spec.shape, spec.jax_dtype)


@lower(aten.rand_like.default, aten.rand_like.generator)
def rand_like(ctx: Context, _: jax.Array, *, generator: Any = None, **__: Any) -> jax.Array:
    return rand(ctx, generator=generator)


def _between(ctx: Context, spec: Spec, low: Any, high: Any, generator: Any = None) -> jax.Array:
    """In [low, high): rounding up to ``high`` itself gives ``low``."""
    u = _uniform(ctx, spec, generator)
    low, high = _constant(u, low), _constant(u, high)
    out = cast(lax.add(lax.mul(u, lax.sub(high, low)), low), spec.dtype)
    low, high = cast(low, spec.dtype), cast(high, spec.dtype)
    return lax.select(lax.ge(out, high), low, out)


@lower(aten.uniform.default)
def uniform(ctx: Context, x: jax.Array, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> jax.Array:
    return _between(ctx, ctx.result, low, high, generator)


@lower(prims.uniform.default)
def prims_uniform(ctx: Context, _: Any, *, low: float, high: float, generator: Any = None, **__: Any) -> jax.Array:
    return _between(ctx, ctx.result, low, high, generator)


@lower(aten.randn.default, aten.randn.generator)
def randn(ctx: Context, *_: Any, generator: Any = None, **__: Any) -> jax.Array:
    return cast(_normal(ctx, ctx.result, generator), ctx.result.dtype)


@lower(aten.randn_like.default, aten.randn_like.generator)
def randn_like(ctx: Context, _: jax.Array, *, generator: Any = None, **__: Any) -> jax.Array:
    return randn(ctx, generator=generator)


def _scaled_normal(ctx: Context, mean: Any, std: Any, generator: Any) -> jax.Array:
    z = _normal(ctx, ctx.result, generator)
    return cast(lax.add(lax.mul(z, _constant(z, std)), _constant(z, mean)), ctx.result.dtype)


@lower(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(ctx: Context, mean: Any, std: Any = 1.0, *, generator: Any = None) -> jax.Array:
    return _scaled_normal(ctx, mean, std, generator)


@lower(aten.normal.float_float)
def normal_sized(ctx: Context, mean: float, std: float, _: Any, *, generator: Any = None, **__: Any) -> jax.Array:
    return _scaled_normal(ctx, mean, std, generator)


@lower(aten.normal_functional.default)
def normal_functional(
    ctx: Context, x: jax.Array, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> jax.Array:
    return _scaled_normal(ctx, mean, std, generator)


@lower(prims.normal.default)
def prims_normal(ctx: Context, _: Any, *, mean: Any, std: Any, generator: Any = None, **__: Any) -> jax.Array:
    return _scaled_normal(ctx, mean, std, generator)


@lower(aten.log_normal.default)
def log_normal(ctx: Context, x: jax.Array, mean: float = 1.0, std: float = 2.0, *, generator: Any = None) -> jax.Array:
    z = _normal(ctx, ctx.result, generator)
    return cast(lax.exp(lax.add(lax.mul(z, _constant(z, std)), _constant(z, mean))), ctx.result.dtype)


@lower(aten.exponential.default)
def exponential(ctx: Context, x: jax.Array, lambd: float = 1.0, *, generator: Any = None) -> jax.Array:
    """-log(u) / lambd for u in (0, 1]; never zero, as in torch."""
    u = _positive_uniform(ctx, ctx.result, generator)
    half_step = float(np.finfo(u.dtype).eps) / 2
    sample = lax.max(lax.neg(lax.log(u)), _constant(u, half_step))
    return cast(lax.div(sample, _constant(u, lambd)), ctx.result.dtype)


@lower(aten.cauchy.default)
def cauchy(ctx: Context, x: jax.Array, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None) -> jax.Array:
    """The inverse of the distribution function: median + sigma * tan(pi * (u - 1/2))."""
    u = _uniform(ctx, ctx.result, generator)
    tangent = lax.tan(lax.mul(lax.sub(u, _constant(u, 0.5)), _constant(u, math.pi)))
    return cast(lax.add(lax.mul(tangent, _constant(u, sigma)), _constant(u, median)), ctx.result.dtype)


@lower(aten.geometric.default)
def geometric(ctx: Context, x: jax.Array, p: float, *, generator: Any = None) -> jax.Array:
    """The number of trials up to the first success, 1, 2, …: ceil(log(u) / log(1 - p)) for u in (0, 1]."""
    u = _positive_uniform(ctx, ctx.result, generator)
    if isinstance(p, TracedScalar):
        ctx.refuse("the probability depends on the data")
    scale = -math.inf if p >= 1 else math.log1p(-p)
    trials = lax.ceil(lax.div(lax.log(u), _constant(u, scale)))
    return cast(lax.max(trials, _constant(u, 1)), ctx.result.dtype)


def _bernoulli(ctx: Context, spec: Spec, p: Any, generator: Any = None) -> jax.Array:
    """True with probability ``p``, a number or an array."""
    kind = torch.float64 if isinstance(p, jax.Array) and p.dtype == np.float64 else torch.float32
    u = _uniform(ctx, Spec(spec.shape, kind), generator)
    return lax.lt(u, _constant(u, p))


@lower(aten.bernoulli.default)
def bernoulli(ctx: Context, p: jax.Array, *, generator: Any = None) -> jax.Array:
    return cast(_bernoulli(ctx, ctx.result, p, generator), ctx.result.dtype)


@lower(aten.bernoulli.p, aten.bernoulli.Tensor)
def bernoulli_p(ctx: Context, x: jax.Array, p: Any = 0.5, *, generator: Any = None) -> jax.Array:
    return cast(_bernoulli(ctx, ctx.result, p, generator), ctx.result.dtype)


@lower(aten.native_dropout.default)
def native_dropout(ctx: Context, x: jax.Array, p: float, train: bool | None) -> tuple[jax.Array, jax.Array]:
    """(x * mask / (1 - p), mask). A dropped NaN stays NaN, as in eager, since it is multiplied by zero."""
    if train is False or p == 0:
        return x, jnp.ones(x.shape, np.bool_)
    mask = _bernoulli(ctx, ctx.result[1], 1 - p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    wide = cast(x, torch.float32) if x.dtype.itemsize < 4 else x
    out = lax.mul(wide, lax.mul(lax.convert_element_type(mask, wide.dtype), _constant(wide, scale)))
    return cast(out, ctx.result[0].dtype), mask


def _integers(ctx: Context, spec: Spec, low: int, count: int, generator: Any = None) -> jax.Array:
    """Uniform in low, …, low + count - 1, from 64 bits, so that the bias of the remainder is below count / 2**64."""
    bits = jax.random.bits(_key(ctx, generator), spec.shape, np.uint64)
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
    bits = jax.random.bits(_key(ctx, generator), ctx.result.shape, np.uint64)
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
    return _integers(ctx, ctx.result, 0, _largest(ctx.result.dtype) + 1, generator)


@lower(aten.random.to)
def random_to(ctx: Context, x: jax.Array, high: int, *, generator: Any = None) -> jax.Array:
    return _integers(ctx, ctx.result, 0, *_whole(ctx, high), generator)


@lower(getattr(aten.random, "from"))
def random_from(ctx: Context, x: jax.Array, low: int, high: int | None, *, generator: Any = None) -> jax.Array:
    low, high = _whole(ctx, low, _largest(ctx.result.dtype) + 1 if high is None else high)
    return _integers(ctx, ctx.result, low, high - low, generator)


@lower(aten.randperm.default, aten.randperm.generator)
def randperm(ctx: Context, n: int, *, generator: Any = None, **_: Any) -> jax.Array:
    return cast(jax.random.permutation(_key(ctx, generator), n), ctx.result.dtype)


@lower(aten.multinomial.default)
def multinomial(
    ctx: Context, weights: jax.Array, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> jax.Array:
    """With replacement the distribution function is inverted. Without, the largest of weight / exponential are
    drawn (Efraimidis and Spirakis 2006, in the form that torch uses).
    """
    weights = cast(weights, torch.float64 if weights.dtype == np.float64 else torch.float32)
    if replacement:
        total = lax.cumsum(lax.convert_element_type(weights, np.float64), weights.ndim - 1)
        u = _uniform(ctx, Spec(ctx.result.shape, torch.float64), generator)
        last = lax.slice_in_dim(total, total.shape[-1] - 1, total.shape[-1], 1, total.ndim - 1)
        target = lax.mul(u, broadcast(last, u.shape))
        # rounding may reach the total itself: the first position that holds the whole total is then the last possible
        return lax.min(search(total, target, True), search(total, broadcast(last, u.shape), False))
    u = _positive_uniform(ctx, Spec(weights.shape, dtypes.to_torch(weights.dtype)), generator)
    race = lax.div(weights, lax.max(lax.neg(lax.log(u)), _constant(u, float(np.finfo(u.dtype).tiny))))
    return lax.convert_element_type(lax.top_k(race, num_samples)[1], np.int64)


@lower(aten.poisson.default)
def poisson(ctx: Context, rate: jax.Array, generator: Any = None) -> jax.Array:
    wide = lax.convert_element_type(rate, _wide(ctx.result.dtype))
    return cast(jax.random.poisson(_key(ctx, generator), wide, dtype=np.int64), ctx.result.dtype)


@lower(aten.binomial.default)
def binomial(ctx: Context, count: jax.Array, prob: jax.Array, generator: Any = None) -> jax.Array:
    kind = _wide(ctx.result.dtype)
    count, prob = (lax.convert_element_type(v, kind) for v in (count, prob))
    return cast(jax.random.binomial(_key(ctx, generator), count, prob, dtype=kind), ctx.result.dtype)


@lower(aten._standard_gamma.default)
def standard_gamma(ctx: Context, alpha: jax.Array, generator: Any = None) -> jax.Array:
    wide = lax.convert_element_type(alpha, _wide(ctx.result.dtype))
    return cast(jax.random.gamma(_key(ctx, generator), wide), ctx.result.dtype)


@lower(aten._sample_dirichlet.default)
def sample_dirichlet(ctx: Context, alpha: jax.Array, generator: Any = None) -> jax.Array:
    wide = lax.convert_element_type(alpha, _wide(ctx.result.dtype))
    return cast(jax.random.dirichlet(_key(ctx, generator), wide, dtype=wide.dtype), ctx.result.dtype)
