"""When a result is wrong: relative to the scale of a float64 reference, and by more than eager itself is off."""

import torch

from portable.slo.correctness import difference


def test_a_result_that_is_off_is_wrong():
    exact = torch.linspace(-1, 1, 100, dtype=torch.float64)
    right = exact.float()
    assert difference([right], [right], [exact]) == ""
    assert "off by" in difference([right + 1e-3], [right], [exact])
    assert "NaN or infinities in 100 elements" in difference([right * float("nan")], [right], [exact])
    assert "instead of" in difference([right[:50]], [right], [exact])
    assert "instead of" in difference([right.double()], [right], [exact])
    assert "1 results instead of 2" in difference([right], [right, right], [exact, exact])
    ints = torch.arange(4)
    assert "differs in 1 of 4" in difference([ints + (ints == 2)], [ints], [ints])


def test_nan_and_infinity_must_be_where_the_reference_or_eager_has_them():
    inf = float("inf")
    exact = torch.tensor([inf, float("nan"), 1.0], dtype=torch.float64)
    assert difference([exact.float()], [exact.float()], [exact]) == ""
    assert "2 elements" in difference([torch.ones(3)], [exact.float()], [exact])
    eager = torch.tensor([inf, inf, 1.0])  # where eager overflows, its answer counts too
    assert difference([eager], [eager], [exact]) == ""
