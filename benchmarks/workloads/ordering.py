"""Sorting and selection: retrieval and sampling."""

from __future__ import annotations

import torch

from .workload import Made, Table, workload

WORKLOADS: Table = {}


def _distinct(rows: int, columns: int) -> torch.Tensor:
    """Numbers of which no two in a row are equal, so that the order is one alone."""
    return torch.stack([torch.randperm(columns) for _ in range(rows)]) / columns - 0.5


@workload(WORKLOADS, "sort/top-p-32k", "aten.sort.default", "nucleus sampling, vocabulary of 32k", quick=True)
def _() -> Made:
    def sort(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.sort(x, descending=True)
        return values, indices

    return sort, (_distinct(4, 32_000),)


@workload(WORKLOADS, "topk/retrieval-64k", "aten.topk.default", "dense retrieval, 65536 passages")
def _() -> Made:
    def topk(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(x, 100)
        return values, indices

    return topk, (_distinct(4, 65_536),)
