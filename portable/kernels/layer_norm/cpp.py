"""aten.native_layer_norm in C++: one pass over memory. XLA fuses this op well: a candidate that has to prove itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from portable.kernels.native_code import NativeCode
from portable.kernels.registry import register_kernel

CODE = NativeCode(Path(__file__).with_name("layer_norm.cc"), "portable_layer_norm")


def accepts(input: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> bool:
    """float32 throughout, over something."""
    given = [v for v in (weight, bias) if v is not None]
    return bool(math.prod(normalized_shape) > 0 and all(v.dtype == torch.float32 for v in given))


@register_kernel(
    "aten.native_layer_norm.default",
    provider="cpp",
    backends=("xla:cpu",),
    dtypes=(torch.float32,),
    accepts=accepts,
    abi="jax",
    sources=CODE.sources,
)
def native_layer_norm(
    input: jax.Array, normalized_shape: Sequence[int], weight: jax.Array | None, bias: jax.Array | None, eps: float
) -> Sequence[jax.Array]:
    CODE.register()
    rank = len(normalized_shape)
    kept = (*input.shape[: input.ndim - rank], *[1] * rank)
    types = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (input.shape, kept, kept)]
    results: Sequence[jax.Array] = jax.ffi.ffi_call("portable_layer_norm", types)(
        *[v for v in (input, weight, bias) if v is not None],
        size=np.int64(math.prod(normalized_shape)),
        has_weight=weight is not None,
        has_bias=bias is not None,
        eps=np.float32(eps),
    )
    return tuple(results)
