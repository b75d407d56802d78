"""Blocks of common vision models agree with eager, outputs and gradients of inputs and parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.lowering.networks import assert_agree


class Residual(nn.Module):
    """Bottleneck with a strided shortcut; BatchNorm in training."""

    def __init__(self, inputs, width, outputs):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 2, 1, groups=2, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, 2, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


class ConvNeXt(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


class Transformer(nn.Module):
    """Patches, pre-norm self-attention and a perceptron."""

    def __init__(self, width, heads):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))
        self.heads = heads

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        n, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).reshape(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.second(x))


class UNet(nn.Module):
    """One level down and up: GroupNorm, pooling, a skip, upsampling and a transposed convolution."""

    def __init__(self, width):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU())
        self.below = nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.InstanceNorm2d(2 * width), nn.SiLU())
        self.rise = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.leave = nn.Conv2d(4 * width, 1, 3, padding=1)

    def forward(self, x):
        skip = self.enter(x)
        low = self.below(F.max_pool2d(skip, 2))
        bilinear = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        return self.leave(torch.cat([skip, self.rise(low), bilinear], 1))


BLOCKS = {
    "residual": (lambda: Residual(3, 4, 6), (2, 3, 9, 9)),
    "convnext": (lambda: ConvNeXt(6), (2, 6, 8, 8)),
    "transformer": (lambda: Transformer(8, 2), (2, 3, 12, 12)),
    "unet": (lambda: UNet(4), (2, 3, 8, 8)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block(name):
    torch.manual_seed(0)
    make, shape = BLOCKS[name]
    block = make()
    parameters, buffers = dict(block.named_parameters()), dict(block.named_buffers())
    names = [*parameters, *buffers]

    def call(x, *values):
        state = {n: v if n in parameters else v.detach().clone() for n, v in zip(names, values, strict=True)}
        out = torch.func.functional_call(block, state, (x,))
        return [out, *(state[n].detach() for n in buffers)]

    values = [v.detach().clone() for v in (*parameters.values(), *buffers.values())]
    assert_agree(call, torch.randn(shape), *values, tolerance=2e-4)
