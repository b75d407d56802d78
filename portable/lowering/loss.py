"""Losses between an input and a target of its shape: one formula a loss, one a gradient.

The formulas are those of the documentation of ``torch.nn``; NaN spreads as through torch's CPU kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable import dtypes
from portable.lowering.bounds import holds
from portable.lowering.context import Context
from portable.lowering.elementwise import true_div
from portable.lowering.registry import DEFAULT, broadcast, cast, described, lower, narrowed, register

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
Formula = Callable[..., jax.Array]


def operands(*xs: jax.Array) -> list[jax.Array]:
    """Promoted to torch's computation dtype and broadcast together."""
    computation, _ = dtypes.promote(DEFAULT, tuple(described(x) for x in xs))
    shape = np.broadcast_shapes(*(x.shape for x in xs))
    return [broadcast(cast(x, computation), shape) for x in xs]


def reduced(ctx: Context, losses: jax.Array, reduction: int) -> jax.Array:
    """As it is, the mean (NaN of nothing), or the sum; cast to the result's dtype."""
    if reduction != NONE:
        count = losses.size
        losses = lax.reduce_sum(losses, tuple(range(losses.ndim)))
        losses = true_div(losses, lax.full_like(losses, count)) if reduction == MEAN else losses
    return cast(lax.reshape(losses, ctx.result.shape), ctx.result.dtype)


def _loss(formula: Formula) -> Callable[..., jax.Array]:
    def rule(ctx: Context, x: jax.Array, target: jax.Array, *rest: Any) -> jax.Array:
        reduction, *parameters = rest or (MEAN,)
        return reduced(ctx, formula(*operands(x, target), *parameters), reduction)

    return rule


def _gradient(formula: Formula) -> Callable[..., jax.Array]:
    """The formula gives the derivative; the rule multiplies it by gradient and reduction factor."""

    def rule(ctx: Context, g: jax.Array, x: jax.Array, target: jax.Array, *rest: Any) -> jax.Array:
        reduction, *parameters = rest or (MEAN,)
        count = x.size
        g, x, target = operands(g, x, target)
        g = g * lax.full_like(g, 1 / count) if reduction == MEAN and count else g
        return cast(broadcast(g * formula(x, target, *parameters), ctx.result.shape), ctx.result.dtype)

    return rule


def _smooth_l1(x: jax.Array, target: jax.Array, beta: float = 1.0) -> jax.Array:
    z = lax.abs(x - target)
    square = 0.5 * z * z / beta if beta else z
    return lax.select(lax.lt(z, lax.full_like(z, beta)), square, z - lax.full_like(z, 0.5 * beta))


def _smooth_l1_slope(x: jax.Array, target: jax.Array, beta: float) -> jax.Array:
    z = x - target
    bound = lax.full_like(z, beta)
    inner = z / beta if beta else lax.full_like(z, np.nan)
    return lax.select(z <= -bound, lax.full_like(z, -1), lax.select(z >= bound, lax.full_like(z, 1), inner))


def _huber(x: jax.Array, target: jax.Array, delta: float = 1.0) -> jax.Array:
    z = lax.abs(x - target)
    bound = lax.full_like(z, delta)
    return lax.select(z <= bound, 0.5 * z * z, delta * (z - 0.5 * delta))


def _huber_slope(x: jax.Array, target: jax.Array, delta: float) -> jax.Array:
    # the bounds come last, so that NaN stays NaN
    z = x - target
    bound = lax.full_like(z, delta)
    return lax.select(z < -bound, -bound, lax.select(z > bound, bound, z))


LOSSES: dict[Any, Formula] = {
    aten.mse_loss.default: lambda x, target: lax.square(x - target),
    aten.smooth_l1_loss.default: _smooth_l1,
    aten.huber_loss.default: _huber,
}
GRADIENTS: dict[Any, Formula] = {
    aten.mse_loss_backward.default: lambda x, target: 2 * (x - target),
    aten.smooth_l1_loss_backward.default: _smooth_l1_slope,
    aten.huber_loss_backward.default: _huber_slope,
}
for _op, _formula in LOSSES.items():
    register(_op, _loss(_formula), f"{__file__}: LOSSES")
for _op, _formula in GRADIENTS.items():
    register(_op, _gradient(_formula), f"{__file__}: GRADIENTS")


@lower(aten.soft_margin_loss.default)
def soft_margin_loss(ctx: Context, x: jax.Array, target: jax.Array, reduction: int = MEAN) -> jax.Array:
    """``log(1 + exp(-y x))``, rounded after each step as torch does: exp overflows in half precision."""
    rounded = partial(narrowed, dtype=ctx.result.dtype)
    x, target = operands(x, target)
    return reduced(ctx, rounded(lax.log1p(rounded(lax.exp(rounded(-x * target))))), reduction)


@lower(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(ctx: Context, g: jax.Array, x: jax.Array, target: jax.Array, reduction: int) -> jax.Array:
    """NaN where exp overflows, as in torch."""
    rounded, count = partial(narrowed, dtype=ctx.result.dtype), x.size
    g, x, target = operands(g, x, target)
    z = rounded(lax.exp(rounded(-target * x)))
    norm = lax.full_like(z, 1 / count if reduction == MEAN and count else 1.0)
    slope = rounded(rounded(rounded(target * z) * -norm) / rounded(z + 1))
    return cast(broadcast(slope * g, ctx.result.shape), ctx.result.dtype)


@lower(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    ctx: Context, x: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = MEAN
) -> jax.Array:
    """Logarithms are bounded by -100 from below."""
    x, target, *weights = operands(x, target, *([] if weight is None else [weight]))
    allowed = lax.bitwise_and(lax.ge(x, lax.full_like(x, 0)), lax.le(x, lax.full_like(x, 1)))
    holds(ctx, jnp.all(allowed), "all elements of input should be between 0 and 1")
    least = lax.full_like(x, -100)
    losses = (target - 1) * lax.max(lax.log1p(-x), least) - target * lax.max(lax.log(x), least)
    return reduced(ctx, losses * weights[0] if weights else losses, reduction)


@lower(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    ctx: Context,
    g: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    reduction: int = MEAN,
) -> jax.Array:
    """The denominator ``x (1 - x)`` is bounded by 1e-12 from below, as in torch."""
    count = x.size
    g, x, target, *weights = operands(g, x, target, *([] if weight is None else [weight]))
    slope = g * (x - target) / lax.max((1 - x) * x, lax.full_like(x, 1e-12))
    slope = slope * weights[0] if weights else slope
    return cast(slope / count if reduction == MEAN and count else slope, ctx.result.dtype)


@lower(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    ctx: Context,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    pos_weight: jax.Array | None = None,
    reduction: int = MEAN,
) -> jax.Array:
    """``(1 - t) x - (1 + (pos_weight - 1) t) log σ(x)`` with ``log σ(x) = min(x, 0) - log1p(exp(-|x|))``.

    For torch this is a chain of ops: half precision is rounded after each, which shows where the terms cancel.
    """
    r = partial(narrowed, dtype=ctx.result.dtype)
    given = [x, target, *(w for w in (weight, pos_weight) if w is not None)]
    x, target, *weights = operands(*given)
    log_sigmoid = r(lax.min(x, lax.full_like(x, 0)) - lax.log1p(lax.exp(-lax.abs(x))))
    if pos_weight is not None:
        log_sigmoid = r(r(r(r(weights[-1] - 1) * target) + 1) * log_sigmoid)
    losses = r(r(r(1 - target) * x) - log_sigmoid)
    return reduced(ctx, r(losses * weights[0]) if weight is not None else losses, reduction)
