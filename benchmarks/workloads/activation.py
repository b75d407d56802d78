"""Activations and gates of transformers' feed-forward layers."""

from __future__ import annotations

import torch
from torch import nn

from portable import ops

from .workload import Made, Table, workload

WORKLOADS: Table = {}


@workload(WORKLOADS, "gelu/bert-b8", "aten.gelu.default", "BERT base, 128 tokens", quick=True)
def _() -> Made:
    return nn.GELU(), (torch.randn(8, 128, 3072),)


@workload(WORKLOADS, "gelu_backward/bert-b8", "aten.gelu_backward.default", "BERT base, 128 tokens", backward=True)
def _() -> Made:
    return nn.GELU(), (torch.randn(8, 128, 3072),)


def _swiglu(tokens: int) -> Made:
    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return ops.swiglu(gate, up)

    return swiglu, (torch.randn(1, tokens, 8192), torch.randn(1, tokens, 8192))


@workload(WORKLOADS, "swiglu/llama-prefill-128", "swiglu", "Llama 3.2 1B")
def _() -> Made:
    return _swiglu(128)


@workload(WORKLOADS, "swiglu/llama-decode", "swiglu", "Llama 3.2 1B")
def _() -> Made:
    return _swiglu(1)
