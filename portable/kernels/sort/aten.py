"""aten.sort.stable by torch's own CPU kernel."""

from __future__ import annotations

from typing import Any

import torch

from portable.kernels import aten
from portable.kernels.registry import register_kernel


@register_kernel(
    "aten.sort.stable",
    provider="aten",
    backends=("xla:cpu",),
    dtypes=(torch.float32, torch.int64),
    abi="jax",
    sources=aten.CODE.sources,
)
def sort(ctx: Any, *args: Any, **kwargs: Any) -> Any:
    return aten.call(ctx, torch.ops.aten.sort.stable, args, kwargs, out=torch.ops.aten.sort.values_stable)
