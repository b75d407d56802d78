"""Random numbers. The key comes from torch's generator state: `torch.manual_seed` reproduces, two calls differ.

The distributions are torch's; the streams are not, since XLA draws from another generator (Threefry). Only where the
traced function seeds the generator itself is the stream known in advance: then the numbers are eager's own, drawn once,
and constants of the program (`Context.drawn`). A generator that is passed explicitly has a state of its own, which is
not part of the program: it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable import dtypes
from portable.lowering.bounds import holds
from portable.lowering.context import Context, Spec
from portable.lowering.registry import TracedScalar, broadcast, cast, lower
from portable.lowering.shape import take
from portable.lowering.sorting import search

aten, prims = torch.ops.aten, torch.ops.prims
LARGEST_CONSTANT = 1 << 24  # elements; what the function seeds itself is drawn into the program


def key_of(ctx: Context, generator: Any = None) -> jax.Array:
    if generator is not None:
        ctx.refuse("an explicit torch.Generator is not part of the program; use torch.manual_seed")
    return ctx.key()


def seeded(ctx: Context, spec: Spec, fill: Callable[..., Any], generator: Any = None) -> jax.Array | None:
    """Eager's numbers where the function has seeded the generator itself, else None.

    Args:
        fill: called with (an uninitialised tensor, its generator); writes the numbers, as an in-place op of torch does.
            They are laid out like the op's tensor argument, in whose storage order torch draws.
    """
    if generator is not None:
        return None
    if math.prod(spec.shape) > LARGEST_CONSTANT:
        return None
    strides = ctx.strides[0] if ctx.strides else None
    if strides is not None and not (len(strides) == len(spec.shape) and _dense(spec.shape, strides)):
        strides = None

    def draw(source: torch.Generator) -> torch.Tensor:
        if strides is None:
            out = torch.empty(spec.shape, dtype=spec.dtype)
        else:
            out = torch.empty_strided(spec.shape, tuple(strides), dtype=spec.dtype)
        fill(out, source)
        return out

    return ctx.drawn(draw)


def _dense(shape: tuple[int, ...], strides: Sequence[int]) -> bool:
    """Whether the strides cover a storage of that many elements, each once."""
    expected = 1
    for stride, n in sorted((st, n) for n, st in zip(shape, strides, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= n
    return True


def _wide(dtype: torch.dtype) -> np.dtype:
    """The type to draw in: float64 for float64, else float32."""
    return np.dtype(np.float64 if dtype in (torch.float64, torch.complex128) else np.float32)


def _uniform(ctx: Context, spec: Spec, generator: Any = None) -> jax.Array:
    """In [0, 1), in the type to draw in."""
    return jax.random.uniform(key_of(ctx, generator), spec.shape, _wide(spec.dtype))


def _positive_uniform(ctx: Context, spec: Spec, generator: Any = None) -> jax.Array:
    """In (0, 1]."""
    u = _uniform(ctx, spec, generator)
    return lax.sub(lax.full_like(u, 1), u)


def _normal(ctx: Context, spec: Spec, generator: Any = None) -> jax.Array:
    kind = spec.jax_dtype if spec.dtype.is_complex else _wide(spec.dtype)
    return jax.random.normal(key_of(ctx, generator), spec.shape, kind)


def _constant(like: jax.Array, value: Any) -> jax.Array:
    return broadcast(cast(value, dtypes.to_torch(like.dtype)), like.shape)


@lower(aten.rand.default, aten.rand.generator)
def rand(ctx: Context, *_: Any, generator: Any = None, **__: Any) -> jax.Array:
    spec = ctx.result
    known = seeded(ctx, spec, lambda out, g: torch.rand(out.shape, dtype=out.dtype, generator=g, out=out), generator)
    if known is not None:
        return known
    if spec.dtype.is_complex:
        parts = Spec(spec.shape, torch.float64 if spec.dtype == torch.complex128 else torch.float32)
        return lax.complex(_uniform(ctx, parts, generator), _uniform(ctx, parts, generator))
    return jax.random.uniform(key_of(ctx, generator), spec.shape, spec.jax_dtype)


@lower(aten.rand_like.default, aten.rand_like.generator)
def rand_like(ctx: Context, _: jax.Array, *, generator: Any = None, **__: Any) -> jax.Array:
    return uniform(ctx, _, generator=generator)


def _between(ctx: Context, spec: Spec, low: Any, high: Any, generator: Any = None) -> jax.Array:
    """In [low, high): rounding up to ``high`` itself gives ``low``."""
    u = _uniform(ctx, spec, generator)
    low, high = _constant(u, low), _constant(u, high)
    out = cast(lax.add(lax.mul(u, lax.sub(high, low)), low), spec.dtype)
    low, high = cast(low, spec.dtype), cast(high, spec.dtype)
    return lax.select(lax.ge(out, high), low, out)


@lower(aten.uniform.default)
def uniform(ctx: Context, x: jax.Array, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> jax.Array:
    known = seeded(ctx, ctx.result, lambda out, g: out.uniform_(low, high, generator=g), generator)
    if known is not None:
        return known
    return _between(ctx, ctx.result, low, high, generator)


@lower(prims.uniform.default)
def prims_uniform(ctx: Context, _: Any, *, low: float, high: float, generator: Any = None, **__: Any) -> jax.Array:
    return _between(ctx, ctx.result, low, high, generator)


@lower(aten.randn.default, aten.randn.generator)
def randn(ctx: Context, *_: Any, generator: Any = None, **__: Any) -> jax.Array:
    known = seeded(ctx, ctx.result, lambda out, g: out.normal_(generator=g), generator)
    return cast(_normal(ctx, ctx.result, generator) if known is None else known, ctx.result.dtype)


@lower(aten.randn_like.default, aten.randn_like.generator)
def randn_like(ctx: Context, _: jax.Array, *, generator: Any = None, **__: Any) -> jax.Array:
    return randn(ctx, generator=generator)


def _scaled_normal(ctx: Context, mean: Any, std: Any, generator: Any) -> jax.Array:
    z = seeded(ctx, ctx.result, lambda out, g: out.normal_(generator=g), generator)
    dtype = ctx.result.dtype if ctx.result.dtype.is_complex else dtypes.to_torch(_wide(ctx.result.dtype))
    z = cast(_normal(ctx, ctx.result, generator) if z is None else z, dtype)
    if z.dtype.kind == "c" and not isinstance(mean, jax.Array):
        mean = complex(mean, mean)  # torch shifts both parts
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
    known = seeded(ctx, ctx.result, lambda out, g: out.log_normal_(mean, std, generator=g), generator)
    if known is not None:
        return known
    z = _normal(ctx, ctx.result, generator)
    return cast(lax.exp(lax.add(lax.mul(z, _constant(z, std)), _constant(z, mean))), ctx.result.dtype)


@lower(aten.exponential.default)
def exponential(ctx: Context, x: jax.Array, lambd: float = 1.0, *, generator: Any = None) -> jax.Array:
    """-log(u) / lambd for u in (0, 1]; never zero, as in torch."""
    known = seeded(ctx, ctx.result, lambda out, g: out.exponential_(lambd, generator=g), generator)
    if known is not None:
        return known
    u = _positive_uniform(ctx, ctx.result, generator)
    half_step = float(np.finfo(u.dtype).eps) / 2
    sample = lax.max(lax.neg(lax.log(u)), _constant(u, half_step))
    return cast(lax.div(sample, _constant(u, lambd)), ctx.result.dtype)


@lower(aten.cauchy.default)
def cauchy(ctx: Context, x: jax.Array, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None) -> jax.Array:
    """The inverse of the distribution function: median + sigma * tan(pi * (u - 1/2))."""
    known = seeded(ctx, ctx.result, lambda out, g: out.cauchy_(median, sigma, generator=g), generator)
    if known is not None:
        return known
    u = _uniform(ctx, ctx.result, generator)
    tangent = lax.tan(lax.mul(lax.sub(u, _constant(u, 0.5)), _constant(u, math.pi)))
    return cast(lax.add(lax.mul(tangent, _constant(u, sigma)), _constant(u, median)), ctx.result.dtype)


@lower(aten.geometric.default)
def geometric(ctx: Context, x: jax.Array, p: float, *, generator: Any = None) -> jax.Array:
    """The number of trials up to the first success, 1, 2, …: ceil(log(u) / log(1 - p)) for u in (0, 1]."""
    if isinstance(p, TracedScalar):
        ctx.refuse("the probability depends on the data")
    known = seeded(ctx, ctx.result, lambda out, g: out.geometric_(p, generator=g), generator)
    if known is not None:
        return known
    u = _positive_uniform(ctx, ctx.result, generator)
    scale = -math.inf if p >= 1 else math.log1p(-p)
    trials = lax.ceil(lax.div(lax.log(u), _constant(u, scale)))
    return cast(lax.max(trials, _constant(u, 1)), ctx.result.dtype)


def _bernoulli(ctx: Context, spec: Spec, p: Any, generator: Any = None) -> jax.Array:
    """True with probability ``p``, a number or an array."""
    if not isinstance(p, (jax.Array, TracedScalar)):
        known = seeded(ctx, spec, lambda out, g: out.bernoulli_(p, generator=g), generator)
        if known is not None:
            return cast(known, torch.bool)
    double = isinstance(p, jax.Array) and p.dtype == np.float64
    drawn = Spec(spec.shape, torch.float64 if double else torch.float32)
    u = seeded(ctx, drawn, lambda out, g: out.uniform_(generator=g), generator)
    u = _uniform(ctx, drawn, generator) if u is None else u
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


@lower(aten.rrelu_with_noise_functional.default)
def rrelu_with_noise(
    ctx: Context,
    x: jax.Array,
    noise: jax.Array,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """(result, noise). The mean slope below zero; in training a random slope for each element, which is the noise."""
    kind = _wide(ctx.result[0].dtype)
    wide = lax.convert_element_type(x, kind)
    positive = lax.bitwise_not(lax.le(wide, lax.full_like(wide, 0)))  # NaN counts as positive
    if not training:
        mean = lax.mul(wide, lax.full_like(wide, (lower + upper) / 2))
        return cast(lax.select(positive, wide, mean), ctx.result[0].dtype), noise
    slope = None if generator is not None else _seeded_slopes(ctx, positive, lower, upper)
    if slope is None:
        slope = _between(ctx, Spec(x.shape, dtypes.to_torch(kind)), lower, upper, generator)
    slope = lax.select(positive, lax.full_like(wide, 1), lax.convert_element_type(slope, kind))
    return cast(lax.mul(wide, slope), ctx.result[0].dtype), cast(slope, ctx.result[1].dtype)


def _seeded_slopes(ctx: Context, positive: jax.Array, lower: float, upper: float) -> jax.Array | None:
    """Eager draws for each element that is not positive, in order, and for no other."""
    u = ctx.drawn(
        lambda g: torch.empty(positive.size, dtype=torch.float64).uniform_(lower, upper, generator=g), counted=False
    )
    if u is None or not positive.size:
        return u if u is None else lax.reshape(u, positive.shape)
    order = lax.cumsum(lax.convert_element_type(lax.bitwise_not(lax.reshape(positive, u.shape)), np.int64))
    order = lax.max(lax.sub(order, lax.full_like(order, 1)), lax.full_like(order, 0))
    return lax.reshape(take(u, order, 0), positive.shape)


@lower(aten.multinomial.default)
def multinomial(
    ctx: Context, weights: jax.Array, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> jax.Array:
    """With replacement the distribution function is inverted. Without, the largest of weight / exponential are
    drawn (Efraimidis and Spirakis 2006, in the form that torch uses).
    """
    valid = lax.bitwise_and(lax.ge(weights, lax.full_like(weights, 0)), lax.lt(weights, lax.full_like(weights, np.inf)))
    holds(ctx, jnp.all(valid), "probability tensor contains either `inf`, `nan` or element < 0")
    some = jnp.all(jnp.any(weights, weights.ndim - 1))
    holds(ctx, some, "invalid multinomial distribution (sum of probabilities <= 0)")
    if replacement and num_samples > 1:
        drawn = Spec(ctx.result.shape, torch.float64)
        u = seeded(ctx, drawn, lambda out, g: out.uniform_(generator=g), generator)
        return _inverted(weights, _uniform(ctx, drawn, generator) if u is None else u)
    spec = Spec(weights.shape, dtypes.to_torch(weights.dtype))
    race = seeded(ctx, spec, lambda out, g: out.exponential_(generator=g), generator)
    if race is None:
        u = _positive_uniform(ctx, spec, generator)
        race = lax.max(lax.neg(lax.log(u)), _constant(u, float(np.finfo(u.dtype).tiny)))
    wide = torch.float64 if weights.dtype == np.float64 else torch.float32
    ratio = cast(cast(lax.div(cast(weights, wide), cast(race, wide)), spec.dtype), wide)
    return lax.convert_element_type(lax.top_k(ratio, num_samples)[1], np.int64)


def _inverted(weights: jax.Array, u: jax.Array) -> jax.Array:
    """The category whose share of the weights, in order, holds ``u`` in [0, 1): never one of weight zero."""
    last = weights.ndim - 1
    total = lax.cumsum(lax.convert_element_type(weights, np.float64), last)
    whole = broadcast(lax.slice_in_dim(total, total.shape[last] - 1, total.shape[last], 1, last), u.shape)
    # rounding may reach the whole: the first position that holds all of it is then the last possible
    return lax.min(search(total, lax.mul(u, whole), True), search(total, whole, False))


@lower(aten.poisson.default)
def poisson(ctx: Context, rate: jax.Array, generator: Any = None) -> jax.Array:
    wide = lax.convert_element_type(rate, _wide(ctx.result.dtype))
    return cast(jax.random.poisson(key_of(ctx, generator), wide, dtype=np.int64), ctx.result.dtype)


@lower(aten.binomial.default)
def binomial(ctx: Context, count: jax.Array, prob: jax.Array, generator: Any = None) -> jax.Array:
    kind = _wide(ctx.result.dtype)
    count, prob = (lax.convert_element_type(v, kind) for v in (count, prob))
    return cast(jax.random.binomial(key_of(ctx, generator), count, prob, dtype=kind), ctx.result.dtype)


@lower(aten._standard_gamma.default)
def standard_gamma(ctx: Context, alpha: jax.Array, generator: Any = None) -> jax.Array:
    wide = lax.convert_element_type(alpha, _wide(ctx.result.dtype))
    return cast(jax.random.gamma(key_of(ctx, generator), wide), ctx.result.dtype)


@lower(aten._sample_dirichlet.default)
def sample_dirichlet(ctx: Context, alpha: jax.Array, generator: Any = None) -> jax.Array:
    wide = lax.convert_element_type(alpha, _wide(ctx.result.dtype))
    return cast(jax.random.dirichlet(key_of(ctx, generator), wide, dtype=wide.dtype), ctx.result.dtype)
