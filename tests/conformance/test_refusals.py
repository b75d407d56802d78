"""What eager refuses is refused: dtypes, shapes and numbers of every operator of torch's database, one changed at a
time."""

import re

import pytest

from portable.testing import refusal_score
from portable.testing.refused_calls import operators

# one a family, and those whose kernels check what shape propagation does not
QUICK = (
    "mm",
    "addmm",
    "index_select",
    "index_add",
    "bitwise_and",
    "gather",
    "nn.functional.linear",
    "nn.functional.layer_norm",
    "nn.functional.nll_loss",
    "nn.functional.hardshrink",
    "nn.functional.one_hot",
    "softmax",
    "cov",
    "slice_scatter",
)


def assert_refused(name):
    score = refusal_score("xla", ops=f"^{re.escape(name)}$")
    assert not score.wrong, "\n".join(map(str, score.wrong))
    return score


@pytest.mark.parametrize("name", QUICK)
def test_what_eager_refuses_is_refused(name):
    assert assert_refused(name).refused


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(operators()))
def test_what_eager_refuses_of_any_operator_is_refused(name):
    assert_refused(name)


def test_a_call_that_is_computed_counts_as_silent(monkeypatch):
    monkeypatch.setattr("portable.testing.refused_calls.lowered", lambda *args, **kwargs: 0)
    score = refusal_score("xla", ops="^mm$")
    assert score.wrong and not score.refused
    assert {outcome.answer for outcome in score.wrong} == {"silent"}
    assert "dtype silent" in str(score)
