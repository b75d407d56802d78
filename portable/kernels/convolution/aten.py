"""aten.convolution by torch's own CPU kernel (oneDNN): XLA's CPU client is 2 to 50 times slower, depthwise most."""

from __future__ import annotations

from typing import Any

import torch

from portable.kernels import aten
from portable.kernels.registry import register_kernel

OP = torch.ops.aten.convolution.default


def accepts(
    input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, *rest: Any
) -> bool:
    """Convolutions that are not transposed."""
    return not transposed


@register_kernel(
    "aten.convolution.default", provider="aten", backends=("xla:cpu",), dtypes=(torch.float32, torch.bfloat16),
    accepts=accepts, abi="jax", sources=aten.CODE.sources,
)  # fmt: skip
def convolution(ctx: Any, *args: Any) -> Any:
    return aten.call(ctx, OP, args, {}, apart=True)
