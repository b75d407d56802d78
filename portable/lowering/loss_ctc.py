"""Connectionist temporal classification: the loss and its gradient, by the forward and backward recursions over time.

States are those of the extended labels l' = blank, l1, blank, l2, …, blank. The gradient is torch's own, which takes
the log-probabilities for normalised ones (https://www.cs.toronto.edu/~graves/icml_2006.pdf, equation 16).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import Tensor
from torch._ops import OpOverload

from portable.lowering.bounds import within
from portable.lowering.context import Context
from portable.lowering.data_dependent import rewrites
from portable.lowering.registry import lower, lower_library
from portable.lowering.scatter import scatter_along
from portable.lowering.specialise import Specialisation

aten = torch.ops.aten
NAME = "portable::ctc_loss"


@functools.cache
def _of_static_size() -> OpOverload:
    """aten._ctc_loss with a fake form, which torch does not give it though the lengths say how large it is."""
    custom = torch.library.custom_op(
        NAME,
        aten._ctc_loss.default,
        mutates_args=(),
        schema="(Tensor log_probs, Tensor targets, SymInt[] input_lengths, SymInt[] target_lengths, int blank, "
        "bool zero_infinity) -> (Tensor, Tensor)",
    )

    @custom.register_fake
    def fake(
        log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int, zero_infinity: bool
    ) -> tuple[Tensor, Tensor]:
        time, batch = log_probs.shape[:2]
        states = 2 * max(target_lengths, default=0) + 1
        return log_probs.new_empty(batch), log_probs.new_empty(batch, time, states)

    return custom._opoverload


@rewrites(aten._ctc_loss.default)
def loss_of_static_size(
    data: Specialisation,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _of_static_size()(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    return result


def _read(data: Specialisation, lengths: Tensor) -> list[int]:
    return [data.size(n) for n in lengths.reshape(-1).unbind()]


@rewrites(aten._ctc_loss.Tensor)
def loss_of_read_lengths(
    data: Specialisation, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return loss_of_static_size(data, log_probs, targets, _read(data, input_lengths), _read(data, target_lengths), *rest)


@rewrites(aten._ctc_loss_backward.Tensor)
def gradient_of_read_lengths(
    data: Specialisation,
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *rest: Any,
) -> Tensor:
    lengths = _read(data, input_lengths), _read(data, target_lengths)
    result: Tensor = aten._ctc_loss_backward.default(grad, log_probs, targets, *lengths, *rest)
    return result


def _extended(ctx: Context, targets: jax.Array, lengths: Sequence[int], classes: int, blank: int) -> jax.Array:
    """The extended labels (batch, states), int64; blank beyond a target's length."""
    longest = max(lengths, default=0)
    starts = np.cumsum([0, *lengths[:-1]]) if targets.ndim == 1 else np.zeros(len(lengths), np.int64)
    offset = np.arange(longest)[None]
    inside = offset < np.asarray(lengths, np.int64)[:, None]
    place = np.where(inside, starts[:, None] + offset, 0)
    full = jnp.full((len(lengths), 2 * longest + 1), blank, np.int64)
    if longest == 0:
        return full
    targets = targets.astype(np.int64)
    labels = targets[place] if targets.ndim == 1 else jnp.take_along_axis(targets, jnp.asarray(place), 1)
    labels = jnp.where(inside, labels, blank)
    within(ctx, labels, classes)
    return full.at[:, 1::2].set(jnp.clip(labels, 0, classes - 1))


def _emissions(log_probs: jax.Array, labels: jax.Array) -> jax.Array:
    """The log-probability of each state's label (time, batch, states)."""
    shape = (log_probs.shape[0], *labels.shape)
    return jnp.take_along_axis(log_probs, jnp.broadcast_to(labels[None], shape), 2)


def _log_sum(*terms: jax.Array) -> jax.Array:
    most = functools.reduce(jnp.maximum, terms)
    most = jnp.where(most == -np.inf, 0, most)
    total = functools.reduce(lax.add, (jnp.exp(t - most) for t in terms))
    return jnp.log(total) + most


def _moved(x: jax.Array, by: int) -> jax.Array:
    """States moved by 1 or 2, or by -1 or -2; those that nothing moves to are impossible."""
    empty = jnp.full((x.shape[0], min(abs(by), x.shape[1])), -np.inf, x.dtype)
    return jnp.concatenate([empty, x[:, :-by]] if by > 0 else [x[:, -by:], empty], 1)


def _alpha(log_probs: jax.Array, labels: jax.Array, lengths: np.ndarray) -> jax.Array:
    """(time, batch, states): the log-probability of the prefixes that end in each state."""
    state = np.arange(labels.shape[1])[None]
    exists = state <= 2 * lengths[:, None]
    skips = jnp.concatenate([jnp.zeros_like(labels[:, :2], np.bool_), labels[:, 2:] != labels[:, :-2]], 1)[
        :, : labels.shape[1]
    ]
    emitted = _emissions(log_probs, labels)
    first = jnp.where(exists & (state < 2), emitted[0], -np.inf)

    def step(alpha: jax.Array, emitted: jax.Array) -> tuple[jax.Array, jax.Array]:
        skipped = jnp.where(skips, _moved(alpha, 2), -np.inf)
        alpha = jnp.where(exists, _log_sum(alpha, _moved(alpha, 1), skipped) + emitted, -np.inf)
        return alpha, alpha

    _, rest = lax.scan(step, first, emitted[1:])
    return jnp.concatenate([first[None], rest])


@lower_library(NAME)
def ctc_loss(
    ctx: Context,
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int,
    zero_infinity: bool,
) -> tuple[jax.Array, jax.Array]:
    time, batch, classes = log_probs.shape
    inputs, lengths = np.asarray(input_lengths, np.int64), np.asarray(target_lengths, np.int64)
    labels = _extended(ctx, targets, target_lengths, classes, blank)
    if 0 in (time, batch):
        empty = jnp.asarray(np.where(lengths == 0, 0.0, np.inf), log_probs.dtype)
        return empty, jnp.zeros(ctx.result[1].shape, log_probs.dtype)
    alpha = jnp.transpose(_alpha(log_probs, labels, lengths), (1, 0, 2))
    row = np.arange(batch)
    last = alpha[row, np.maximum(inputs - 1, 0)]
    blank_last = last[row, 2 * lengths]
    label_last = jnp.where(lengths > 0, last[row, np.maximum(2 * lengths - 1, 0)], -np.inf)
    loss = jnp.where(inputs > 0, -_log_sum(blank_last, label_last), jnp.where(lengths == 0, 0.0, np.inf))
    return loss.astype(log_probs.dtype), alpha


def _beta(log_probs: jax.Array, labels: jax.Array, inputs: np.ndarray, lengths: np.ndarray) -> jax.Array:
    """(time, batch, states): the log-probability of the suffixes that begin in each state."""
    state, ends = np.arange(labels.shape[1])[None], 2 * lengths[:, None]
    onward = jnp.concatenate([labels[:, 2:] != labels[:, :-2], jnp.zeros_like(labels[:, :2], np.bool_)], 1)[
        :, : labels.shape[1]
    ]
    emitted = _emissions(log_probs, labels)
    final = (state == ends) | (state == ends - 1)

    def step(beta: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        time, emitted = at
        skipped = jnp.where(onward & (state < ends - 1), _moved(beta, -2), -np.inf)
        inner = _log_sum(beta, jnp.where(state < ends, _moved(beta, -1), -np.inf), skipped) + emitted
        left = (inputs - 1)[:, None] - time  # steps after this one
        beta = jnp.where(left == 0, jnp.where(final, emitted, -np.inf), jnp.where(left > 0, inner, -np.inf))
        beta = jnp.where(state <= ends, beta, -np.inf)
        return beta, beta

    none = jnp.full(labels.shape, -np.inf, log_probs.dtype)
    _, beta = lax.scan(step, none, (jnp.arange(log_probs.shape[0]), emitted), reverse=True)
    return beta


@lower(aten._ctc_loss_backward.default)
def ctc_loss_backward(
    ctx: Context,
    grad: jax.Array,
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    loss: jax.Array,
    log_alpha: jax.Array,
    blank: int,
    zero_infinity: bool = False,
) -> jax.Array:
    time, batch, classes = log_probs.shape
    if log_probs.size == 0:
        return jnp.zeros(ctx.result.shape, log_probs.dtype)
    inputs, lengths = np.asarray(input_lengths, np.int64), np.asarray(target_lengths, np.int64)
    labels = _extended(ctx, targets, target_lengths, classes, blank)
    through = jnp.transpose(log_alpha, (1, 0, 2)) + _beta(log_probs, labels, inputs, lengths)
    at, state = np.arange(time)[:, None, None], np.arange(labels.shape[1])
    through = jnp.where(state <= 2 * lengths[:, None], through, -np.inf)
    # at the end torch's kernel counts a last label that is the blank, and not the blank after it
    hidden = (at == (inputs - 1)[:, None]) & (state == 2 * lengths[:, None]) & (lengths > 0)[:, None]
    last_label = labels[np.arange(batch), np.maximum(2 * lengths - 1, 0)]
    through = jnp.where(hidden & (last_label == blank)[:, None], -np.inf, through)
    index = jnp.broadcast_to(labels[None], through.shape)
    most = scatter_along(lax.scatter_max, jnp.full(log_probs.shape, -np.inf, log_probs.dtype), 2, index, through)
    most = jnp.where(most == -np.inf, 0, most)
    parts = jnp.exp(through - jnp.take_along_axis(most, index, 2))
    total = jnp.log(scatter_along(lax.scatter_add, jnp.zeros(log_probs.shape, log_probs.dtype), 2, index, parts)) + most
    nll = loss[None, :, None]
    result = (jnp.exp(log_probs) - jnp.exp(total + nll - log_probs)) * grad[None, :, None]
    zero = at >= inputs[:, None]
    if zero_infinity:
        zero = zero | (nll == np.inf)
    return jnp.where(zero, 0, result).astype(log_probs.dtype)
