"""Composite ops that torch takes apart into ops whose result lies otherwise than the kernel's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._decomp
from torch._C import DispatchKey
from torch._ops import OpOverload

aten = torch.ops.aten


def dropout(input: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
    """What drops nothing gives its argument itself: a write to it is a write to the argument."""
    return aten.native_dropout.default(input, p, train)[0] if train and p != 0 else input


def one_hot(self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Row-major; torch's Python code compares with the classes, which keeps the order of ``self``."""
    key = DispatchKey.CompositeImplicitAutograd
    result: torch.Tensor = aten.one_hot.default._op_dk(key, self, num_classes)
    return result.contiguous()


def _row_major(op: OpOverload) -> Callable[..., torch.Tensor]:
    """torch's Python code of ``op``, which reads by index and keeps the order of its argument; the kernel does not."""

    def replacement(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = torch._decomp.decomposition_table[op](*args, **kwargs)
        return result.contiguous()

    return replacement


NEAREST = (aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact1d.vec)
REPLACED: dict[tuple[OpOverload, DispatchKey], Callable[..., Any]] = {
    **{
        (op, key): _row_major(op)
        for op in NEAREST
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
        if op in torch._decomp.decomposition_table
    },
    (aten.dropout.default, DispatchKey.Autograd): dropout,
    (aten.dropout.default, DispatchKey.CompositeImplicitAutograd): dropout,
    (aten.one_hot.default, DispatchKey.CompositeImplicitAutograd): one_hot,
}
