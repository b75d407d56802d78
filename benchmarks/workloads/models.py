"""Small whole models in plain torch: the blocks of well-known architectures at their own widths, with fewer of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .workload import Made, Table, workload

WORKLOADS: Table = {}


class ResidualBlock(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Conv2d(in_channels, channels, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ConvNeXtBlock(nn.Module):
    """A block of ConvNeXt: depthwise 7×7, layer norm and a feed-forward layer over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class EncoderBlock(nn.Module):
    """A transformer's encoder block, norm first (ViT) or last (BERT)."""

    def __init__(self, width: int, heads: int, *, norm_first: bool) -> None:
        super().__init__()
        self.heads, self.norm_first = heads, norm_first
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            x = x + self.attention(self.norm1(x))
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed_forward(x))


class VisionTransformer(nn.Module):
    """ViT-S/16 with ``depth`` blocks."""

    def __init__(self, depth: int, width: int = 384, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 197, width))
        self.blocks = nn.Sequential(*(EncoderBlock(width, width // 64, norm_first=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class Bert(nn.Module):
    """BERT's encoder with ``depth`` blocks, and its embeddings."""

    def __init__(self, depth: int, width: int = 384, words: int = 30_522) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(EncoderBlock(width, width // 64, norm_first=False) for _ in range(depth)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.blocks(self.norm(self.words(ids) + self.positions(positions)))


class DecoderBlock(nn.Module):
    """A block of Llama: RMS norm, rotary grouped-query attention, SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q = self.q(y).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, self.groups, self.size)).permute(2, 0, 3, 1, 4)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """Llama with ``depth`` blocks, a vocabulary of 8192."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, depth: int, width: int = 512, heads: int = 8, groups: int = 2, words: int = 8192) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, groups) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, words, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(1024).float(), 10_000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, tokens = self.words(ids), ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:tokens], self.sin[:tokens])
        return self.head(self.norm(x[:, -1]))


@workload(WORKLOADS, "model/resnet-b1", "model", "ResNet-18 stages 1–3, 112²", group="models")
def _() -> Made:
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    blocks = nn.Sequential(ResidualBlock(64, 64, 1), ResidualBlock(64, 128, 2), ResidualBlock(128, 256, 2))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000))
    return nn.Sequential(stem, blocks, head).eval(), (torch.randn(1, 3, 112, 112),)


def _convnext() -> nn.Module:
    stem = nn.Conv2d(3, 96, 4, 4)
    down = nn.Conv2d(96, 192, 2, 2)
    stages = [ConvNeXtBlock(96), ConvNeXtBlock(96), down, ConvNeXtBlock(192), ConvNeXtBlock(192)]
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 1000))


@workload(WORKLOADS, "model/convnext-t-b1", "model", "ConvNeXt-T stages 1–2, two blocks each, 224²", group="models")
def _() -> Made:
    return _convnext().eval(), (torch.randn(1, 3, 224, 224),)


@workload(WORKLOADS, "model/vit-s-b1", "model", "ViT-S/16, 4 blocks", group="models")
def _() -> Made:
    return VisionTransformer(4).eval(), (torch.randn(1, 3, 224, 224),)


@workload(WORKLOADS, "model/vit-s-train-b2", "model", "ViT-S/16, 2 blocks", backward=True, group="models")
def _() -> Made:
    return VisionTransformer(2), (torch.randn(2, 3, 224, 224),)


@workload(WORKLOADS, "model/bert-b2", "model", "MiniLM-sized BERT, 4 blocks, 128 tokens", group="models")
def _() -> Made:
    return Bert(4).eval(), (torch.randint(30_522, (2, 128)),)


@workload(WORKLOADS, "model/llama-prefill-128", "model", "Llama, 4 blocks of width 512", group="models")
def _() -> Made:
    return Llama(4).eval(), (torch.randint(8192, (1, 128)),)
