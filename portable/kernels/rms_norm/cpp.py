"""rms_norm in C++: one pass over memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from portable.kernels.native_code import NativeCode
from portable.kernels.registry import register_kernel

CODE = NativeCode(Path(__file__).with_name("rms_norm.cc"), "portable_rms_norm")
DTYPES = (torch.float32, torch.bfloat16)


def accepts(x: Any, weight: Any = None, eps: float = 1e-6) -> bool:
    """float32 and bfloat16, each with a weight of either, or none."""
    return bool(x.ndim > 0 and (weight is None or (weight.dtype in DTYPES and weight.shape == x.shape[-1:])))


@register_kernel(
    "rms_norm",
    provider="cpp",
    backends=("xla:cpu",),
    dtypes=DTYPES,
    accepts=accepts,
    abi="jax",
    sources=CODE.sources,
)
def rms_norm(x: jax.Array, weight: jax.Array | None = None, eps: float = 1e-6) -> jax.Array:
    CODE.register()
    call = jax.ffi.ffi_call("portable_rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(*[v for v in (x, weight) if v is not None], eps=np.float32(eps))
