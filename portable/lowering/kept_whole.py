"""Ops that are traced whole, because torch's Python decomposition of them is not what its kernels compute.

While it traces, torch replaces some ops by Python code before anyone sees them (``OpOverload.py_impl``). For these that
code differs from the CPU kernels: it gives other values, or loses dropout. Within ``kept_whole()`` the kernels' own
autograd formulas are traced instead, and the ops have rules of their own. Kernels that branch on data are replaced
meanwhile (`branchless`), and so are recurrent layers, which torch unrolls without dropout between them (`recurrent`).
Fake tensors have the strides of eager meanwhile (`true_strides`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch._decomp  # replaces them
from torch._C import DispatchKey
from torch._ops import OpOverload, OpOverloadPacket

from portable.lowering import branchless, recurrent, refusals, replaced_layouts
from portable.lowering.true_strides import true_strides

aten = torch.ops.aten

# packet: in what its decomposition differs (torch 2.13)
REASONS = {
    **dict.fromkeys(
        ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
        "an unchanged size is resampled by the scale factor, where kernels copy; integers are rounded differently",
    ),
    **dict.fromkeys(
        ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
        "an unchanged or doubled size is resampled by the scale factor, where kernels or gradients copy or repeat",
    ),
    "multilabel_margin_loss_forward": "entries after the first -1 are counted as labels",
    "multi_margin_loss": "the loss of a single sample has the shape [1], not []",
}
# composite ops that do something else for tensors that are traced
OTHERWISE = tuple((op, DispatchKey.CompositeImplicitAutograd) for op in (aten.max_pool1d.default, aten.rrelu.default))
UNROLLED = frozenset(f"aten::{name}" for name in ("gru", "lstm", "rnn_relu", "rnn_tanh"))  # their parts are checked
REPLACED = branchless.REPLACED | recurrent.REPLACED | replaced_layouts.REPLACED
_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd, DispatchKey.AutogradCPU)
_lock = threading.Lock()
_inside = 0
_before: dict[OpOverload, dict[Any, Any]] = {}


@functools.cache
def _ops() -> tuple[OpOverload, ...]:
    packets = [getattr(aten, name) for name in REASONS if hasattr(aten, name)]
    return tuple(getattr(p, o) for p in packets for o in p.overloads() if "out" not in o)


@functools.cache
def _taken_apart() -> tuple[tuple[OpOverload, DispatchKey], ...]:
    """The ops that torch replaces by Python code, which checks less than they do."""
    packets = [packet for packet in vars(aten).values() if isinstance(packet, OpOverloadPacket)]
    ops = [op for packet in packets for op in vars(packet).values() if isinstance(op, OpOverload)]
    return tuple((op, key) for op in ops for key in _KEYS if key in op.py_kernels)


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """Within it torch traces these ops whole, and the replacements. Reentrant; counted over threads."""
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            _replace()
    try:
        with true_strides():
            yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                for op, kernels in _before.items():
                    op.py_kernels.clear()
                    op.py_kernels.update(kernels)
                    op._dispatch_cache.clear()
                _before.clear()


def _replace() -> None:
    taken_apart = _taken_apart()
    for op in {*_ops(), *(op for op, _ in (*REPLACED, *taken_apart, *OTHERWISE))}:
        _before[op] = dict(op.py_kernels)
        op._dispatch_cache.clear()
    for op in _ops():
        for key in _KEYS[:2]:
            op.py_kernels.pop(key, None)
    for (op, key), function in REPLACED.items():
        op.py_kernels[key] = function
    for op, key in OTHERWISE:
        op.py_kernels[key] = refusals.asked(op, functools.partial(op._op_dk, key))
    for op, key in {*taken_apart, *REPLACED}:
        if key in op.py_kernels and op.name().partition(".")[0] not in UNROLLED:
            op.py_kernels[key] = refusals.asked(op, op.py_kernels[key])
