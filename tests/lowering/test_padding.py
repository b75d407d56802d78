"""Padding and its gradient agree with eager, negative widths and wide borders included."""

import pytest
import torch
import torch.nn.functional as F

from portable.testing import lowered

CASES = [
    ("constant", (1, 2), {"value": -3.0}),
    ("constant", (-1, 2, 0, -2), {"value": float("nan")}),
    ("constant", (1, 1, 0, 3, -1, 1), {}),
    ("reflect", (3, 4), {}),
    ("reflect", (2, 0, 0, 3), {}),
    ("replicate", (2, 9), {}),
    ("replicate", (-1, 2, 3, -2), {}),
    ("circular", (1, 5), {}),
    ("circular", (2, 1, 4, 0), {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mode", "pad", "options"), CASES)
def test_padding_and_its_gradient_agree_with_eager(mode, pad, options, dtype):
    def function(x):
        x = x.clone().requires_grad_()
        y = F.pad(x, pad, mode=mode, **options)
        weight = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape) / 8
        return y.detach(), *torch.autograd.grad(y, x, weight)

    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x = x if len(pad) == 2 or mode == "constant" else x[None]
    got, expected = lowered(function, x), function(x)
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0, equal_nan=True, check_stride=False)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got[1], expected[1], rtol=tolerance, atol=tolerance, check_stride=False)
