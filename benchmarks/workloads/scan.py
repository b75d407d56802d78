"""Scans of state-space models and of sampling."""

from __future__ import annotations

import torch

from .workload import Made, Table, workload

WORKLOADS: Table = {}


def _cumsum(*shape: int, dim: int) -> Made:
    def cumsum(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x, dim)

    return cumsum, (torch.randn(*shape),)


@workload(WORKLOADS, "cumsum/mamba-1k", "aten.cumsum.default", "Mamba 130M, 1024 tokens", quick=True)
def _() -> Made:
    return _cumsum(1, 1536, 1024, dim=-1)


@workload(WORKLOADS, "cumsum/mamba2-chunks", "aten.cumsum.default", "Mamba-2, chunks of 64 tokens")
def _() -> Made:
    return _cumsum(1, 24, 16, 64, dim=-1)


@workload(WORKLOADS, "cumsum/top-p-32k", "aten.cumsum.default", "nucleus sampling, vocabulary of 32k")
def _() -> Made:
    return _cumsum(4, 32_000, dim=-1)
