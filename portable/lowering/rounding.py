"""Each operator rounds its result, as in eager: what keeps a compiler from computing two of them as one.

LLVM contracts a product and the sum that takes it to a fused multiply-add, which rounds once (XLA compiles with
``FPOpFusion::Fast``, and has no option for it), and the importer of StableHLO takes ``x + 0`` for ``x``, which is false
for -0. Both need to see the product and the zero. Here they do not: the bits of a product are or-ed with a zero that is
data, the last word of the program's seed, and a constant zero that is added is that word. It costs one vector
instruction an element, within the loop that computes the product. Inside one rule products may be contracted: its
result is within the rule's error, or the rule says otherwise itself (`rounded`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

CONTRACTING = frozenset({"cpu", "cuda", "rocm"})  # platforms that LLVM generates code for
_PRODUCTS = frozenset({"mul", "square", "integer_pow"})
_MOVING = frozenset(  # give elements of their operands, or with the sign changed
    ("reshape", "broadcast_in_dim", "transpose", "squeeze", "expand_dims", "slice", "dynamic_slice", "rev", "copy")
    + ("concatenate", "pad", "select_n", "neg", "gather", "optimization_barrier")
)
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat"})


def rounded(x: jax.Array, zero: jax.Array) -> jax.Array:
    """``x``, a float, as a value that no later operation can be contracted with; ``zero`` is a uint32 that is 0."""
    bits = np.dtype(f"uint{8 * x.dtype.itemsize}")
    mask = lax.broadcast(lax.convert_element_type(zero, bits), x.shape)
    return lax.bitcast_convert_type(lax.bitwise_or(lax.bitcast_convert_type(x, bits), mask), x.dtype)


def is_product(x: Any) -> bool:
    """Whether elements of this traced value are products, as far as its trace shows."""
    parent = getattr(x, "parent", None)
    if parent is None:
        return False
    name = parent.primitive.name
    if name in _PRODUCTS:
        return True
    if name in _MOVING or _narrows(parent):
        return any(is_product(operand) for operand in parent.in_tracers)
    return name in _CALLS


def _narrows(equation: Any) -> bool:
    """Whether it rounds to a narrower float: LLVM knows products of half precision by that."""
    if equation.primitive.name != "convert_element_type":
        return False
    to = equation.params["new_dtype"]
    return jnp.issubdtype(to, jnp.floating) and to.itemsize < equation.in_tracers[0].dtype.itemsize


def is_zero(x: Any) -> bool:
    """Whether this is a constant that holds zeros alone, of either sign, as far as its trace shows."""
    if not isinstance(x, jax.core.Tracer):
        return np.size(x) > 0 and not np.any(x)
    parent = getattr(x, "parent", None)
    if parent is None:
        literal = getattr(getattr(x, "val", None), "val", None)
        return literal is not None and np.ndim(literal) == 0 and bool(literal == 0)
    if parent.primitive.name in ("broadcast_in_dim", "convert_element_type", "reshape", "neg", "copy"):
        return all(is_zero(operand) for operand in parent.in_tracers)
    return False


def is_contractible(x: Any, platform: str) -> bool:
    """Whether a result that a rule gave needs `rounded` on this platform."""
    return (
        platform in CONTRACTING
        and isinstance(x, jax.Array)
        and jnp.issubdtype(x.dtype, jnp.floating)
        and x.dtype.itemsize > 1
        and x.dtype != jnp.bfloat16  # products in float32 that are rounded: no processor contracts across that
        and is_product(x)
    )
