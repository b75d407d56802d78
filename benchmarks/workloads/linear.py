"""Matrix products: projections of encoders, decoding a single token, small batched products, embeddings."""

from __future__ import annotations

import torch
from torch import nn

from .workload import Made, Table, workload

WORKLOADS: Table = {}


@workload(WORKLOADS, "linear/bert-b1", "aten.addmm.default", "BERT base, 128 tokens", quick=True)
def _() -> Made:
    return nn.Linear(768, 3072), (torch.randn(128, 768),)


@workload(WORKLOADS, "linear_backward/vit-s-b1", "aten.addmm.default", "ViT-S/16", backward=True)
def _() -> Made:
    return nn.Linear(384, 1536), (torch.randn(197, 384),)


@workload(WORKLOADS, "linear/llama-decode", "aten.mm.default", "Llama 3.2 1B")
def _() -> Made:
    return nn.Linear(2048, 8192, bias=False), (torch.randn(1, 2048),)


@workload(WORKLOADS, "linear_bf16/llama-prefill-64", "aten.mm.default", "Llama 3.2 1B")
def _() -> Made:
    linear = nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)
    return linear, (torch.randn(64, 2048, dtype=torch.bfloat16),)


@workload(WORKLOADS, "bmm/swin-t-windows", "aten.bmm.default", "Swin-T, 7×7 windows", quick=True)
def _() -> Made:
    return torch.bmm, (torch.randn(192, 49, 32), torch.randn(192, 32, 49))


@workload(WORKLOADS, "embedding/llama-512", "aten.embedding.default", "Llama 3.2 1B, vocabulary of 32k")
def _() -> Made:
    return nn.Embedding(32_000, 1024), (torch.randint(32_000, (1, 512)),)
