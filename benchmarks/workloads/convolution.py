"""Convolutions and resampling of image, audio and diffusion models, batch 1 unless the name says otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .workload import Made, Table, workload

WORKLOADS: Table = {}
CONVOLUTION = "aten.convolution.default"


def _conv(in_channels: int, out_channels: int, kernel: int, size: int, *, batch: int = 1, **options: Any) -> Made:
    conv = nn.Conv2d(in_channels, out_channels, kernel, **options)
    return conv, (torch.randn(batch, in_channels, size, size),)


@workload(WORKLOADS, "conv_stem/resnet50-b1", CONVOLUTION, "ResNet-50")
def _() -> Made:
    return _conv(3, 64, 7, 224, stride=2, padding=3)


@workload(WORKLOADS, "conv1x1/resnet50-b1", CONVOLUTION, "ResNet-50", quick=True)
def _() -> Made:
    return _conv(256, 64, 1, 56)


@workload(WORKLOADS, "conv3x3/resnet50-b1", CONVOLUTION, "ResNet-50", quick=True)
def _() -> Made:
    return _conv(64, 64, 3, 56, padding=1)


@workload(WORKLOADS, "conv3x3_backward/resnet50-b1", "aten.convolution_backward.default", "ResNet-50", backward=True)
def _() -> Made:
    return _conv(64, 64, 3, 56, padding=1)


@workload(WORKLOADS, "grouped_conv/resnext50-b1", CONVOLUTION, "ResNeXt-50 32x4d")
def _() -> Made:
    return _conv(128, 128, 3, 56, padding=1, groups=32)


@workload(WORKLOADS, "depthwise_conv/convnext-t-b1", CONVOLUTION, "ConvNeXt-T stage 1", quick=True)
def _() -> Made:
    return _conv(96, 96, 7, 56, padding=3, groups=96)


@workload(WORKLOADS, "depthwise_conv/convnext-t-b64", CONVOLUTION, "ConvNeXt-T stage 1")
def _() -> Made:
    return _conv(96, 96, 7, 56, padding=3, groups=96, batch=64)


@workload(WORKLOADS, "depthwise_conv/convnext-t-stage4-b1", CONVOLUTION, "ConvNeXt-T stage 4")
def _() -> Made:
    return _conv(768, 768, 7, 7, padding=3, groups=768)


@workload(
    WORKLOADS,
    "depthwise_conv_backward/convnext-t-b1",
    "aten.convolution_backward.default",
    "ConvNeXt-T stage 1",
    backward=True,
)
def _() -> Made:
    return _conv(96, 96, 7, 56, padding=3, groups=96)


@workload(WORKLOADS, "conv1d_stem/whisper-tiny", CONVOLUTION, "Whisper tiny encoder")
def _() -> Made:
    return nn.Sequential(nn.Conv1d(80, 384, 3, padding=1), nn.GELU()), (torch.randn(1, 80, 3000),)


@workload(WORKLOADS, "group_norm_silu_conv/sd-unet-b1", "aten.native_group_norm.default", "Stable Diffusion UNet")
def _() -> Made:
    block = nn.Sequential(nn.GroupNorm(32, 320), nn.SiLU(), nn.Conv2d(320, 320, 3, padding=1))
    return block, (torch.randn(1, 320, 32, 32),)


@workload(WORKLOADS, "upsample/sd-unet-b1", "aten.upsample_nearest2d.vec", "Stable Diffusion UNet")
def _() -> Made:
    def upsample(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2.0, mode="nearest")

    return upsample, (torch.randn(1, 320, 32, 32),)
