"""Values that an op does not allow, such as an index out of range: what eager raises for them, the call raises once the
program has run.

The program itself stays in range all the same: StableHLO's gather clamps an index and its scatter drops the write.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context

IN_SELF = "index out of range in self"
OF_DIM = "index {index} is out of bounds for dimension {dim} with size {size}"


def within(
    ctx: Context,
    index: jax.Array,
    size: int,
    message: str = IN_SELF,
    *,
    dim: int = 0,
    negative: bool = False,
    error: type[Exception] = IndexError,
) -> None:
    """Check that each index is in [0, size), or in [-size, size) where ``negative`` ones count from the end.

    Args:
        message: of the ``error``; it may name ``{index}``, ``{dim}`` and ``{size}``.
    """
    if not index.size or not jnp.issubdtype(index.dtype, np.integer):
        return
    low = -size if negative else 0
    axes = tuple(range(index.ndim))
    ends = [lax.convert_element_type(reduce(index, axes), np.int64) for reduce in (lax.reduce_min, lax.reduce_max)]
    said = functools.partial(message.format, dim=dim, size=size)
    check = functools.partial(_raise_beyond, low=low, high=size, said=said, error=error)
    ctx.check(jnp.stack(ends), check, lambda x, y: jnp.stack([lax.min(x[0], y[0]), lax.max(x[1], y[1])]))


def _raise_beyond(ends: torch.Tensor, *, low: int, high: int, said: functools.partial, error: type[Exception]) -> None:
    for index in ends.tolist():
        if not low <= index < high:
            raise error(said(index=index))


def divisible(ctx: Context, divisor: jax.Array | complex) -> None:
    """Check that no element of an integer divisor is zero."""
    if isinstance(divisor, jax.Array) and divisor.size and jnp.issubdtype(divisor.dtype, np.integer):
        holds(ctx, jnp.all(lax.ne(divisor, lax.full_like(divisor, 0))), "ZeroDivisionError")


def holds(ctx: Context, condition: jax.Array, message: str) -> None:
    """Check a condition (bool[])."""
    ctx.check(condition, functools.partial(_raise_unless, message=message), lax.bitwise_and)


def _raise_unless(condition: torch.Tensor, *, message: str) -> None:
    if not condition.item():
        raise RuntimeError(message)
