"""Batch, layer and group normalisation, forward and backward.

Statistics are computed in float32 for half precision, in two passes (mean, then mean squared deviation) or to the same
precision in one. The backward
is the closed form (Ioffe and Szegedy 2015, Ba et al. 2016), over the elements that share a statistic:

    x̂ = (x - mean) · rstd,   gx = rstd · (gw - mean(gw) - x̂ · mean(gw · x̂))   with gw = g · weight
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import broadcast, cast, lower

aten = torch.ops.aten
HALF = (jnp.bfloat16, jnp.float16)


def wide(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32) if x.dtype in HALF else x


def along(v: jax.Array, shape: Sequence[int], axes: Sequence[int], like: jax.Array) -> jax.Array:
    """``v``, laid along ``axes`` of ``shape``, in the dtype of ``like``."""
    return lax.broadcast_in_dim(lax.convert_element_type(v, like.dtype), tuple(shape), tuple(axes))


def total(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    return lax.reduce_sum(x, tuple(axes))


def mean_over(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    sums = total(x, axes)
    return lax.div(sums, lax.full_like(sums, _count(x, axes)))


def _count(x: jax.Array, axes: Sequence[int]) -> int:
    return int(np.prod([x.shape[a] for a in axes]))


def moments(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Mean and sum of squared deviations over ``axes``."""
    kept = [a for a in range(x.ndim) if a not in axes]
    mean = mean_over(x, axes)
    deviation = x - along(mean, x.shape, kept, x)
    return mean, total(deviation * deviation, axes)


def row_moments(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """`moments` over the last axes.

    On the CPU Σx² - (Σx)²/n is used where no mean is larger than its deviation: then the subtraction costs at most one
    bit, and the deviations, whose pass over memory costs as much as all the rest, are not computed.
    """

    def one_pass(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums, mean = total(x, axes), mean_over(x, axes)
        squares = total(x * x, axes) - sums * mean
        safe = jnp.all(sums * mean <= squares)
        return mean, lax.cond(safe, lambda: squares, lambda: moments(x, axes)[1])

    return lax.platform_dependent(x, cpu=one_pass, default=lambda x: moments(x, axes))


def saved_mean(mean: jax.Array, x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The saved mean; computed anew where it was saved in half precision.

    For half inputs with float32 weights torch's kernels save float32 but its shape propagation says half; and the
    rounding of a mean much larger than the deviation would swamp the weight's gradient.
    """
    kept = [x.shape[a] for a in range(x.ndim) if a not in axes]
    return mean_over(x, axes) if mean.dtype in HALF else lax.reshape(mean, kept)


def inverse_deviation(squares: jax.Array, count: int, eps: float) -> jax.Array:
    """1 / sqrt(variance + eps)."""
    return lax.rsqrt(lax.div(squares, lax.full_like(squares, count)) + lax.full_like(squares, eps))


def normalised_grad(g: jax.Array, normal: jax.Array, rstd: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Gradient through x̂ for statistics over ``axes``; ``rstd`` has the shape that is left."""
    kept = [a for a in range(g.ndim) if a not in axes]
    bias = along(mean_over(g, axes), g.shape, kept, g)
    slope = along(mean_over(g * normal, axes), g.shape, kept, g)
    return along(rstd, g.shape, kept, g) * (g - bias - normal * slope)


def as_results(values: Sequence[jax.Array | None], specs: Sequence[Any]) -> tuple[jax.Array | None, ...]:
    """Each value reshaped and cast to its Spec; None where torch gives none."""
    return tuple(
        None if s is None or v is None else cast(lax.reshape(v, s.shape), s.dtype)
        for v, s in zip(values, specs, strict=True)
    )


# --- layer normalisation


@lower(aten.native_layer_norm.default)
def layer_norm(
    ctx: Context,
    x: jax.Array,
    normalized_shape: Sequence[int],
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    first = x.ndim - len(normalized_shape)
    axes, kept = range(first, x.ndim), range(first)
    x = wide(x)
    mean, squares = row_moments(x, axes)
    rstd = inverse_deviation(squares, _count(x, axes), eps)
    out = (x - along(mean, x.shape, kept, x)) * along(rstd, x.shape, kept, x)
    out = out if weight is None else out * along(weight, x.shape, axes, x)
    out = out if bias is None else out + along(bias, x.shape, axes, x)
    return as_results((out, mean, rstd), ctx.result)


@lower(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    ctx: Context,
    g: jax.Array,
    x: jax.Array,
    normalized_shape: Sequence[int],
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    first = x.ndim - len(normalized_shape)
    axes, kept = range(first, x.ndim), range(first)
    x, g = wide(x), wide(g)
    mean, rstd = saved_mean(mean, x, axes), lax.reshape(rstd, x.shape[:first])
    normal = (x - along(mean, x.shape, kept, x)) * along(rstd, x.shape, kept, x)
    scaled = g if weight is None else g * along(weight, x.shape, axes, x)
    gx = normalised_grad(scaled, normal, rstd, axes) if output_mask[0] else None
    gw = total(g * normal, kept) if output_mask[1] else None
    gb = total(g, kept) if output_mask[2] else None
    return as_results((gx, gw, gb), ctx.result)


# --- group normalisation


@lower(aten.native_group_norm.default)
def group_norm(
    ctx: Context,
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    n: int,
    channels: int,
    area: int,
    groups: int,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    shape = (n, groups, channels // groups, area)
    x = wide(lax.reshape(x, shape))
    mean, squares = row_moments(x, (2, 3))
    rstd = inverse_deviation(squares, _count(x, (2, 3)), eps)
    out = (x - along(mean, shape, (0, 1), x)) * along(rstd, shape, (0, 1), x)
    out = out if weight is None else out * _grouped(weight, x)
    out = out if bias is None else out + _grouped(bias, x)
    return as_results((out, mean, rstd), ctx.result)


def _grouped(v: jax.Array, x: jax.Array) -> jax.Array:
    return along(lax.reshape(v, x.shape[1:3]), x.shape, (1, 2), x)


@lower(aten.native_group_norm_backward.default)
def group_norm_backward(
    ctx: Context,
    g: jax.Array,
    x: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    n: int,
    channels: int,
    area: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    shape = (n, groups, channels // groups, area)
    x, g = wide(lax.reshape(x, shape)), wide(lax.reshape(g, shape))
    mean = saved_mean(mean, x, (2, 3))
    normal = (x - along(mean, shape, (0, 1), x)) * along(rstd, shape, (0, 1), x)
    scaled = g if weight is None else g * _grouped(weight, x)
    gx = normalised_grad(scaled, normal, rstd, (2, 3)) if output_mask[0] else None
    gw = total(g * normal, (0, 3)) if output_mask[1] else None
    gb = total(g, (0, 3)) if output_mask[2] else None
    return as_results((gx, gw, gb), ctx.result)


# --- batch normalisation


def _channel(v: jax.Array, x: jax.Array) -> jax.Array:
    return along(v, x.shape, (1,), x)


def _batch_norm(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, mean: jax.Array, rstd: jax.Array
) -> jax.Array:
    out = (x - _channel(mean, x)) * _channel(rstd, x)
    out = out if weight is None else out * _channel(weight, x)
    return out if bias is None else out + _channel(bias, x)


def _evaluated(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    eps: float,
) -> jax.Array:
    x = wide(x)
    variance = lax.convert_element_type(running_var, x.dtype)
    return _batch_norm(x, weight, bias, running_mean, lax.rsqrt(variance + lax.full_like(variance, eps)))


def _trained(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running: tuple[jax.Array, jax.Array] | None,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    """Output, mean, rstd and, if there were running statistics, their new values.

    The running variance takes the unbiased one (division by n - 1).
    """
    x = wide(x)
    axes = [a for a in range(x.ndim) if a != 1]
    count = _count(x, axes)
    mean, squares = moments(x, axes)
    rstd = inverse_deviation(squares, count, eps)
    out = (_batch_norm(x, weight, bias, mean, rstd), mean, rstd)
    if running is None:
        return out
    unbiased = lax.div(squares, lax.full_like(squares, count - 1))
    new = tuple(
        lax.convert_element_type(old, x.dtype) * (1 - momentum) + fresh * momentum
        for old, fresh in zip(running, (mean, unbiased), strict=True)
    )
    return (*out, *new)


def _empty(spec: Any) -> jax.Array:
    return jnp.zeros(spec.shape, spec.jax_dtype)


@lower(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    ctx: Context, x: jax.Array, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[jax.Array | None, ...]:
    return as_results(_trained(x, weight, bias, None, momentum, eps), ctx.result)


@lower(aten.native_batch_norm.default)
def native_batch_norm(
    ctx: Context,
    x: jax.Array,
    weight: Any,
    bias: Any,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    if training and running_mean is not None:
        ctx.refuse("it writes to the running statistics and was not functionalised")
    if training:
        return as_results(_trained(x, weight, bias, None, momentum, eps), ctx.result)
    if running_mean is None or running_var is None:
        ctx.refuse("it evaluates without running statistics")
    out = cast(_evaluated(x, weight, bias, running_mean, running_var, eps), ctx.result[0].dtype)
    return (out, *map(_empty, ctx.result[1:]))


@lower(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    ctx: Context,
    x: jax.Array,
    weight: Any,
    bias: Any,
    running_mean: jax.Array,
    running_var: jax.Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    if training:
        return as_results(_trained(x, weight, bias, (running_mean, running_var), momentum, eps), ctx.result)
    out = cast(_evaluated(x, weight, bias, running_mean, running_var, eps), ctx.result[0].dtype)
    running = (cast(r, spec.dtype) for r, spec in zip((running_mean, running_var), ctx.result[3:], strict=True))
    return (out, _empty(ctx.result[1]), _empty(ctx.result[2]), *running)


@lower(aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default)
def batch_norm_no_training(
    ctx: Context,
    x: jax.Array,
    weight: Any,
    bias: Any,
    running_mean: jax.Array,
    running_var: jax.Array,
    momentum: float,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    out = cast(_evaluated(x, weight, bias, running_mean, running_var, eps), ctx.result[0].dtype)
    return (out, *map(_empty, ctx.result[1:]))


@lower(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    ctx: Context,
    x: jax.Array,
    weight: Any,
    bias: Any,
    running_mean: jax.Array,
    running_var: jax.Array,
    momentum: float,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    specs = [*ctx.result[:3], *ctx.result[4:]]
    out = as_results(_trained(x, weight, bias, (running_mean, running_var), momentum, eps), specs)
    return (*out[:3], _empty(ctx.result[3]), *out[3:])


@lower(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    ctx: Context,
    g: jax.Array,
    x: jax.Array,
    weight: jax.Array | None,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    x, g = wide(x), wide(g)
    axes = [a for a in range(x.ndim) if a != 1]
    if train and save_mean.dtype in HALF:
        mean, squares = moments(x, axes)
        rstd = inverse_deviation(squares, _count(x, axes), eps)
    elif train:
        mean, rstd = save_mean, save_invstd
    else:
        variance = lax.convert_element_type(running_var, x.dtype)
        mean, rstd = wide(running_mean), lax.rsqrt(variance + lax.full_like(variance, eps))
    normal = (x - _channel(mean, x)) * _channel(rstd, x)
    scaled = g if weight is None else g * _channel(weight, x)
    gx = gw = gb = None
    if output_mask[0]:
        gx = normalised_grad(scaled, normal, rstd, axes) if train else scaled * _channel(rstd, x)
    if output_mask[1]:
        gw = total(g * normal, axes)
    if output_mask[2]:
        gb = total(g, axes)
    return as_results((gx, gw, gb), ctx.result)


@lower(aten.batch_norm_backward.default)
def batch_norm_backward_with_reserve(ctx: Context, *args: Any) -> tuple[jax.Array | None, ...]:
    return batch_norm_backward(ctx, *args[:-1])


@lower(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    ctx: Context, g: jax.Array, v: jax.Array, magnitude: jax.Array, norms: jax.Array, dim: int
) -> tuple[jax.Array | None, ...]:
    """Of ``w = magnitude · v / ‖v‖``, the norm over all dimensions but ``dim``."""
    axes = [a for a in range(v.ndim) if a != dim % v.ndim]
    g, direction, magnitude, norms = wide(g), wide(v), wide(magnitude), wide(norms)

    def over(x: jax.Array) -> jax.Array:
        return broadcast(lax.reshape(x, [n if a == dim % v.ndim else 1 for a, n in enumerate(v.shape)]), v.shape)

    along = total(g * direction, axes)
    size = lax.reshape(norms, along.shape)
    gv = over(magnitude) / over(size) * (g - direction * over(along / (size * size)))
    return as_results((gv, along / size), ctx.result)
