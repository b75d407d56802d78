"""Losses against class indices: negative log likelihood and the multi-class margins, with their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.bounds import within
from portable.lowering.context import Context
from portable.lowering.loss import MEAN, NONE, reduced
from portable.lowering.registry import broadcast, cast, lower

aten = torch.ops.aten
HALF = (jnp.bfloat16, jnp.float16)


def wide(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32) if x.dtype in HALF else x


def one_hot(index: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """True where the coordinate along ``axis`` is ``index`` (which lacks that axis)."""
    kept = [a for a in range(len(shape)) if a != axis]
    coordinate = lax.broadcasted_iota(np.int32, shape, axis)
    return lax.eq(coordinate, lax.broadcast_in_dim(lax.convert_element_type(index, np.int32), shape, kept))


# --- negative log likelihood; the class axis is 1, or 0 of a single sample


def target_weights(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """(valid, weight of its class or 0) for each target."""
    valid = lax.ne(target, lax.full_like(target, ignore_index))
    if weight is None:
        return valid, lax.convert_element_type(valid, x.dtype)
    classes = lax.select(valid, target, lax.full_like(target, 0))
    taken = jnp.take(lax.convert_element_type(weight, x.dtype), classes, mode="clip")
    return valid, lax.select(valid, taken, lax.full_like(taken, 0))


@lower(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    ctx: Context, x: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    loss, total = ctx.result
    axis = min(x.ndim - 1, 1)
    x, target = wide(x), lax.reshape(target, x.shape[:axis] + x.shape[axis + 1 :])
    valid, weights = target_weights(x, target, weight, ignore_index)
    if x.size:
        classes = lax.select(valid, target, lax.full_like(target, 0))
        within(ctx, classes, x.shape[axis], "Target {index} is out of bounds.")
        classes = lax.expand_dims(classes, (axis,))
        taken = lax.squeeze(jnp.take_along_axis(x, classes, axis, mode="clip"), (axis,))
    else:
        taken = jnp.zeros(target.shape, x.dtype)
    losses = lax.select(valid, -taken * weights, lax.full_like(taken, 0))
    if reduction == NONE:
        return cast(lax.reshape(losses, loss.shape), loss.dtype), jnp.zeros(total.shape, total.jax_dtype)
    everything = tuple(range(losses.ndim))
    sums, count = lax.reduce_sum(losses, everything), lax.reduce_sum(weights, everything)
    sums = lax.div(sums, count) if reduction == MEAN else sums
    return cast(sums, loss.dtype), cast(count, total.dtype)


@lower(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    ctx: Context,
    g: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: jax.Array,
) -> jax.Array:
    axis = min(x.ndim - 1, 1)
    shape = x.shape
    x, g, target = wide(x), wide(g), lax.reshape(target, shape[:axis] + shape[axis + 1 :])
    valid, weights = target_weights(x, target, weight, ignore_index)
    g = lax.div(g, lax.convert_element_type(total_weight, g.dtype)) if reduction == MEAN else g
    g = lax.reshape(g, target.shape) if reduction == NONE else broadcast(lax.reshape(g, ()), target.shape)
    slope = lax.select(valid, -g * weights, lax.full_like(weights, 0))
    kept = [a for a in range(len(shape)) if a != axis]
    slope = lax.broadcast_in_dim(slope, shape, kept)
    hit = one_hot(target, shape, axis) & lax.broadcast_in_dim(valid, shape, kept)
    return cast(lax.select(hit, slope, lax.full_like(slope, 0)), ctx.result.dtype)


# --- margins; a single sample is a batch of one


def _no_scalar_none(ctx: Context, x: jax.Array, reduction: int) -> None:
    if x.ndim < 2 and reduction == NONE:
        ctx.refuse("torch gives a 0-d loss but its shape propagation says [1]")


def _rows(x: jax.Array) -> jax.Array:
    return x if x.ndim == 2 else lax.reshape(x, (1, x.size))


def _row_gradient(ctx: Context, g: jax.Array, slope: jax.Array, reduction: int) -> jax.Array:
    """``slope`` (batch, classes) times the gradient of each row's loss."""
    batch, _ = slope.shape
    g = lax.convert_element_type(g, slope.dtype)
    g = lax.reshape(g, (batch,)) if reduction == NONE else broadcast(lax.reshape(g, ()), (batch,))
    g = g * (1 / batch) if reduction == MEAN and batch else g
    out = slope * lax.broadcast_in_dim(g, slope.shape, (0,))
    return cast(lax.reshape(out, ctx.result.shape), ctx.result.dtype)


@lower(aten.multi_margin_loss.default)
def multi_margin_loss(
    ctx: Context,
    x: jax.Array,
    target: jax.Array,
    p: float = 1,
    margin: float = 1,
    weight: jax.Array | None = None,
    reduction: int = MEAN,
) -> jax.Array:
    """Of a row ``Σ_{j≠t} max(0, margin - x[t] + x[j])^p · w[t] / classes``, p 1 or 2."""
    _no_scalar_none(ctx, x, reduction)
    x = wide(_rows(x))
    within(ctx, target, x.shape[1], "target out of range", error=RuntimeError)
    z, hit = _margins(x, target, margin)
    z = lax.select(hit, lax.full_like(z, 0), lax.max(z, lax.full_like(z, 0)))
    losses = lax.reduce_sum(z if p == 1 else z * z, (1,)) / x.shape[1]
    losses = losses if weight is None else losses * _weight_of(target, weight, x)
    return reduced(ctx, losses, reduction)


def _margins(x: jax.Array, target: jax.Array, margin: float) -> tuple[jax.Array, jax.Array]:
    """``margin - x[t] + x[j]`` of each row, and where j is t."""
    hit = one_hot(lax.reshape(target, (x.shape[0],)), x.shape, 1)
    of_target = lax.reduce_sum(lax.select(hit, x, lax.full_like(x, 0)), (1,))
    return margin - lax.expand_dims(of_target, (1,)) + x, hit


def _weight_of(target: jax.Array, weight: jax.Array, x: jax.Array) -> jax.Array:
    classes = lax.reshape(target, (x.shape[0],))
    return jnp.take(lax.convert_element_type(weight, x.dtype), classes, mode="clip")


@lower(aten.multi_margin_loss_backward.default)
def multi_margin_loss_backward(
    ctx: Context,
    g: jax.Array,
    x: jax.Array,
    target: jax.Array,
    p: float,
    margin: float,
    weight: jax.Array | None = None,
    reduction: int = MEAN,
) -> jax.Array:
    _no_scalar_none(ctx, x, reduction)
    x = wide(_rows(x))
    z, hit = _margins(x, target, margin)
    slope = (lax.full_like(z, 1) if p == 1 else 2 * z) / x.shape[1]
    slope = slope if weight is None else slope * lax.expand_dims(_weight_of(target, weight, x), (1,))
    slope = lax.select((z > 0) & ~hit, slope, lax.full_like(slope, 0))
    own = lax.broadcast_in_dim(-lax.reduce_sum(slope, (1,)), x.shape, (0,))
    return _row_gradient(ctx, g, lax.select(hit, own, slope), reduction)


def _listed(target: jax.Array) -> jax.Array:
    """Which entries of each row of ``target`` are labels: those before the first -1."""
    ended = lax.cumsum(lax.convert_element_type(target < 0, np.int32), axis=1)
    return lax.eq(ended, lax.full_like(ended, 0))


@lower(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(
    ctx: Context, x: jax.Array, target: jax.Array, reduction: int
) -> tuple[jax.Array, jax.Array]:
    """``Σ_{j listed} Σ_{i not listed} max(0, 1 - x[j] + x[i]) / classes``."""
    loss, is_target = ctx.result
    _no_scalar_none(ctx, x, reduction)
    rows, target = wide(_rows(x)), _rows(target)
    z, member, _ = _multilabel(rows, target)
    losses = lax.reduce_sum(lax.max(z, lax.full_like(z, 0)), (1, 2)) / rows.shape[1]
    if reduction != NONE:
        count = losses.size
        losses = lax.reduce_sum(losses, (0,))
        losses = losses / count if reduction == MEAN else losses
    return (
        cast(lax.reshape(losses, loss.shape), loss.dtype),
        cast(lax.reshape(member, is_target.shape), is_target.dtype),
    )


def _multilabel(x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Margins (batch, label, class), 0 where no pair; members (batch, class); labels (batch, label, class)."""
    batch, classes = x.shape
    cube = (batch, classes, classes)
    listed = lax.broadcast_in_dim(_listed(target), cube, (0, 1))
    labels = one_hot(target, cube, 2) & listed
    member = lax.reduce_or(labels, (1,))
    across = lax.broadcast_in_dim(x, cube, (0, 2))
    of_label = lax.reduce_sum(lax.select(labels, across, lax.full_like(across, 0)), (2,))
    z = 1 - lax.broadcast_in_dim(of_label, cube, (0, 1)) + across
    pair = listed & ~lax.broadcast_in_dim(member, cube, (0, 2))
    return lax.select(pair, z, lax.full_like(z, 0)), member, labels


@lower(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(
    ctx: Context, g: jax.Array, x: jax.Array, target: jax.Array, reduction: int, is_target: jax.Array
) -> jax.Array:
    rows, target = wide(_rows(x)), _rows(target)
    z, _, labels = _multilabel(rows, target)
    slope = lax.convert_element_type(z > 0, rows.dtype) / rows.shape[1]
    toward = lax.reduce_sum(slope, (1,))
    own = lax.broadcast_in_dim(lax.reduce_sum(slope, (2,)), z.shape, (0, 1))
    away = lax.reduce_sum(lax.select(labels, own, lax.full_like(own, 0)), (1,))
    return _row_gradient(ctx, g, toward - away, reduction)
