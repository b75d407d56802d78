"""``aten._foreach_*``: an op of each tensor of a list, as in aten/src/ATen/native/ForeachOpsKernels.cpp.

On the CPU torch's own kernels are such loops, so that the answers are those of the single ops. The overloads whose
numbers lie in a tensor (``addcdiv.Tensor``) are left out: which op runs would depend on data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

_SINGLE: dict[str, Callable[..., Any]] = {
    "maximum": torch.clamp_min,
    "minimum": torch.clamp_max,
    "norm": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype),
    "copy": aten.copy.default,
    "zero": torch.zeros_like,
}
_POINTWISE = ("addcmul", "addcdiv")


def _single(name: str) -> Callable[..., Any] | None:
    """The op of one tensor, called as the foreach op is."""
    if name in _POINTWISE:
        op = getattr(torch, name)
        return lambda x, first, second, value=1: op(x, first, second, value=value)
    if name == "powsum":
        packet = getattr(aten, "linalg__powsum", None)  # not in every torch
        return packet and (lambda x, order=2, dtype=None: packet(x, order, dtype=dtype))
    return _SINGLE.get(name) or getattr(torch, name, None)


def _each(single: Callable[..., Any], lists: Sequence[bool], *args: Any, **kwargs: Any) -> list[Tensor]:
    count = next(len(a) for a, is_list in zip(args, lists, strict=False) if is_list)
    return [
        single(*(a[i] if is_list else a for a, is_list in zip(args, lists, strict=False)), **kwargs)
        for i in range(count)
    ]


@functools.cache
def decomposition(op: OpOverload) -> Callable[..., list[Tensor]] | None:
    """``op`` as a loop over its lists, if it is a foreach op without side effects that can be one."""
    name = op._schema.name.removeprefix("aten::_foreach_")
    if name == op._schema.name or op._schema.is_mutable:
        return None
    if name in _POINTWISE and op._overloadname == "Tensor":
        return None
    single = _single(name)
    lists = tuple(isinstance(a.type, torch.ListType) for a in op._schema.arguments if not a.kwarg_only)
    return functools.partial(_each, single, lists) if single else None
