"""aten.bmm by torch's own CPU kernel: XLA's CPU client is slow on batches of small matrices."""

from __future__ import annotations

from typing import Any

import torch

from portable.kernels import aten
from portable.kernels.registry import register_kernel


def accepts(self: Any, mat2: Any) -> bool:
    """Small matrices: at most 256 rows and columns."""
    return bool(max(*self.shape[1:], *mat2.shape[1:]) <= 256)


@register_kernel(
    "aten.bmm.default",
    provider="aten",
    backends=("xla:cpu",),
    dtypes=(torch.float32,),
    accepts=accepts,
    abi="jax",
    sources=aten.CODE.sources,
)
def bmm(ctx: Any, *args: Any) -> Any:
    return aten.call(ctx, torch.ops.aten.bmm.default, args, {}, out=torch.ops.aten.bmm.out)
