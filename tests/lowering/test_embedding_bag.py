"""Bags of embeddings agree with eager: empty bags, padding, weights, frequencies, NaN, gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

from portable.testing import lowered
from tests.lowering.networks import assert_agree

INDICES = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9, 1])
OFFSETS = torch.tensor([0, 4, 4, 7])
MODES = ["sum", "mean", "max"]


def table():
    return torch.randn(10, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_bags_one_of_them_empty(mode, dtype):
    frequency = {"scale_grad_by_freq": True} if mode != "max" else {}

    def bags(w):
        return [
            F.embedding_bag(INDICES, w, OFFSETS, mode=mode, **frequency),
            F.embedding_bag(INDICES, w, OFFSETS, mode=mode, padding_idx=2),
            F.embedding_bag(INDICES, w, torch.tensor([0, 4, 4, 7, 9]), mode=mode, include_last_offset=True),
            F.embedding_bag(INDICES.reshape(3, 3).int(), w, mode=mode),
        ]

    assert_agree(bags, table().to(dtype))


def test_weights_of_samples():
    weights = torch.randn(9, generator=torch.Generator().manual_seed(1))

    def bags(w, weights):
        options = {"mode": "sum", "per_sample_weights": weights}
        return [F.embedding_bag(INDICES, w, OFFSETS, padding_idx=p, **options) for p in (None, 1)]

    assert_agree(bags, table(), weights)


@pytest.mark.parametrize("mode", MODES)
def test_nan_and_infinity(mode):
    w = table()
    w[4], w[2] = math.nan, -math.inf
    assert_agree(lambda w, i, o: F.embedding_bag(i, w, o, mode=mode), w, INDICES, OFFSETS, gradients=False)


@pytest.mark.parametrize("ends", [[0, 2], [0, 2, 2], [0, 0, 3], [0, 9]])
@pytest.mark.parametrize("mode", MODES)
def test_indices_after_the_last_offset_count_as_in_the_kernel_that_torch_chooses(mode, ends):
    offsets = torch.tensor(ends)

    def bags(w, columns):
        options = {"mode": mode, "include_last_offset": True}
        fast = F.embedding_bag(INDICES, w, offsets, **options)
        slow = F.embedding_bag(INDICES, w, offsets, padding_idx=2, **options)
        return [fast, slow, F.embedding_bag(INDICES, columns.t(), offsets, **options)]

    for dtype in (torch.float32, torch.float64):
        w = table().to(dtype)
        exact_gradient = mode != "sum" or ends[-1] == len(INDICES)  # torch's own reads beyond its memory
        assert_agree(bags, w, w.t().contiguous(), gradients=exact_gradient)


@pytest.mark.parametrize("offsets", [[1, 2], [0, 10]])
def test_offsets_that_eager_refuses_are_refused(offsets):
    def bags(w, i, o):
        return F.embedding_bag(i, w, o)

    with pytest.raises(RuntimeError) as eager:
        bags(table(), INDICES, torch.tensor(offsets))
    with pytest.raises(RuntimeError) as ours:
        lowered(bags, table(), INDICES, torch.tensor(offsets))
    assert str(eager.value).startswith(str(ours.value))  # torch adds the tensor's type
