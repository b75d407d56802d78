"""Convolutions and their gradients agree with eager, in every rank, layout of windows and dtype."""

import pytest
import torch
import torch.nn.functional as F

from portable.testing import lowered
from tests.lowering.networks import assert_agree

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
# stride, padding, dilation, groups; the last two leave a remainder that no window reads
WINDOWS = [(1, 0, 1, 1), (2, 1, 1, 2), (3, 2, 2, 1), (2, 0, 2, 4)]


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolution(rank, dtype):
    x = normal(2, 4, *(9, 8, 7)[:rank], dtype=dtype)
    weights = [normal(8, 4 // groups, *(3, 2, 3)[:rank], dtype=dtype) for *_, groups in WINDOWS]
    bias = normal(8, dtype=dtype)

    def all_windows(x, bias, *weights):
        return [CONV[rank](x, w, bias, *at) for w, at in zip(weights, WINDOWS, strict=True)]

    assert_agree(all_windows, x, bias, *weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed_convolution(rank, dtype):
    x = normal(2, 4, *(5, 4, 3)[:rank], dtype=dtype)
    weights = [normal(4, 8 // groups, *(3, 2, 3)[:rank], dtype=dtype) for *_, groups in WINDOWS]
    bias = normal(8, dtype=dtype)

    def all_windows(x, bias, *weights):
        return [
            TRANSPOSED[rank](x, w, bias, stride, padding, stride - 1, groups, dilation)
            for w, (stride, padding, dilation, groups) in zip(weights, WINDOWS, strict=True)
        ]

    assert_agree(all_windows, x, bias, *weights)


def test_same_padding_of_an_even_kernel_and_a_single_sample():
    x, w, b = normal(4, 6, 5), normal(2, 4, 2, 4), normal(2)
    assert_agree(lambda x, w, b: F.conv2d(x, w, b, padding="same", dilation=2), x, w, b)


def test_an_empty_batch():
    assert_agree(lambda x, w, b: F.conv2d(x, w, b), normal(0, 4, 5, 5), normal(2, 4, 3, 3), normal(2))


def test_integers_wrap():
    x = torch.tensor([[[2**62, 2**62, 3, -5]]])
    w = torch.tensor([[[3, 2]]])
    assert_agree(lambda x, w: F.conv1d(x, w), x, w, gradients=False)


def test_nan_stays_in_its_windows():
    x = normal(1, 2, 6, 6)
    x[0, 1, 2, 2] = float("nan")
    assert_agree(lambda x, w: F.conv2d(x, w, padding=1), x, normal(2, 2, 3, 3), gradients=False)


def test_a_non_contiguous_input():
    assert_agree(lambda x, w: F.conv2d(x.transpose(2, 3)[:, :, ::2], w), normal(2, 3, 8, 9), normal(4, 3, 3, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_transposed_with_output_padding_of_the_stride_rounds_as_torch(dtype):
    x, w, bias = (torch.randn(s, dtype=dtype) for s in ((2, 6, 3, 4, 5), (6, 2, 3, 2, 3), (4,)))

    def spread(x, w, bias):
        arguments = {"stride": (1, 2, 1), "padding": (1, 0, 2), "output_padding": 1, "dilation": 2, "groups": 2}
        return F.conv_transpose3d(x, w, bias, **arguments), F.conv_transpose3d(x, w, **arguments)

    for got, want in zip(lowered(spread, x, w, bias), spread(x, w, bias), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(("batch", "channels"), [(2, 0), (0, 3), (0, 0)])
def test_a_convolution_of_nothing_has_the_shape_that_torch_gives_it(batch, channels):
    x, w, bias = torch.ones(batch, channels, 4, 4), torch.ones(2, channels, 3, 3), torch.ones(2)
    torch.testing.assert_close(lowered(F.conv2d, x, w, bias), F.conv2d(x, w, bias), rtol=0, atol=0)
    torch.testing.assert_close(lowered(F.conv2d, x, w), F.conv2d(x, w), rtol=0, atol=0)
