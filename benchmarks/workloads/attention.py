"""Attention and rotary embedding: encoders, causal prefill, decoding with a key-value cache."""

from __future__ import annotations

import torch

from portable import ops

from .workload import Made, Table, workload

WORKLOADS: Table = {}


def _attention(batch: int, heads: int, queries: int, keys: int, size: int, *, causal: bool = False) -> Made:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.attention(q, k, v, is_causal=causal)

    q = torch.randn(batch, heads, queries, size)
    return attention, (q, torch.randn(batch, heads, keys, size), torch.randn(batch, heads, keys, size))


@workload(WORKLOADS, "attention/vit-s-b1", "attention", "ViT-S/16", quick=True)
def _() -> Made:
    return _attention(1, 6, 197, 197, 64)


@workload(WORKLOADS, "attention_backward/vit-s-b1", "attention", "ViT-S/16", backward=True)
def _() -> Made:
    return _attention(1, 6, 197, 197, 64)


@workload(WORKLOADS, "attention/bert-b8-masked", "attention", "BERT base, 128 tokens")
def _() -> Made:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ops.attention(q, k, v, mask)

    q, k, v = (torch.randn(8, 12, 128, 64) for _ in range(3))
    mask = torch.arange(128) < torch.arange(16, 144, 16).view(8, 1, 1, 1)
    return attention, (q, k, v, mask)


@workload(WORKLOADS, "attention/llama-prefill-512", "attention", "Llama 3.2 1B")
def _() -> Made:
    return _attention(1, 32, 512, 512, 64, causal=True)


@workload(WORKLOADS, "attention/llama-decode-512", "attention", "Llama 3.2 1B, cache of 512 tokens")
def _() -> Made:
    def decode(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        keys, values = keys.index_copy(2, at, k), values.index_copy(2, at, v)
        mask = torch.arange(keys.shape[2], device=at.device) <= at
        return ops.attention(q, keys, values, mask.view(1, 1, 1, -1))

    q, k, v = torch.randn(1, 32, 1, 64), torch.randn(1, 8, 1, 64), torch.randn(1, 8, 1, 64)
    return decode, (q, k, v, torch.randn(1, 8, 512, 64), torch.randn(1, 8, 512, 64), torch.tensor([400]))


def _rotary(tokens: int) -> Made:
    def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return ops.rotary_embedding(x, cos, sin)

    angles = torch.outer(torch.arange(tokens).float(), 500_000.0 ** (-torch.arange(0, 64, 2) / 64))
    return rotary, (torch.randn(1, 32, tokens, 64), angles.cos(), angles.sin())


@workload(WORKLOADS, "rotary/llama-prefill-512", "rotary_embedding", "Llama 3.2 1B", quick=True)
def _() -> Made:
    return _rotary(512)


@workload(WORKLOADS, "rotary/llama-decode", "rotary_embedding", "Llama 3.2 1B")
def _() -> Made:
    return _rotary(1)
