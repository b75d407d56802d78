"""Programs for the host compute with subnormal numbers, as eager does.

XLA's CPU client makes the thread that calls a program, and those of its pool, flush subnormal numbers to zero, and no
option forbids it. A call of our own turns that off: for the pool once, when a client begins; for the calling thread
within each program, before anything is computed there. XLA orders calls by data alone, so that all arithmetic has to
depend on what the call gives, a zero (`Sources`); and it has the calling thread begin with the call on which most
others depend, which two further calls make sure that it is. Without a C++ compiler programs flush, and the log says
so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from portable import config
from portable.errors import BackendUnavailableError
from portable.kernels.native_code import NativeCode
from portable.lowering.rounding import rounded

KEEP, KEEP_IN_POOL, NOTHING = "portable_keep_subnormals", "portable_keep_subnormals_in_pool", "portable_nothing"
CODE = NativeCode(Path(__file__).with_name("subnormals.cc"), KEEP, KEEP_IN_POOL, NOTHING)

# What moves numbers, beside views, and what multiplies matrices: a library's call, before which a whole operand would
# have to be copied.
_MOVING = frozenset(
    ("embedding", "index", "index_select", "gather", "take", "cat", "stack", "flip", "roll", "repeat", "clone", "where")
    + ("constant_pad_nd", "_unsafe_view", "view_copy", "slice_scatter", "select_scatter", "masked_select", "contiguous")
)
_MATRICES = frozenset(
    ("mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear", "mv", "addmv", "dot", "vdot", "convolution")
    + ("convolution_backward", "_convolution", "scaled_dot_product_attention")
)


@functools.cache
def usable() -> bool:
    """Whether programs for the host can keep subnormal numbers here."""
    try:
        CODE.register()
    except BackendUnavailableError as failure:
        config.logger().warning("programs flush subnormal numbers to zero: %s", failure)
        return False
    return True


def _call(target: str, *operands: jax.Array) -> jax.Array:
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((), np.uint32), has_side_effect=True)(*operands)


def kept() -> jax.Array:
    """A zero (uint32) after which this program keeps subnormal numbers."""
    zero = _call(KEEP)
    _call(NOTHING, _call(NOTHING, zero))
    return zero


def of_the_pool() -> bytes:
    """A program without arguments that has every thread of a client's pool keep them; it gives 0 if all do."""
    from jax._src.interpreters import mlir

    lowered = jax.jit(lambda: _call(KEEP_IN_POOL)).trace().lower(lowering_platforms=("cpu",))
    return mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))


class Sources:
    """The values of a program that nothing was computed from yet, its arguments first: what arithmetic on them has to
    wait for."""

    def __init__(self, zero: jax.Array) -> None:
        self._zero = zero
        self._values: dict[int, tuple[jax.Array, jax.Array | None]] = {}  # by id: the value, and the same that waits

    def add(self, values: Any) -> None:
        for value in pytree.tree_leaves(values):
            if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.inexact):
                self._values.setdefault(id(value), (value, None))

    def has(self, value: Any) -> bool:
        return id(value) in self._values

    def waiting(self, value: Any) -> Any:
        """``value``; where it is a source, the same after the zero."""
        found = self._values.get(id(value))
        if found is None:
            return value
        source, after = found
        if after is None:
            after = self._after(source)
            self._values[id(value)] = source, after
        return after

    def _after(self, x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return lax.complex(rounded(lax.real(x), self._zero), rounded(lax.imag(x), self._zero))
        return rounded(x, self._zero)

    def apply(self, op: OpOverload, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``rule(*args, **kwargs)``, the lowering of ``op``, after the zero if it computes anything."""
        leaves, tree = pytree.tree_flatten((list(args), dict(kwargs)))
        mine = [i for i, leaf in enumerate(leaves) if self.has(leaf)]
        if not mine:
            return rule(*args, **kwargs)
        name = op.name().partition("::")[2].partition(".")[0]
        if op.is_view or name in _MOVING:
            value = rule(*args, **kwargs)
            self.add(value)
            return value
        if name in _MATRICES:
            arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
            mine = [min(mine, key=lambda i: leaves[i].size)] if len(mine) == len(arrays) else []
        for i in mine:
            leaves[i] = self.waiting(leaves[i])
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        return rule(*args, **kwargs)
