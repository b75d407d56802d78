"""Cross entropy of a linear layer in one op (torch.nn.functional.linear_cross_entropy, torch 2.13).

Its chunks over the batch save memory and do not change the result; the scheduling is left to XLA. The op gives the
gradients with the loss: ``∂/∂logits = w (softmax - one-hot)`` with each row's weight w.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.loss_class import one_hot, target_weights, wide
from portable.lowering.matmul import dot
from portable.lowering.registry import cast, lower


def _t(x: jax.Array) -> jax.Array:
    return lax.transpose(x, (1, 0))


def _row_weights(x: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: str, ignore: int) -> jax.Array:
    """Of each row's loss; for the mean divided by their sum, NaN where that is 0."""
    _, rows = target_weights(x, target, weight, ignore)
    if reduction != "mean":
        return rows
    total = lax.reduce_sum(rows, (0,))
    total = lax.select(lax.eq(total, lax.full_like(total, 0)), lax.full_like(total, np.nan), total)
    return lax.div(rows, lax.broadcast_in_dim(total, rows.shape, ()))


def _log_softmax(ctx: Context, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    logits = dot(ctx, x, _t(w))
    if bias is not None:
        logits = logits + lax.broadcast_in_dim(lax.convert_element_type(bias, logits.dtype), logits.shape, (1,))
    logits = logits - lax.expand_dims(lax.reduce_max(logits, (1,)), (1,))
    return logits - lax.expand_dims(lax.log(lax.reduce_sum(lax.exp(logits), (1,))), (1,))


def _row_losses(logs: jax.Array, hit: jax.Array, rows: jax.Array) -> jax.Array:
    return -rows * lax.reduce_sum(lax.select(hit, logs, lax.full_like(logs, 0)), (1,))


def linear_cross_entropy(
    ctx: Context,
    x: jax.Array,
    w: jax.Array,
    target: jax.Array,
    bias: jax.Array | None,
    weight: jax.Array | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    *rest: Any,
) -> tuple[jax.Array, ...]:
    if label_smoothing:
        ctx.refuse("label smoothing")
    needed: Sequence[bool] = rest[-3:]
    loss, *grads = ctx.result
    x, w = wide(x), wide(w)
    rows = _row_weights(x, target, weight, reduction, ignore_index)
    logs = _log_softmax(ctx, x, w, bias)
    hit = one_hot(target, logs.shape, 1)
    total = lax.reduce_sum(_row_losses(logs, hit, rows), (0,))
    if reduction == "mean" and x.shape[0] == 0:
        total = lax.full_like(total, np.nan)
    slope = (lax.exp(logs) - lax.convert_element_type(hit, logs.dtype)) * lax.expand_dims(rows, (1,))
    values = (
        dot(ctx, slope, w) if needed[0] else None,
        dot(ctx, _t(slope), x) if needed[1] else None,
        lax.reduce_sum(slope, (0,)) if needed[2] else None,
    )
    given = (
        jnp.zeros(r.shape, r.jax_dtype) if v is None else cast(v, r.dtype) for v, r in zip(values, grads, strict=True)
    )
    return (cast(total, loss.dtype), *given)


def linear_cross_entropy_rows(
    ctx: Context,
    x: jax.Array,
    w: jax.Array,
    target: jax.Array,
    bias: jax.Array | None,
    weight: jax.Array | None,
    ignore_index: int,
    *_: Any,
) -> jax.Array:
    x, w = wide(x), wide(w)
    rows = _row_weights(x, target, weight, "none", ignore_index)
    logs = _log_softmax(ctx, x, w, bias)
    return cast(_row_losses(logs, one_hot(target, logs.shape, 1), rows), ctx.result.dtype)


if importlib.util.find_spec("torch.nn.modules.linear_cross_entropy"):  # torch defines the ops when it is first used
    importlib.import_module("torch.nn.modules.linear_cross_entropy")
    _ops = torch.ops.torch_nn
    lower(_ops._linear_cross_entropy_batch_chunked.default)(linear_cross_entropy)
    lower(_ops._linear_cross_entropy_batch_chunked_no_reduction.default)(linear_cross_entropy_rows)
