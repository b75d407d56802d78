"""aten.cumsum by torch's own CPU kernel: XLA's CPU client scans by windows."""

from __future__ import annotations

from typing import Any

import torch

from portable.kernels import aten
from portable.kernels.registry import register_kernel


@register_kernel(
    "aten.cumsum.default",
    provider="aten",
    backends=("xla:cpu",),
    dtypes=(torch.float32, torch.float64, torch.int64),
    abi="jax",
    sources=aten.CODE.sources,
)
def cumsum(ctx: Any, *args: Any, **kwargs: Any) -> Any:
    return aten.call(ctx, torch.ops.aten.cumsum.default, args, kwargs, out=torch.ops.aten.cumsum.out)
