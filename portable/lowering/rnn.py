"""LSTM layers that torch leaves as one op; the other recurrent layers it unrolls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.matmul import dot
from portable.lowering.registry import cast, lower

aten = torch.ops.aten
HALF = (jnp.bfloat16, jnp.float16)
LSTM = 2


def _wide(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32) if x.dtype in HALF else x


def lstm(
    ctx: Context,
    x: jax.Array,
    w_input: jax.Array,
    w_hidden: jax.Array,
    b_input: jax.Array | None,
    b_hidden: jax.Array | None,
    hidden: jax.Array,
    cell: jax.Array,
    reverse: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(T, N, I) → (T, N, H), final hidden and cell (N, H). Gates in torch's order: input, forget, cell, output."""
    steps, batch, width = x.shape
    gates = dot(ctx, lax.reshape(x, (steps * batch, width)), lax.transpose(w_input, (1, 0)))
    if b_input is not None and b_hidden is not None:
        gates = gates + lax.broadcast_in_dim(b_input + b_hidden, gates.shape, (1,))
    gates = lax.reshape(gates, (steps, batch, gates.shape[1]))
    w_hidden = lax.transpose(w_hidden, (1, 0))

    def step(state: tuple[jax.Array, jax.Array], now: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        h, c = state
        i, f, g, o = jnp.split(now + dot(ctx, h, w_hidden), 4, axis=1)
        c = lax.logistic(f) * c + lax.logistic(i) * lax.tanh(g)
        h = lax.logistic(o) * lax.tanh(c)
        return (h, c), h

    (hidden, cell), out = lax.scan(step, (hidden, cell), gates, reverse=reverse)
    return out, hidden, cell


def _layer(ctx: Context, args: Sequence[Any], reverse: bool, has_biases: bool) -> tuple[jax.Array, ...]:
    x, w_input, w_hidden, b_input, b_hidden, hidden, cell = map(_wide, args)
    hidden, cell = (lax.reshape(s, s.shape[-2:]) for s in (hidden, cell))
    biases = (b_input, b_hidden) if has_biases else (None, None)
    return lstm(ctx, x, w_input, w_hidden, biases[0], biases[1], hidden, cell, reverse)


def _supported(ctx: Context, mode: int, batch_sizes: Any) -> None:
    """(The numbers of layers and directions and batch_first describe the module; the layer itself is time first.)"""
    if mode != LSTM or batch_sizes:
        ctx.refuse("only an unpacked LSTM layer")


@lower(aten.mkldnn_rnn_layer.default)
def rnn_layer(
    ctx: Context,
    x: jax.Array,
    w_input: jax.Array,
    w_hidden: jax.Array,
    b_input: jax.Array,
    b_hidden: jax.Array,
    hidden: jax.Array,
    cell: jax.Array,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[jax.Array, ...]:
    _supported(ctx, mode, batch_sizes)
    args = (x, w_input, w_hidden, b_input, b_hidden, hidden, cell)
    values = _layer(ctx, args, reverse, has_biases)
    out = [cast(lax.reshape(v, r.shape), r.dtype) for v, r in zip(values, ctx.result, strict=False)]
    return (*out, jnp.zeros(ctx.result[3].shape, np.uint8))


@lower(aten.mkldnn_rnn_layer_backward.default)
def rnn_layer_backward(
    ctx: Context,
    x: jax.Array,
    w_input: jax.Array,
    w_hidden: jax.Array,
    b_input: jax.Array,
    b_hidden: jax.Array,
    hidden: jax.Array,
    cell: jax.Array,
    output: jax.Array,
    hidden_out: jax.Array,
    cell_out: jax.Array,
    grad_output: jax.Array | None,
    grad_hidden: jax.Array | None,
    grad_cell: jax.Array | None,
    reverse: bool,
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    batch_first: bool,
    workspace: jax.Array,
) -> tuple[jax.Array, ...]:
    """Gradients of (input, w_input, w_hidden, b_input, b_hidden, hidden, cell), from the layer run anew."""
    _supported(ctx, mode, batch_sizes)
    args = tuple(map(_wide, (x, w_input, w_hidden, b_input, b_hidden, hidden, cell)))
    primal, pull = jax.vjp(lambda *a: _layer(ctx, a, reverse, has_biases), *args)
    given = (grad_output, grad_hidden, grad_cell)
    cotangents = tuple(
        lax.full_like(p, 0) if g is None else lax.convert_element_type(lax.reshape(g, p.shape), p.dtype)
        for p, g in zip(primal, given, strict=True)
    )
    grads = list(pull(cotangents))
    if not has_biases:  # what stands in for them need not have their shape
        grads[3:5] = (jnp.zeros(r.shape, x.dtype) for r in ctx.result[3:5])
    return tuple(cast(lax.reshape(v, r.shape), r.dtype) for v, r in zip(grads, ctx.result, strict=True))
