"""Losses of language models."""

from __future__ import annotations

import torch

from portable import ops

from .workload import Made, Table, workload

WORKLOADS: Table = {}


@workload(WORKLOADS, "cross_entropy_backward/llama-128", "softmax_cross_entropy", "vocabulary of 32k", backward=True)
def _() -> Made:
    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ops.softmax_cross_entropy(logits, target)

    return loss, (torch.randn(128, 32_000), torch.randint(32_000, (128,)))
