"""rms_norm in Pallas for TPUs: one pass over memory."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.kernels.registry import register_kernel

DTYPES = (torch.float32, torch.bfloat16)
WIDEST = 32768
VALUES = 1 << 18  # of a block: 1 MiB in float32


def accepts(x: Any, weight: Any = None, eps: float = 1e-6) -> bool:
    """Nothing empty, rows that fit, a weight of either dtype."""
    return bool(
        x.ndim > 0
        and math.prod(x.shape) > 0
        and x.shape[-1] <= WIDEST
        and (weight is None or (weight.dtype in DTYPES and weight.shape == x.shape[-1:]))
    )


@register_kernel("rms_norm", provider="pallas", backends=("tpu", "xla:tpu"), dtypes=DTYPES, accepts=accepts, abi="jax")
def rms_norm(x: jax.Array, weight: jax.Array | None = None, eps: float = 1e-6) -> jax.Array:
    return normalised(x, weight, eps)


def normalised(
    x: jax.Array, weight: jax.Array | None, eps: float, *, values: int = VALUES, interpret: bool = False
) -> jax.Array:
    """The kernel.

    Args:
        values: how many a block has, about.
        interpret: run it as JAX operations on any device.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    width = x.shape[-1]
    rows = lax.reshape(x, (x.size // width, width))
    block = min(max(values // width // 16, 1) * 16, rows.shape[0])  # a tile of bfloat16 has 16 rows
    weights = [] if weight is None else [lax.reshape(weight, (1, width))]

    def body(x: Any, *rest: Any) -> None:
        v = x[...].astype(jnp.float32)
        v = v * lax.rsqrt(jnp.mean(v * v, 1, keepdims=True) + eps)
        for w in rest[:-1]:
            v = v * w[...].astype(jnp.float32)
        rest[-1][...] = v.astype(x.dtype)

    of_rows = pl.BlockSpec((block, width), lambda i: (i, 0))
    with jax.enable_x64(False):  # Mosaic has no 64-bit indices
        result: jax.Array = pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(rows.shape, x.dtype),
            grid=(pl.cdiv(rows.shape[0], block),),
            in_specs=[of_rows, *(pl.BlockSpec((1, width), lambda i: (0, 0)) for _ in weights)],
            out_specs=of_rows,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
            interpret=interpret,
        )(rows, *weights)
    return lax.reshape(result, x.shape)
