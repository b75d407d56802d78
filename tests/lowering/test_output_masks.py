"""Backward ops that compute only the gradients that their mask asks for: with every mask what eager gives, None too."""

import itertools

import pytest
import torch
from torch import nn

import portable as pt
from portable.lowering import registry
from portable.testing import lowered

aten = torch.ops.aten
IMAGE, ROWS = torch.randn(2, 4, 5, 5), torch.randn(3, 8)
FOUR, EIGHT = torch.rand(4) + 0.5, torch.rand(8) + 0.5


def batch_norm(mask, *, train):
    saved = (IMAGE.mean((0, 2, 3)), IMAGE.var((0, 2, 3), unbiased=False).add(1e-5).rsqrt())
    grad = torch.linspace(-1, 1, IMAGE.numel()).reshape(IMAGE.shape)
    return aten.native_batch_norm_backward(grad, IMAGE, FOUR, FOUR * 0, FOUR, *saved, train, 1e-5, mask)


def layer_norm(mask):
    mean, rstd = ROWS.mean(1, keepdim=True), ROWS.var(1, unbiased=False, keepdim=True).add(1e-5).rsqrt()
    return aten.native_layer_norm_backward(ROWS.sin(), ROWS, [8], mean, rstd, EIGHT, EIGHT, mask)


def group_norm(mask):
    groups = IMAGE.reshape(2, 2, -1)
    mean, rstd = groups.mean(2), groups.var(2, unbiased=False).add(1e-5).rsqrt()
    return aten.native_group_norm_backward(IMAGE.sin(), IMAGE, mean, rstd, FOUR, 2, 4, 25, 2, mask)


def convolution(mask):
    weight, grad = torch.linspace(-1, 1, 72).reshape(2, 4, 3, 3), torch.linspace(-1, 1, 36).reshape(2, 2, 3, 3)
    return aten.convolution_backward(grad, IMAGE, weight, [2], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)


def grid_sampler_2d(mask):
    grid = torch.linspace(-1, 1, 36).reshape(2, 3, 3, 2)
    return aten.grid_sampler_2d_backward(torch.ones(2, 4, 3, 3), IMAGE, grid, 0, 0, False, mask)


def grid_sampler_3d(mask):
    grid, volume = torch.linspace(-1, 1, 48).reshape(1, 2, 2, 4, 3), IMAGE.reshape(1, 2, 4, 5, 5)
    return aten.grid_sampler_3d_backward(torch.ones(1, 2, 2, 2, 4), volume, grid, 0, 0, False, mask)


CASES = {
    "batch_norm": (lambda mask: batch_norm(mask, train=True), 3),
    "batch_norm_eval": (lambda mask: batch_norm(mask, train=False), 3),
    "layer_norm": (layer_norm, 3),
    "group_norm": (group_norm, 3),
    "convolution": (convolution, 3),
    "grid_sampler_2d": (grid_sampler_2d, 2),
    "grid_sampler_3d": (grid_sampler_3d, 2),
}
ELSEWHERE = {"batch_norm_backward", "linear_backward"}  # torch has no kernel of these for the host


@pytest.mark.parametrize("case", CASES)
def test_each_mask_gives_what_eager_gives(case):
    function, count = CASES[case]
    for mask in itertools.product((False, True), repeat=count):
        want, have = function(list(mask)), lowered(function, list(mask), fallback="error")
        for wanted, e, g in zip(mask, want, have, strict=True):
            if wanted:
                torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)
            elif e is None:
                assert g is None, mask


def test_every_op_with_a_mask_is_tested():
    masked = {op.name() for op in registry.load() if any(a.name == "output_mask" for a in op._schema.arguments)}
    tested = {f"aten::{'' if c.startswith('grid') or c == 'convolution' else 'native_'}{c}_backward" for c in CASES}
    assert masked <= tested | {f"aten::{name}" for name in ELSEWHERE}


FIRST = {
    "BatchNorm1d": (nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)), ROWS),
    "BatchNorm2d": (nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)), IMAGE),
    "InstanceNorm2d": (nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 2, 3)), IMAGE),
    "GroupNorm": (nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3)), IMAGE),
    "LayerNorm": (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)), ROWS),
}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
def test_a_normalisation_trains_that_comes_first(name, frozen):
    model, x = FIRST[name]
    for parameter, value in model[0].named_parameters():
        value.requires_grad_(parameter != frozen)
    found = []
    for run in (model, pt.compile(model, backend="xla", fallback="error")):
        model.zero_grad()
        run(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
