"""Recurrent layers: a loop over the steps, forward and backward.

The cells are those of aten/src/ATen/native/RNN.cpp; half precision is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.matmul import dot
from portable.lowering.recurrent import differentiable
from portable.lowering.registry import cast, lower, lower_library

aten = torch.ops.aten
HALF = (jnp.bfloat16, jnp.float16)
LSTM = 2

State = tuple[jax.Array, ...]
Cell = Callable[[State, jax.Array, jax.Array], State]


def _wide(args: Sequence[Any]) -> list[Any]:
    """The arguments of a layer, those of half precision in float32."""
    return [lax.convert_element_type(a, jnp.float32) if getattr(a, "dtype", None) in HALF else a for a in args]


def _lstm(state: State, now: jax.Array, before: jax.Array) -> State:
    """Gates in torch's order: input, forget, cell, output."""
    i, f, g, o = jnp.split(now + before, 4, axis=1)
    c = lax.logistic(f) * state[1] + lax.logistic(i) * lax.tanh(g)
    return lax.logistic(o) * lax.tanh(c), c


def _gru(state: State, now: jax.Array, before: jax.Array) -> State:
    """Gates in torch's order: reset, update, new."""
    (r, z, n), (r_before, z_before, n_before) = jnp.split(now, 3, axis=1), jnp.split(before, 3, axis=1)
    new = lax.tanh(n + n_before * lax.logistic(r_before + r))
    return ((state[0] - new) * lax.logistic(z_before + z) + new,)


def _relu(x: jax.Array) -> jax.Array:
    return lax.select(x <= 0, lax.full_like(x, 0), x)  # NaN stays, and the gradient at 0 is 0


CELLS: dict[str, Cell] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda state, now, before: (lax.tanh(now + before),),
    "rnn_relu": lambda state, now, before: (_relu(now + before),),
}


def _affine(ctx: Context, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    y = dot(ctx, x, lax.transpose(weight, (1, 0)))
    return y if bias is None else y + lax.broadcast_in_dim(bias, y.shape, (1,))


def recurrent(
    ctx: Context,
    kind: str,
    x: jax.Array,
    lengths: jax.Array | None,
    state: State,
    w_input: jax.Array,
    w_hidden: jax.Array,
    b_input: jax.Array | None,
    b_hidden: jax.Array | None,
    w_projection: jax.Array | None,
    reverse: bool,
) -> tuple[jax.Array, ...]:
    """The outputs of all steps, then the final state.

    Args:
        x: (T, N, I); packed, (sum of lengths, I).
        lengths: (T,) integers: how many of the sequences have that step, the first of the N; never more than before.
        state: hidden (N, H), and of an LSTM cell (N, C).
    """
    rows = state[0].shape[0]
    gates = _affine(ctx, lax.reshape(x, (x.size // x.shape[-1], x.shape[-1])), w_input, b_input)
    present = starts = None
    if lengths is None:
        gates = lax.reshape(gates, (*x.shape[:-1], gates.shape[-1]))
    else:
        starts = jnp.cumsum(lengths) - lengths
        present = jnp.arange(rows) < lengths[:, None]
        gates = jnp.take(gates, starts[:, None] + np.arange(rows), axis=0, mode="clip")

    def step(state: State, inputs: Any) -> tuple[State, jax.Array]:
        now, here = inputs
        then = CELLS[kind](state, now, _affine(ctx, state[0], w_hidden, b_hidden))
        if w_projection is not None:
            then = (_affine(ctx, then[0], w_projection, None), *then[1:])
        if here is not None:  # a sequence that has ended, or (in reverse) not begun, keeps its state
            then = tuple(jnp.where(here[:, None], new, old) for new, old in zip(then, state, strict=True))
        return then, then[0]

    state, out = lax.scan(step, state, (gates, present), reverse=reverse)
    if starts is not None:
        token = np.arange(x.shape[0])
        at = jnp.searchsorted(starts, token, side="right") - 1
        out = out[at, token - starts[at]]
    return (out, *state)


def _check_lengths(lengths: torch.Tensor, total: int, rows: int) -> None:
    sizes = lengths.tolist()
    if sum(sizes) != total or sorted(sizes, reverse=True) != sizes or sizes[0] > rows or sizes[-1] < 1:
        raise RuntimeError(
            f"batch_sizes {sizes} of a packed sequence must not increase, and sum to its {total} steps "
            f"of {rows} sequences"
        )


def _layer(ctx: Context, args: Sequence[Any]) -> tuple[jax.Array, ...]:
    """(output, final hidden, final cell), of wide arguments of ``portable::recurrent_layer``."""
    x, lengths, h, c, w_input, w_hidden, b_input, b_hidden, w_projection, reverse, kind = args
    state = (h,) if c is None else (h, c)
    out = recurrent(ctx, kind, x, lengths, state, w_input, w_hidden, b_input, b_hidden, w_projection, reverse)
    return out if c is not None else (*out, jnp.zeros((0,), x.dtype))


@lower_library("portable::recurrent_layer")
def recurrent_layer(ctx: Context, *args: Any) -> tuple[jax.Array, ...]:
    x, lengths, h = args[:3]
    if lengths is not None:
        total, rows = x.shape[0], h.shape[0]
        ctx.check(lengths, lambda t: _check_lengths(t, total, rows))
    values = _layer(ctx, _wide(args))
    return tuple(cast(v, r.dtype) for v, r in zip(values, ctx.result, strict=True))


@lower_library("portable::recurrent_layer_backward")
def recurrent_layer_backward(
    ctx: Context, g_out: jax.Array | None, g_h: jax.Array | None, g_c: jax.Array | None, *args: Any
) -> list[jax.Array]:
    """By running the layer again."""
    wanted, fixed = differentiable(args), _wide(args)

    def run(*given: jax.Array) -> tuple[jax.Array, ...]:
        return _layer(ctx, [given[wanted.index(i)] if i in wanted else a for i, a in enumerate(fixed)])

    grads = _pulled(run, [fixed[i] for i in wanted], (g_out, g_h, g_c))
    return [cast(g, r.dtype) for g, r in zip(grads, ctx.result, strict=True)]


def _pulled(
    run: Callable[..., tuple[jax.Array, ...]], args: Sequence[jax.Array], grads: Sequence[jax.Array | None]
) -> tuple[jax.Array, ...]:
    primal, pull = jax.vjp(run, *args)
    cotangents = tuple(
        lax.full_like(p, 0) if g is None else lax.convert_element_type(lax.reshape(g, p.shape), p.dtype)
        for p, g in zip(primal, grads, strict=True)
    )
    found: tuple[jax.Array, ...] = pull(cotangents)
    return found


def _mkldnn(ctx: Context, args: Sequence[Any], reverse: bool, has_biases: bool) -> tuple[jax.Array, ...]:
    x, w_input, w_hidden, b_input, b_hidden, hidden, cell = _wide(args)
    state = tuple(lax.reshape(s, s.shape[-2:]) for s in (hidden, cell))
    if not has_biases:  # something else stands in their place
        b_input = b_hidden = None
    return recurrent(ctx, "lstm", x, None, state, w_input, w_hidden, b_input, b_hidden, None, reverse)


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
    values = _mkldnn(ctx, args, reverse, has_biases)
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
    args = _wide((x, w_input, w_hidden, b_input, b_hidden, hidden, cell))
    given = (grad_output, grad_hidden, grad_cell)
    grads = list(_pulled(lambda *a: _mkldnn(ctx, a, reverse, has_biases), args, given))
    if not has_biases:  # what stands in for them need not have their shape
        grads[3:5] = (jnp.zeros(r.shape, x.dtype) for r in ctx.result[3:5])
    return tuple(cast(lax.reshape(v, r.shape), r.dtype) for v, r in zip(grads, ctx.result, strict=True))
