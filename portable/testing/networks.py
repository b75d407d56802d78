"""Small models that every backend must run and train as eager does on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Block(nn.Module):
    """A pre-norm transformer block over token numbers ``[n, t]`` → logits ``[n, t, 11]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norm, self.norm_mlp = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, 16))
        x = x + self.mlp(self.norm_mlp(x))
        return x @ self.embed.weight.T


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 4),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "perceptron": (_perceptron, lambda n: torch.linspace(-2, 2, n * 8).sin().reshape(n, 8)),
    "convolutional": (_convolutional, lambda n: torch.linspace(-9, 9, n * 192).cos().reshape(n, 3, 8, 8)),
    "transformer": (Block, lambda n: (7 * torch.arange(n * 6) % 11).reshape(n, 6)),
}


def build(name: str) -> nn.Module:
    """The model ``name`` with the same parameters in every process; torch's generators are left as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MODELS[name][0]()


def example(name: str, n: int) -> torch.Tensor:
    """A batch of ``n`` examples for it."""
    return MODELS[name][1](n)
