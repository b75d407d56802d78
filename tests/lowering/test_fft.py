"""Fourier transforms agree with eager."""

from __future__ import annotations

import pytest
import torch

from portable.errors import UnsupportedOpError
from portable.testing import lowered
from tests.lowering.networks import assert_agree

F = torch.fft


def agrees(function, *args):
    assert_agree(function, *args, gradients=False)


@pytest.mark.parametrize("norm", [None, "ortho", "forward", "backward"])
@pytest.mark.parametrize("n", [None, 4, 9])
def test_one_dimension_in_every_normalisation(norm, n):
    def transforms(x, z):
        real = [f(x, n=n, norm=norm) for f in (F.fft, F.rfft, F.ifft, F.ihfft)]
        return *real, *(f(z, n=n, norm=norm) for f in (F.fft, F.ifft, F.irfft, F.hfft))

    agrees(transforms, torch.randn(2, 6), torch.randn(2, 6, dtype=torch.complex64))


@pytest.mark.parametrize("dim", [(-1,), (0, -2), (-1, 0), (0, 1, 2), (2, 0, 1)])
def test_several_dimensions_in_any_order(dim):
    def transforms(x):
        half = F.rfftn(x, dim=dim)
        return half, F.irfftn(half, dim=dim), F.fftn(x, dim=dim), F.ifftn(half, dim=dim), F.hfftn(half, dim=dim)

    agrees(transforms, torch.randn(3, 4, 5))


@pytest.mark.parametrize("length", [6, 7])
def test_the_imaginary_part_of_a_real_bin_is_ignored(length):
    agrees(lambda z: F.irfft(z, n=length), torch.randn(4, dtype=torch.complex128))


def test_integers_booleans_and_shifts():
    agrees(
        lambda i, b: (F.fft(i), F.rfft(b), F.fftshift(i), F.ifftshift(i)),
        torch.arange(5),
        torch.eye(3) > 0,
    )


@pytest.mark.parametrize("onesided", [True, False])
def test_short_time_transform_and_its_inverse(onesided):
    def there_and_back(x):
        window = torch.hann_window(16)
        z = torch.stft(x, 16, hop_length=4, window=window, onesided=onesided, return_complex=True)
        return z, torch.istft(z, 16, hop_length=4, window=window, onesided=onesided)

    agrees(there_and_back, torch.randn(2, 100))


def test_gradients():
    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.irfft(F.rfft(x) * 2).square().sum() + F.fftn(x).abs().sum(), x)

    agrees(gradient, torch.randn(3, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [1.0, 0.1, -3.0, 7])
def test_frequencies_are_eagers_to_the_bit(d, dtype):
    def frequencies():
        return [f(n, d, dtype=dtype) for f in (F.fftfreq, F.rfftfreq) for n in (1, 2, 9, 10, 255)]

    for want, got in zip(frequencies(), lowered(frequencies), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_frequencies_of_more_points_than_the_type_counts_are_refused():
    with pytest.raises(UnsupportedOpError, match="does not hold every integer"):
        lowered(lambda: F.fftfreq(513, dtype=torch.bfloat16), fallback="error")
