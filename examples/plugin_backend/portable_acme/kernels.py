"""Kernels of the vendor: candidates, which run where a measurement has shown that they are better (or are named)."""

from __future__ import annotations

import torch

import portable as pt


@pt.register_kernel("rms_norm", provider="acme", backends=("acme",), dtypes=(torch.float32, torch.bfloat16))
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """Through the device's own norm instead of squares and their mean."""
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    out = wide * norm.square().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (out if weight is None else out * weight.float()).to(x.dtype)
