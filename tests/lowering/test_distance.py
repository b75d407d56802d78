"""Distances agree with eager: every norm, equal rows, the path through a matrix product, gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.networks import assert_agree


def rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
def test_norms_with_equal_rows_and_coordinates(p):
    x, y = rows(2, 5, 4), rows(2, 6, 4)
    y[0, 0], y[0, 1, :2] = x[0, 0], x[0, 1, :2]
    assert_agree(
        lambda x, y: [torch.cdist(x, y, p), torch.cdist(x[0], y, p), F.pdist(torch.cat([x[0], y[0]]), p)],
        x,
        y,
        tolerance=1e-4,
    )


def test_many_rows_go_through_a_matrix_product():
    assert_agree(lambda x, y: torch.cdist(x, y), rows(30, 4), rows(3, 4), tolerance=1e-3)


def test_empty():
    x, y = rows(3, 4), rows(5, 4)
    assert_agree(lambda x, y: [torch.cdist(x[:0], y), torch.cdist(x[:, :0], y[:, :0])], x, y, gradients=False)


def test_renorm_and_pairwise():
    assert_agree(lambda x: [torch.renorm(x, 2, 1, 1.0), F.pairwise_distance(x[0], x[1])], rows(2, 5, 4))
