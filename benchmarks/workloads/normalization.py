"""Normalisations of transformers."""

from __future__ import annotations

import torch
from torch import nn

from portable import ops

from .workload import Made, Table, workload

WORKLOADS: Table = {}
LAYER_NORM = "aten.native_layer_norm.default"


@workload(WORKLOADS, "layer_norm/bert-b8", LAYER_NORM, "BERT base, 128 tokens", quick=True)
def _() -> Made:
    return nn.LayerNorm(768, eps=1e-12), (torch.randn(8, 128, 768),)


@workload(WORKLOADS, "layer_norm/convnext-t-b64", LAYER_NORM, "ConvNeXt-T stage 1", quick=True)
def _() -> Made:
    return nn.LayerNorm(96, eps=1e-6), (torch.randn(64, 56, 56, 96),)


@workload(WORKLOADS, "layer_norm/vit-s-b1", LAYER_NORM, "ViT-S/16")
def _() -> Made:
    return nn.LayerNorm(384), (torch.randn(1, 197, 384),)


@workload(
    WORKLOADS,
    "layer_norm_backward/bert-b8",
    "aten.native_layer_norm_backward.default",
    "BERT base, 128 tokens",
    backward=True,
)
def _() -> Made:
    return nn.LayerNorm(768, eps=1e-12), (torch.randn(8, 128, 768),)


def _rms_norm(tokens: int) -> Made:
    def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, weight, 1e-5)

    return rms_norm, (torch.randn(1, tokens, 2048), torch.rand(2048) + 0.5)


@workload(WORKLOADS, "rms_norm/llama-prefill-512", "rms_norm", "Llama 3.2 1B", quick=True)
def _() -> Made:
    return _rms_norm(512)


@workload(WORKLOADS, "rms_norm/llama-decode", "rms_norm", "Llama 3.2 1B")
def _() -> Made:
    return _rms_norm(1)


@workload(WORKLOADS, "rms_norm_backward/llama-prefill-512", "rms_norm", "Llama 3.2 1B", backward=True)
def _() -> Made:
    return _rms_norm(512)
