"""aten.sort by torch's own CPU kernel: XLA's CPU client is several times slower."""

from __future__ import annotations

from typing import Any

import torch

from portable.kernels import aten
from portable.kernels.registry import register_kernel

DTYPES = (torch.float32, torch.int64)


@register_kernel(
    "aten.sort.default", provider="aten", backends=("xla:cpu",), dtypes=DTYPES, abi="jax", sources=aten.CODE.sources
)
def sort(ctx: Any, *args: Any, **kwargs: Any) -> Any:
    return aten.call(ctx, torch.ops.aten.sort.default, args, kwargs, out=torch.ops.aten.sort.values)


@register_kernel(
    "aten.sort.stable", provider="aten", backends=("xla:cpu",), dtypes=DTYPES, abi="jax", sources=aten.CODE.sources
)
def sort_stable(ctx: Any, *args: Any, **kwargs: Any) -> Any:
    return aten.call(ctx, torch.ops.aten.sort.stable, args, kwargs, out=torch.ops.aten.sort.values_stable)
