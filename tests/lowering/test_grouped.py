"""Grouped matrix products, with empty groups, rows after the last group, and NaN in the rows of another group."""

import pytest
import torch

from portable.testing import lowered


def reference(x, weight, offsets):
    out, start = torch.zeros(x.shape[0], weight.shape[2], dtype=x.dtype), 0
    for g, end in enumerate(offsets.tolist()):
        out[start:end] = x[start:end] @ weight[g]
        start = end
    return out


OFFSETS = {"even": [2, 4, 6], "empty groups": [0, 5, 5], "rows left over": [1, 3, 4], "one group": [6, 6, 6]}


@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
def test_transformers_grouped_product_and_its_gradient(offsets):
    pytest.importorskip("transformers")
    import transformers.integrations.moe  # noqa: F401

    torch.manual_seed(0)
    x, weight, offs = torch.randn(6, 4), torch.randn(3, 4, 5), torch.tensor(offsets, dtype=torch.int32)
    op = torch.ops.transformers.grouped_mm_fallback
    torch.testing.assert_close(lowered(op, x, weight, offs), reference(x, weight, offs))

    def gradients(x, weight):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        return torch.autograd.grad(op(x, weight, offs).sin().sum(), (x, weight))

    torch.testing.assert_close(lowered(gradients, x, weight), gradients(x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)  # torch traces no other
def test_grouped_mm_matches_eager(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8, dtype=dtype), torch.randn(3, 8, 16, dtype=dtype)
    offs = torch.tensor([2, 2, 6], dtype=torch.int32)
    torch.testing.assert_close(
        lowered(torch._grouped_mm, x, weight, offs=offs), torch._grouped_mm(x, weight, offs=offs)
    )


def test_nan_stays_in_its_group():
    pytest.importorskip("transformers")
    import transformers.integrations.moe  # noqa: F401

    x = torch.ones(4, 3)
    x[3] = float("nan")
    offs = torch.tensor([2, 3], dtype=torch.int32)
    out = lowered(torch.ops.transformers.grouped_mm_fallback, x, torch.ones(2, 3, 2), offs)
    torch.testing.assert_close(out, reference(x, torch.ones(2, 3, 2), offs))
