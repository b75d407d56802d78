"""aten.topk by torch's own CPU kernel, which selects where XLA's CPU client sorts."""

from __future__ import annotations

from typing import Any

import torch

from portable.kernels import aten
from portable.kernels.registry import register_kernel


@register_kernel(
    "aten.topk.default",
    provider="aten",
    backends=("xla:cpu",),
    dtypes=(torch.float32, torch.bfloat16, torch.int64),
    abi="jax",
    sources=aten.CODE.sources,
)
def topk(ctx: Any, *args: Any, **kwargs: Any) -> Any:
    return aten.call(ctx, torch.ops.aten.topk.default, args, kwargs, out=torch.ops.aten.topk.values)
