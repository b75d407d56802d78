"""Normalisation agrees with eager: statistics, running statistics, gradients, half and mixed precision."""

import pytest
import torch
import torch.nn.functional as F

from portable.testing import lowered
from tests.lowering.networks import assert_agree

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [(F32, F32), (BF16, BF16), (BF16, F32), (torch.float64, torch.float64)]


def data(dtype, weight_dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 5, 3, generator=generator) * 3 + 1
    return x.to(dtype), *(torch.randn(6, generator=generator).to(weight_dtype) for _ in range(2))


@pytest.mark.parametrize("dtypes", DTYPES)
def test_batch_norm_in_training(dtypes):
    def normalised(x, w, b):
        mean, var = torch.zeros(6, dtype=w.dtype), torch.ones(6, dtype=w.dtype)
        out = F.batch_norm(x, mean, var, w, b, True, 0.3, 1e-3)
        return [out, mean, var]

    assert_agree(normalised, *data(*dtypes))


@pytest.mark.parametrize("dtypes", DTYPES)
def test_batch_norm_in_evaluation(dtypes):
    def normalised(x, w, b):
        return F.batch_norm(x, torch.full_like(w, 0.5), torch.full_like(w, 0.7), w, b, False, 0.3, 1e-3)

    assert_agree(normalised, *data(*dtypes))


def test_running_statistics_that_are_arguments_are_written_to():
    x, mean, var = torch.randn(8, 3, 4), torch.zeros(3), torch.ones(3)
    eager_mean, eager_var = mean.clone(), var.clone()
    F.batch_norm(x, eager_mean, eager_var, training=True)
    from portable.testing import lowered

    lowered(lambda x, m, v: F.batch_norm(x, m, v, training=True), x, mean, var)
    torch.testing.assert_close((mean, var), (eager_mean, eager_var))


@pytest.mark.parametrize("dtypes", DTYPES)
def test_instance_and_group_norm(dtypes):
    assert_agree(
        lambda x, w, b: [
            F.instance_norm(x, weight=w, bias=b),
            F.group_norm(x, 3, w, b),
            F.group_norm(x, 1, w),
            F.group_norm(x, 6),
        ],
        *data(*dtypes),
        tolerance=2e-2 if BF16 in dtypes else None,
    )


@pytest.mark.parametrize("dtypes", DTYPES)
def test_layer_and_rms_norm(dtypes):
    x, w, b = data(*dtypes)
    x = x.permute(0, 2, 3, 1)
    tolerance = 2e-2 if BF16 in dtypes else None
    assert_agree(lambda x, w, b: [F.layer_norm(x, (6,), w, b), F.layer_norm(x, (3, 6))], x, w, b, tolerance=tolerance)
    if dtypes[0] == dtypes[1]:  # eager refuses to mix
        assert_agree(lambda x, w, b: [F.rms_norm(x, (6,), w), F.rms_norm(x, (3, 6)), b], x, w, b)


def test_a_mean_much_larger_than_the_deviation():
    assert_agree(lambda x: F.layer_norm(x, (64,)), 1000 + torch.randn(3, 64), gradients=False, tolerance=2e-3)


@pytest.mark.parametrize("shift", [0.0, 0.9, 1.1, 3.0, 1e4])
def test_rows_with_means_small_and_large_beside_their_deviation(shift):
    x = torch.randn(6, 768)
    x[0] += shift
    exact = F.layer_norm(x.double(), (768,))
    error = lambda y: (y.double() - exact).abs().max().item()  # noqa: E731
    assert error(lowered(F.layer_norm, x, (768,))) <= max(2e-6, 3 * error(F.layer_norm(x, (768,))))
    assert_agree(lambda x: F.layer_norm(x, (64,)), torch.full((2, 64), 3.0), gradients=False)


def test_local_response_norm():
    x = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(1))
    assert_agree(lambda x: [F.local_response_norm(x, 3), F.local_response_norm(x[..., 0], 2)], x)


def test_empty_batches():
    x, w = torch.zeros(0, 4, 3), torch.ones(3)
    assert_agree(lambda x, w: F.layer_norm(x, (3,), w), x, w)
    assert_agree(lambda x: F.group_norm(x, 2), x, gradients=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm_and_its_gradient(dim, dtype):
    torch.manual_seed(0)
    v = torch.randn(4, 3, 5).to(dtype)
    g = torch.randn([n if d == dim else 1 for d, n in enumerate(v.shape)]).to(dtype)

    def gradients(v, g):
        v, g = v.detach().requires_grad_(), g.detach().requires_grad_()
        w = torch._weight_norm(v, g, dim)
        return w, *torch.autograd.grad(w.square().sum(), (v, g))

    tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-4
    for want, got in zip(gradients(v, g), lowered(gradients, v, g), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
