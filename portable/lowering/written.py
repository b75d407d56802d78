"""Custom ops that write to their arguments: torch's own kernel runs on copies, which are the arguments' new values.

AOTAutograd makes of such an op `auto_functionalized_v2`: it gives what the op returns, then the new value of each base,
a tensor that an argument is or that it is a slice of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from torch._higher_order_ops.auto_functionalize import (
    AliasViewInfo,
    NotView,
    SliceViewInfo,
    auto_functionalized_v2,
    get_mutable_args,
    read_view_information_from_args,
)

from portable.lowering.context import Context, Refused
from portable.lowering.fallback import torch_kernel

OP = auto_functionalized_v2
REASON = "it writes to its arguments, and no lowering says what"


def on_copies(ctx: Context, options: dict[str, Any]) -> tuple[Any, ...]:
    """What the op of ``ctx`` returns (None for nothing), then the new value of each base.

    Args:
        options: the keyword arguments of `auto_functionalized_v2`: the op's own, and which base each of those that it
            writes to is, in private names of torch's.

    Raises:
        Refused: an argument is a view other than a slice, or shares its base with another; or torch's kernel cannot
            run in this program.
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
    for name, view in views.items():
        options[name] = [_read(v, bases) for v in view] if isinstance(view, list) else _read(view, bases)
    returned = len(ctx.op._schema.returns)
    results = torch_kernel(ctx, (), options, written=frozenset(names))
    for view, value in zip(every, results[returned:], strict=True):
        bases[view.base_index] = _replaced(view, bases[view.base_index], value)
    return (*(results[:returned] or (None,)), *bases)


def _read(view: Any, bases: Sequence[jax.Array]) -> jax.Array | None:
    if view is None:
        return None
    base = bases[view.base_index]
    if isinstance(view, (NotView, AliasViewInfo)):
        return base
    if not isinstance(view, SliceViewInfo):
        raise Refused("it writes to a view that is no slice")
    dim = int(view.dim)
    start, end, _ = slice(view.start, view.end).indices(base.shape[dim])
    return lax.slice_in_dim(base, start, max(start, end), axis=dim)


def _replaced(view: Any, base: jax.Array, value: jax.Array) -> jax.Array:
    if not isinstance(view, SliceViewInfo):
        return value
    dim = int(view.dim)
    start, _, _ = slice(view.start, view.end).indices(base.shape[dim])
    return lax.dynamic_update_slice_in_dim(base, value, start, dim)
