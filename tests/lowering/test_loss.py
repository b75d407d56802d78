"""Losses agree with eager: reductions, weights, ignored targets, infinities and NaN, gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

from portable.errors import UnsupportedOpError
from portable.testing import lowered
from tests.lowering.networks import assert_agree

REDUCTIONS = ["none", "mean", "sum"]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_elementwise_losses_with_ties_nan_and_infinities(reduction, dtype):
    target = normal(4, 6, seed=1).to(dtype)
    x = normal(4, 6).to(dtype)
    x[0, 0], x[0, 1], x[1, 1], x[2, 2], x[3, 3] = math.nan, math.inf, -math.inf, target[2, 2], target[3, 3] + 1
    sign, chance = target.sign(), target.float().sigmoid().to(dtype)

    def losses(x):
        return [
            F.mse_loss(x, target, reduction=reduction),
            F.smooth_l1_loss(x, target, reduction=reduction),
            F.smooth_l1_loss(x, target, reduction=reduction, beta=0.7),
            F.huber_loss(x, target, reduction=reduction, delta=0.7),
            F.soft_margin_loss(x, sign, reduction=reduction),
            F.binary_cross_entropy_with_logits(x, chance, reduction=reduction),
            F.binary_cross_entropy_with_logits(
                x, chance, weight=chance + 1, pos_weight=chance[0] + 1, reduction=reduction
            ),
        ]

    assert_agree(losses, x)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy_at_0_and_1(reduction):
    x, target = normal(4, 6).sigmoid(), normal(4, 6, seed=1).sigmoid()
    x[0, 0], x[0, 1] = 0, 1
    assert_agree(lambda x: F.binary_cross_entropy(x, target, target + 1, reduction=reduction), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_indices(reduction, dtype):
    x, image = normal(4, 6).to(dtype), normal(2, 6, 3, 2).to(dtype)
    weight = normal(6, seed=2).abs().to(dtype)
    target = torch.tensor([1, 5, -100, 0])
    of_image = torch.randint(0, 6, (2, 3, 2), generator=torch.Generator().manual_seed(3))
    soft = normal(4, 6, seed=4).softmax(1).to(dtype)

    def losses(x, image):
        return [
            F.nll_loss(x, target, reduction=reduction),
            F.nll_loss(x, target, weight, reduction=reduction),
            F.nll_loss(x[0], target[0], weight, reduction=reduction),
            F.nll_loss(image, of_image, weight, reduction=reduction, ignore_index=2),
            F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=0.1),
            F.cross_entropy(x, soft, weight, reduction=reduction),
            F.nll_loss(x[:0], target[:0], reduction=reduction),
        ]

    assert_agree(losses, x, image)


def test_the_mean_over_targets_that_are_all_ignored_is_nan():
    assert_agree(lambda x: F.cross_entropy(x, torch.full((3,), -100)), normal(3, 4))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_margins(reduction):
    x, y = normal(4, 6), torch.tensor([1, -1, 1, -1])
    weight = normal(6, seed=2).abs()
    target = torch.tensor([1, 5, 3, 0])
    labels = torch.tensor([[1, 3, -1, 2, 0, 0], [0, 1, 2, 3, 4, 5], [-1, 0, 0, 0, 0, 0], [2, 2, 1, -1, -1, 3]])

    def losses(x):
        return [
            F.multi_margin_loss(x, target, margin=0.8, weight=weight, reduction=reduction),
            F.multi_margin_loss(x, target, p=2, reduction=reduction),
            F.multilabel_margin_loss(x, labels, reduction=reduction),
            F.margin_ranking_loss(x[:, 0], x[:, 1], y, reduction=reduction),
            F.hinge_embedding_loss(x[:, 0], y, reduction=reduction),
            F.cosine_embedding_loss(x, x.flip(1), y, reduction=reduction),
            F.triplet_margin_loss(x, x.flip(0), x.roll(1, 0), reduction=reduction),
            F.multilabel_soft_margin_loss(x, (x.detach() > 0).float(), reduction=reduction),
            F.poisson_nll_loss(x, y[:, None].abs(), reduction=reduction),
            F.kl_div(x, x.detach().softmax(1), reduction=reduction),
        ]

    assert_agree(losses, x)


def test_a_shape_that_torch_propagates_wrongly_is_refused():
    with pytest.raises(UnsupportedOpError, match="multi_margin_loss"):
        lowered(lambda x: F.multi_margin_loss(x, torch.tensor(1), reduction="none"), normal(3))


def test_broadcast_and_empty():
    assert_agree(lambda x: F.l1_loss(x, x[:0]) + F.mse_loss(x[:0], x[:0]), normal(1, 3), gradients=False)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_of_a_linear_layer(reduction):
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    target = torch.tensor([1, 5, -100, 0, 2])

    def losses(x, w, b):
        return F.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction)

    assert_agree(losses, normal(5, 4), normal(6, 4, seed=1), normal(6, seed=2))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_soft_margin_loss_overflows_in_float16_as_eager_does(reduction):
    x, target = normal(4, 6).half() * 12, normal(4, 6, seed=1).sign().half()
    assert_agree(lambda x: F.soft_margin_loss(x, target, reduction=reduction), x)
