"""aten.cumsum in C++: several sums at once, where torch's kernel adds one number after the other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from portable.kernels.native_code import NativeCode
from portable.kernels.registry import register_kernel

CODE = NativeCode(Path(__file__).with_name("cumsum.cc"), "portable_cumsum")


def accepts(self: Any, dim: int, *, dtype: torch.dtype | None = None) -> bool:
    """float32 to float32."""
    return dtype in (None, torch.float32)


@register_kernel(
    "aten.cumsum.default",
    provider="cpp",
    backends=("xla:cpu",),
    dtypes=(torch.float32,),
    accepts=accepts,
    abi="jax",
    sources=CODE.sources,
)
def cumsum(self: jax.Array, dim: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    CODE.register()
    shape = self.shape or (1,)
    axis = dim % len(shape)
    sizes = {"outer": math.prod(shape[:axis]), "length": shape[axis], "inner": math.prod(shape[axis + 1 :])}
    call = jax.ffi.ffi_call("portable_cumsum", jax.ShapeDtypeStruct(self.shape, np.float32))
    return call(self, **{name: np.int64(size) for name, size in sizes.items()})
