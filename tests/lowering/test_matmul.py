"""Matrix products agree with eager."""

from __future__ import annotations

import pytest
import torch

from portable.testing import lowered

NAN = float("nan")
ones, full = torch.ones, torch.full


def agrees(function, *args):
    torch.testing.assert_close(lowered(function, *args), function(*args), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_beta_of_zero_ignores_nan_in_the_input():
    def products(x, row, m, v):
        return (
            torch.addmm(x, m, m, beta=0),
            torch.addmv(row, m, v, beta=0),
            torch.addr(x, v, v, beta=0),
            torch.baddbmm(x[None], m[None], m[None], beta=0),
            torch.addbmm(x, m[None], m[None], beta=0),
        )

    agrees(products, full((3, 3), NAN), full((3,), NAN), torch.randn(3, 3), torch.randn(3))


def test_an_alpha_of_zero_does_not_read_the_operands():
    def products(x, m, v):
        return torch.addmm(x, m, x, alpha=0), torch.addmv(v, m, v, alpha=0), torch.addbmm(x, m[None], x[None], alpha=0)

    agrees(products, ones(3, 3), full((3, 3), NAN), ones(3))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_integers_wrap_around(dtype):
    m = torch.randint(0, 120, (4, 4), dtype=dtype)
    agrees(lambda m: (m @ m, torch.addmm(m, m, m, alpha=3, beta=2), m[0] @ m, torch.dot(m[0], m[1])), m)


def test_int8_products_accumulate_in_int32():
    agrees(torch._int_mm, full((20, 40), 127, dtype=torch.int8), full((40, 16), -128, dtype=torch.int8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_float32(dtype):
    x = ones(1, 4099, dtype=dtype)
    agrees(lambda x: (x @ x.mT, torch.mv(x, x[0]), torch.nn.functional.linear(x, x)), x)


def test_nothing_to_sum_gives_zero_or_the_input():
    def products(x, m, n):
        return m @ n, torch.addmm(x, m, n, beta=3), torch.bmm(m[None], n[None]), m[0] @ n

    agrees(products, torch.randn(3), ones(2, 0), ones(0, 3))


@pytest.mark.parametrize("left", [(3,), (2, 3), (4, 2, 3), (5, 1, 2, 3), (0, 2, 3)])
def test_matmul_broadcasts_batches_and_takes_vectors(left):
    rights = [(3,), (3, 2), (1, 3, 2)]
    if left != (0, 2, 3):  # 4 matrices do not go with 0
        rights.append((4, 3, 2))
    agrees(lambda x, *ys: [x @ y for y in ys], torch.randn(left), *map(torch.randn, rights))


def test_transposed_and_strided_operands():
    x = torch.randn(6, 8)
    agrees(lambda x: (x.T @ x, x[::2, 1:] @ x[1::2, 1:].T, torch.einsum("ij,kj->ik", x, x[:2])), x)


def test_complex_products_and_conjugates():
    x = torch.randn(3, 3, dtype=torch.complex64)
    agrees(lambda x: (x @ x.mH, torch.vdot(x[0], x[1]), torch.addmm(x, x, x, alpha=1j, beta=2 - 1j)), x)


def test_gradients_of_linear():
    def gradients(x, weight, bias):
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        return torch.autograd.grad(torch.nn.functional.linear(*leaves).square().sum(), leaves)

    agrees(gradients, torch.randn(2, 5, 3), torch.randn(4, 3), torch.randn(4))
