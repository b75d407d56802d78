"""Mixture of experts: which tokens go to which expert, and in what order."""

from __future__ import annotations

import torch

from .workload import Made, Table, workload

WORKLOADS: Table = {}


@workload(WORKLOADS, "moe_routing/mixtral-256", "moe_routing", "Mixtral 8x7B, 256 tokens")
def _() -> Made:
    def route(x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, experts = (x @ gate).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        counts = torch.zeros(8, dtype=torch.int64, device=x.device)
        counts = counts.index_add(0, experts.flatten(), torch.ones_like(experts.flatten()))
        return x[order // 2], weights, order, counts

    return route, (torch.randn(256, 4096), torch.randn(4096, 8) / 64)
