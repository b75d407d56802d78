"""Recurrent layers as one op each, ``portable::recurrent_layer``, which `rnn` lowers to a loop over the steps.

torch unrolls them: a graph of a dozen ops for each step, minutes of compilation for a hundred steps. While `kept_whole`
traces, these functions stand in for torch's own; what a layer computes is as in aten/src/ATen/native/RNN.cpp. Packed
sequences keep their lengths as data: one program for all lengths of the same total.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.nn import functional as F

from portable.ops._op import keep_arguments, kept_arguments, recomputed

aten = torch.ops.aten

_SCHEMA = (
    "Tensor x, Tensor? batch_sizes, Tensor h, Tensor? c, Tensor w_input, Tensor w_hidden, Tensor? b_input, "
    "Tensor? b_hidden, Tensor? w_projection, bool reverse, str kind"
)
_TENSORS, _BATCH_SIZES = 9, 1  # the first arguments are tensors; this one has no gradient


def differentiable(args: Sequence[Any]) -> list[int]:
    """Positions of the arguments of a layer that have gradients."""
    return [i for i, x in enumerate(args[:_TENSORS]) if x is not None and i != _BATCH_SIZES]


def _layer(
    x: Tensor,
    batch_sizes: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    w_input: Tensor,
    w_hidden: Tensor,
    b_input: Tensor | None,
    b_hidden: Tensor | None,
    w_projection: Tensor | None,
    reverse: bool,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer, by torch's own kernel: as the backward half of a bidirectional one if ``reverse``."""
    weights = [w for w in (w_input, w_hidden, b_input, b_hidden, w_projection) if w is not None]
    states = [h] if c is None else [h, c]
    if reverse:  # the forward half is thrown away
        weights, states = weights * 2, [torch.stack((s, s)) for s in states]
    else:
        states = [s.unsqueeze(0) for s in states]
    hidden = states if kind == "lstm" else states[0]
    packet = getattr(aten, kind)
    rest = (hidden, weights, b_input is not None, 1, 0.0, False, reverse)
    if batch_sizes is None:
        out, *final = packet.input._op_dk(DispatchKey.CompositeImplicitAutograd, x, *rest, False)
    else:
        out, *final = packet.data._op_dk(DispatchKey.CompositeImplicitAutograd, x, batch_sizes, *rest)
    out = out[..., out.shape[-1] // 2 :] if reverse else out
    h, c = final[0][-1], final[1][-1] if kind == "lstm" else x.new_empty(0)
    return out.clone(), h.clone(), c.clone()  # a custom op may not return views of one tensor


def _shapes(
    x: Tensor, _: Any, h: Tensor, c: Tensor | None, w_input: Tensor, w_hidden: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    b_input, b_hidden, *_ = rest
    gates = F.linear(x, w_input, b_input)  # they raise what eager raises for shapes and dtypes that do not fit
    F.linear(h, w_hidden, b_hidden)
    out = gates.new_empty((*x.shape[:-1], h.shape[-1]))
    return out, h.new_empty(h.shape), x.new_empty(0) if c is None else c.new_empty(c.shape)


def _layer_backward(*args: Any) -> list[Tensor]:
    """By torch's own gradients of `_layer`: for what looks at a graph and runs it in eager."""
    grads, layer = args[:3], args[3:]
    positions = differentiable(layer)
    functionality = torch._C._dispatch_key_parse("AutogradFunctionality")
    # else nothing is recorded in the kernel of an op
    with torch.no_grad(), torch._C._SetExcludeDispatchKeyGuard(functionality, False):
        found = recomputed(_layer, layer, grads, [i in positions for i in range(len(layer))])
    return [torch.zeros_like(layer[i]) if (g := found[i]) is None else g.clone() for i in positions]


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    args, needs = kept_arguments(ctx)
    if torch.is_grad_enabled():  # differentiated again: as torch unrolls it
        return recomputed(_layer, args, grads, needs)
    given = dict(zip(differentiable(args), LAYER_BACKWARD(*grads, *args), strict=True))
    return tuple(given[i] if need else None for i, need in enumerate(needs))


def _register() -> tuple[OpOverload, OpOverload]:
    """``portable::recurrent_layer`` gives (output, final hidden, final cell) of a layer in one direction; its
    ``_backward`` the gradients of the tensors among its arguments, without batch_sizes and without those that are None.

    ``x`` is (T, N, I), or (sum of batch_sizes, I) if packed; ``h`` (N, H) and for an LSTM ``c`` (N, C). ``kind`` is
    lstm, gru, rnn_tanh or rnn_relu; all but an LSTM give an empty final cell.
    """
    forward = torch.library.custom_op(
        "portable::recurrent_layer", _layer, mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)"
    )
    forward.register_fake(_shapes)
    forward.register_autograd(_gradients, setup_context=keep_arguments)
    backward = torch.library.custom_op(
        "portable::recurrent_layer_backward",
        _layer_backward,
        mutates_args=(),
        schema=f"(Tensor? g_out, Tensor? g_h, Tensor? g_c, {_SCHEMA}) -> Tensor[]",
    )
    backward.register_fake(lambda *args: [args[3 + i].new_empty(args[3 + i].shape) for i in differentiable(args[3:])])
    ops = torch.ops.portable
    return ops.recurrent_layer.default, ops.recurrent_layer_backward.default


LAYER, LAYER_BACKWARD = _register()  # with the first capture: nothing imports this before


def _of(kind: str, overload: str) -> Callable[..., Any]:
    """What stands for ``aten.<kind>.<overload>`` in a trace."""
    op: OpOverload = getattr(getattr(aten, kind), overload)

    def layers(*args: Any) -> tuple[Tensor, ...]:
        if torch.is_autocast_enabled("cpu") or torch._C._functorch.peek_interpreter_stack() is not None:
            result: tuple[Tensor, ...] = op._op_dk(DispatchKey.CompositeImplicitAutograd, *args)  # step by step
            return result
        return _layers(kind, *((args[0], None, *args[1:]) if overload == "input" else (*args, False)))

    return layers


def _layers(
    kind: str,
    x: Tensor,
    batch_sizes: Tensor | None,
    hidden: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    h, c = hidden if kind == "lstm" else (hidden, None)
    projected = c is not None and c.shape[2] != h.shape[2]
    each, directions = 2 + 2 * has_biases + projected, 1 + bidirectional
    if len(weights) != each * directions * num_layers:
        raise RuntimeError(f"got an incorrect number of RNN parameters: {len(weights)}")
    x = x.transpose(0, 1) if batch_first else x
    if x.shape[0] == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    finals: list[tuple[Tensor, Tensor]] = []
    for i in range(num_layers):
        outs = []
        for direction in range(directions):
            k = i * directions + direction
            own = list(weights[k * each : (k + 1) * each])
            biases = own[2:4] if has_biases else [None, None]
            state = (h[k], None if c is None else c[k])
            projection = own[-1] if projected else None
            out, *final = LAYER(x, batch_sizes, *state, *own[:2], *biases, projection, bool(direction), kind)
            outs.append(out)
            finals.append((final[0], final[1]))
        x = torch.cat(outs, -1) if bidirectional else outs[0]
        if dropout and train and i < num_layers - 1:
            x = torch.dropout(x, dropout, train)
    x = x.transpose(0, 1) if batch_first else x
    states = [torch.stack(s) for s in zip(*finals, strict=True)]
    return (x, *states[: 1 if c is None else 2])


REPLACED = {
    (getattr(getattr(aten, kind), overload), key): _of(kind, overload)
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload in ("input", "data")
    for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
}
