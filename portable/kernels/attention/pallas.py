"""attention in Pallas for TPUs: blocks of scores stay in the chip's vector memory (Dao et al. 2022, algorithm 1)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from portable.kernels.registry import register_kernel

DTYPES = (torch.float32, torch.bfloat16)  # no TPU multiplies float16 matrices
ROWS, COLUMNS = 512, 512  # queries and keys of a block
WIDEST = 512


def accepts(
    query: Any, key: Any, value: Any, mask: Any = None, is_causal: bool = False, scale: float | None = None
) -> bool:
    """No mask but the causal one, one dtype, nothing empty, heads that fit."""
    alike = query.dtype == key.dtype == value.dtype
    fits = query.shape[-1] <= WIDEST and value.shape[-1] <= WIDEST
    return bool(mask is None and alike and fits and math.prod((*query.shape, *key.shape, *value.shape)) > 0)


@register_kernel(
    "attention", provider="pallas", backends=("tpu", "xla:tpu"), dtypes=DTYPES, accepts=accepts, abi="jax"
)  # fmt: skip
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> jax.Array:
    return flash(query, key, value, is_causal, scale)


@dataclass(frozen=True)
class _Tiling:
    """How queries and keys are divided into blocks.

    Attributes:
        rows, columns: queries and keys of a block.
        keys: of all blocks; the last may hold fewer.
        group: query heads that share a key head.
    """

    rows: int
    columns: int
    keys: int
    group: int
    is_causal: bool

    def last(self, i: Any) -> Any:
        """The last block of keys that block ``i`` of queries attends to."""
        most = -(-self.keys // self.columns) - 1
        return jnp.minimum(_divided((i + 1) * self.rows - 1, self.columns), most) if self.is_causal else most

    def of_queries(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        return b, h, i, 0

    def of_keys(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        return b, _divided(h, self.group), jnp.minimum(j, self.last(i)), 0  # what is not needed is not fetched


def _divided(x: Any, by: int) -> Any:
    """``x // by`` of what is not negative: for that Mosaic need not know which TPU it compiles for."""
    return lax.div(x, jnp.full_like(x, by))


def flash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    is_causal: bool,
    scale: float | None,
    *,
    block: tuple[int, int] = (ROWS, COLUMNS),
    interpret: bool = False,
) -> jax.Array:
    """The kernel; a query head reads the key head that it shares.

    Args:
        block: how many queries and keys at a time.
        interpret: run it as JAX operations on any device.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    shape = (*query.shape[:3], value.shape[3])
    if not is_causal:  # the query heads that share a key head become rows of one
        query = jnp.reshape(query, (query.shape[0], key.shape[1], -1, query.shape[3]))
    (batch, heads, rows, width), (keys, width_out) = query.shape, value.shape[2:]
    tiling = _Tiling(min(block[0], rows), min(block[1], keys), keys, heads // key.shape[1], is_causal)
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else lax.Precision.DEFAULT
    body = functools.partial(
        _block, tiling=tiling, scale=1 / math.sqrt(width) if scale is None else scale, precision=precision
    )
    with jax.enable_x64(False):  # Mosaic has no 64-bit indices
        result: jax.Array = pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct((batch, heads, rows, width_out), query.dtype),
            grid=(batch, heads, pl.cdiv(rows, tiling.rows), pl.cdiv(keys, tiling.columns)),
            in_specs=[
                pl.BlockSpec((1, 1, tiling.rows, width), tiling.of_queries),
                pl.BlockSpec((1, 1, tiling.columns, width), tiling.of_keys),
                pl.BlockSpec((1, 1, tiling.columns, width_out), tiling.of_keys),
            ],
            out_specs=pl.BlockSpec((1, 1, tiling.rows, width_out), tiling.of_queries),
            scratch_shapes=[pltpu.VMEM((tiling.rows, n), jnp.float32) for n in (1, 1, width_out)],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
            interpret=interpret,
        )(query, key, value)
    return lax.reshape(result, shape)


def _block(
    query: Any, key: Any, value: Any, out: Any, top: Any, total: Any, sums: Any,
    *, tiling: _Tiling, scale: float, precision: Any,
) -> None:  # fmt: skip
    """One block of queries against one of keys. ``top`` and ``total`` are the largest score of each query so far and
    the sum of exponentials below it, ``sums`` the values that these weigh."""
    from jax.experimental import pallas as pl

    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _() -> None:
        top[...] = jnp.full(top.shape, -np.inf, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(j <= tiling.last(i))
    def _() -> None:
        dims = (((1,), (1,)), ((), ()))
        scores = lax.dot_general(
            query[0, 0], key[0, 0], dims, precision=precision, preferred_element_type=jnp.float32
        )  # fmt: skip
        scores, v = _masked(scores * scale, value[0, 0], i, j, tiling)
        before = top[...]
        higher = jnp.maximum(before, jnp.max(scores, 1, keepdims=True))
        base = jnp.where(higher == -np.inf, 0.0, higher)  # so far there was nothing but -inf
        weights, fade = jnp.exp(scores - base), jnp.exp(before - base)
        top[...] = higher
        total[...] = total[...] * fade + jnp.sum(weights, 1, keepdims=True)
        sums[...] = sums[...] * fade + lax.dot(
            weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        whole = total[...]
        out[0, 0] = jnp.where(whole == 0, 0.0, sums[...] / whole).astype(out.dtype)


def _masked(scores: jax.Array, values: jax.Array, i: Any, j: Any, tiling: _Tiling) -> tuple[jax.Array, jax.Array]:
    """Without the keys that come later, and those beyond the last: there is whatever memory holds, NaN too."""
    column = j * tiling.columns + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    if tiling.is_causal:
        row = i * tiling.rows + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        scores = jnp.where(column <= row, scores, -np.inf)
    if tiling.keys % tiling.columns:
        scores = jnp.where(column < tiling.keys, scores, -np.inf)
        there = j * tiling.columns + lax.broadcasted_iota(jnp.int32, values.shape, 0) < tiling.keys
        values = jnp.where(there, values, jnp.zeros_like(values))
    return scores, values
