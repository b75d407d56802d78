"""Custom ops that write to their arguments: torch's own kernel runs on copies, which are the arguments' new values.

AOTAutograd makes of such an op `auto_functionalized_v2`: it gives what the op returns, then the new value of each base,
a tensor that an argument is or that it is a view of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax import lax
from torch._higher_order_ops.auto_functionalize import (
    AsStridedViewInfo,
    SliceViewInfo,
    auto_functionalized_v2,
    get_mutable_args,
    read_view_information_from_args,
)

from portable import dtypes
from portable.lowering.context import Context, Refused, Spec, Strides
from portable.lowering.fallback import torch_kernel
from portable.lowering.strided import as_strided, as_strided_scatter

aten = torch.ops.aten

OP = auto_functionalized_v2
REASON = "it writes to its arguments, and no lowering says what"


def on_copies(ctx: Context, options: dict[str, Any], strides: Sequence[Strides | None]) -> tuple[Any, ...]:
    """What the op of ``ctx`` returns (None for nothing), then the new value of each base.

    Args:
        options: the keyword arguments of `auto_functionalized_v2`: the op's own, and which base each of those that it
            writes to is, in private names of torch's.
        strides: of the bases.

    Raises:
        Refused: an argument shares its base with another, or is a view that has no exact lowering; or torch's kernel
            cannot run in this program.
    """
    options = dict(options)
    bases: list[Any] = list(options.pop("_all_bases", ()))
    names, kinds = get_mutable_args(ctx.op)
    try:
        views = read_view_information_from_args(names, kinds, options, bases)
    except KeyError as failure:  # an out= overload's, which torch 2.13 passes without bases
        raise Refused(f"torch does not say what tensor it writes to: {failure} is missing") from failure
    every = [v for view in views.values() for v in (view if isinstance(view, list) else [view]) if v is not None]
    if len({v.base_index for v in every}) < len(every):
        raise Refused("two arguments that it writes to share memory")
    parts = {id(v): _Part(ctx, v, bases[v.base_index], strides[v.base_index]) for v in every}
    for name, view in views.items():
        read = [v and parts[id(v)].value() for v in (view if isinstance(view, list) else [view])]
        options[name] = read if isinstance(view, list) else read[0]
    returned = len(ctx.op._schema.returns)
    results = torch_kernel(ctx, (), options, written=frozenset(names))
    for view, value in zip(every, results[returned:], strict=True):
        bases[view.base_index] = parts[id(view)].base_with(value)
    return (*(results[:returned] or (None,)), *bases)


class _Part:
    """What an argument is of its base: the whole, a slice, or what strides and an offset say."""

    def __init__(self, ctx: Context, view: Any, base: jax.Array, strides: Strides | None) -> None:
        self.view, self.base = view, base
        self.at: tuple[Any, ...] = ()
        if isinstance(view, AsStridedViewInfo):
            self.at = tuple(view.size), tuple(view.stride), view.storage_offset
            result = Spec(self.at[0], dtypes.to_torch(base.dtype))
            self.context = Context(ctx.program, aten.as_strided.default, result, (strides,))
        elif isinstance(view, SliceViewInfo):
            self.dim = int(view.dim)
            self.start, end, _ = slice(view.start, view.end).indices(base.shape[self.dim])
            self.end = max(self.start, end)

    def value(self) -> jax.Array:
        if self.at:
            return as_strided(self.context, self.base, *self.at)
        if isinstance(self.view, SliceViewInfo):
            return lax.slice_in_dim(self.base, self.start, self.end, axis=self.dim)
        return self.base

    def base_with(self, value: jax.Array) -> jax.Array:
        """The base with another value of this part."""
        if self.at:
            return as_strided_scatter(self.context, self.base, value, *self.at)
        if isinstance(self.view, SliceViewInfo):
            return lax.dynamic_update_slice_in_dim(self.base, value, self.start, self.dim)
        return value
