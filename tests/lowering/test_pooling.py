"""Pooling agrees with eager: overhanging windows, padding, dilation, ties, NaN, indices, gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

from portable.testing import lowered
from tests.lowering.networks import assert_agree

# kernel, stride, padding, ceil_mode
WINDOWS = [(2, 2, 0, False), (3, 2, 1, True), ((3, 2), (1, 3), (1, 0), True), (3, 4, 1, True)]
DTYPES = [torch.float32, torch.bfloat16]


def image(dtype=torch.float32):
    """Values, a plane of ties, a plane of -inf, several NaN in one window, an infinity."""
    x = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0))
    x[0, 1], x[1, 2] = 1.0, -math.inf
    x[0, 0, 2:4, 3], x[0, 2, 4, 4] = math.nan, math.inf
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("include_pad, divisor", [(True, None), (False, None), (True, 5)])
def test_average(dtype, include_pad, divisor):
    assert_agree(lambda x: [F.avg_pool2d(x, *w, include_pad, divisor) for w in WINDOWS], image(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dilation", [1, 2])
def test_maximum_and_its_indices(dtype, dilation):
    def pooled(x):
        results = [F.max_pool2d(x, k, s, p, dilation, c, return_indices=True) for k, s, p, c in WINDOWS]
        return [v for pair in results for v in pair]

    assert_agree(pooled, image(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_adaptive(dtype):
    sizes = [(3, 4), (9, 8), (4, 5), (1, 1), (11, 3), (None, 2)]
    assert_agree(lambda x: [F.adaptive_avg_pool2d(x, s) for s in sizes], image(dtype))
    assert_agree(lambda x: [v for s in sizes for v in F.adaptive_max_pool2d(x, s, return_indices=True)], image(dtype))


def test_one_and_three_dimensions():
    x = torch.randn(2, 3, 7, 6, 5, generator=torch.Generator().manual_seed(1))

    def pooled(x):
        flat = x.flatten(2)
        return [
            F.avg_pool3d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
            *F.max_pool3d(x, 2, 2, 1, return_indices=True),
            F.adaptive_avg_pool3d(x, (3, 2, 4)),
            *F.adaptive_max_pool3d(x, (3, 2, 4), return_indices=True),
            F.avg_pool1d(flat, 4, 3, 1),
            *F.max_pool1d(flat, 4, 3, 1, return_indices=True),
            F.lp_pool2d(x[:, 0], 2, 2),
        ]

    assert_agree(pooled, x)


@pytest.mark.parametrize(("shape", "samples"), [((2, 3, 9, 8), 2), ((2, 3, 9, 8), 4), ((3, 9, 8), 1), ((3, 9, 8), 2)])
def test_fractional_with_given_samples(shape, samples):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    u = torch.rand(samples, 3, 2, generator=torch.Generator().manual_seed(3))

    def pooled(x, u):
        return list(F.fractional_max_pool2d(x, 3, (4, 3), _random_samples=u, return_indices=True))

    assert_agree(lambda x: pooled(x, u), x)


def test_unpooling_inverts_the_indices():
    def unpooled(x):
        values, indices = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(values, indices, 2, output_size=x.shape[2:])

    assert_agree(unpooled, torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(4)))


def test_integers():
    x = torch.randint(-50, 50, (1, 2, 7, 7), generator=torch.Generator().manual_seed(5))
    assert_agree(lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), x, gradients=False)
    assert_agree(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), x, gradients=False)


def test_an_empty_batch():
    x = torch.zeros(0, 3, 6, 6)
    assert_agree(lambda x: [F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 2)], x)


@pytest.mark.parametrize("shape", [(0, 1, 4, 5, 4), (0, 4, 5, 4)], ids=str)
def test_fractional_pooling_of_nothing(shape):
    def pooled(x):
        return F.fractional_max_pool3d(x, 2, output_size=2, return_indices=True)

    for want, got in zip(pooled(torch.ones(shape)), lowered(pooled, torch.ones(shape)), strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
