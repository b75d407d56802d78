"""Chains of IEEE operations are equal to eager to the bit: a hundred in every run, CHAINS (10,000) of them at night."""

import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from portable.testing import lowered
from tests.conformance.chains import Chain, chains, difference

T = torch.tensor


def check(chain: Chain) -> None:
    try:
        want = chain.eager()
    except RuntimeError:
        return  # eager refuses a constant that is too large for the dtype
    have = lowered(chain, *chain.inputs, fallback="error")
    for number, (e, g) in enumerate(zip(want, have, strict=True), len(chain.inputs)):
        how = difference(e, g)
        assert not how, f"v{number} is {how}\n{chain}"


def batch(number: int, examples: int) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(chains())
    def run(chain: Chain) -> None:
        check(chain)

    run()


def test_a_hundred_chains():
    batch(0, 100)


@pytest.mark.slow
def test_ten_thousand_chains(capsys):
    count, first = int(os.environ.get("CHAINS") or 10_000), int(os.environ.get("CHAINS_SEED") or 1)
    for number in range(count // 500):
        batch(first + number, 500)
    with capsys.disabled():
        sys.stdout.write(f"\nchains: {count // 500 * 500} from seed {first}\n")


IDENTITY = torch.eye(3)
ROWS = torch.stack((torch.arange(32769.0),) * 3, 1)
LIBERTIES = {  # what XLA makes of these if it is let: another number
    "a magic constant that rounds": (lambda x: (x + 12582912.0) - 12582912.0, T([2.7])),
    "a logarithm of an exponential": (lambda x: x.exp().log(), T([100.0])),
    "a root of a square": (lambda x: (x * x).sqrt(), T([1e20])),
    "a product of exponentials": (lambda a, b: a.exp() * b.exp(), T([100.0]), T([-200.0])),
    "two divisions": (lambda x, y: x / y / y, T([1e20]), T([1e20])),
    "two multiplications": (lambda x: x * 1e25 * 1e25, T([1e-30])),
    "a zero that is added": (lambda x: torch.ceil(x) + torch.zeros_like(x), T([-0.5])),
    "products that cancel": (lambda a, b, x: a * x + b * x, T([1e20]), T([-1e20]), T([1e10])),
    "products that are summed": (lambda a, x: (a * x).sum(), T([1e20, -1e20]), T([1e10, 1e10])),
    "a product behind a view": (lambda a, b: (a * b)[:, None].expand(-1, 2) - a * a, T([1.1]), T([1.1])),
    "a sum of a matrix product": (lambda x, m: ((m @ x.T) ** 2).sum(0), ROWS, IDENTITY),
    "the same in float64": (lambda x, m: ((m @ x.T) ** 2).sum(0), ROWS.double(), IDENTITY.double()),
    "a subnormal result": (lambda x: x * 0.5, T([1e-38] * 20)),
    "a subnormal argument": (lambda x: x * 1e10, T([1e-41] * 20)),
    "subnormals in every thread": (lambda x: x * 0.5, torch.full((1 << 20,), 1e-38)),
}  # fmt: skip


@pytest.mark.parametrize("case", LIBERTIES)
def test_no_liberty_is_taken(case):
    function, *arguments = LIBERTIES[case]
    how = difference(function(*arguments), lowered(function, *arguments, fallback="error"))
    assert not how


def test_a_sum_of_a_broadcast_product_does_not_end_the_process():
    def function(o, a):
        return (o[..., None, None, None, None, None] * a).sum(2).clamp_min(2e-16).log()

    o, a = torch.ones(10, 4, 6), torch.ones(10, 4, 6, 9, 9, 9, 9, 9)
    torch.testing.assert_close(lowered(function, o, a, fallback="error"), function(o, a))
