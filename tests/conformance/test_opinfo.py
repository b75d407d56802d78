"""Every operator of torch's database: its first sample in every run, all of it by the conformance scorers at night.

What fails is in limitations.toml, and has to fail.
"""

import pytest
import torch

from portable.errors import UnsupportedOpError
from portable.testing import lowered
from tests.conformance.operators import OPERATORS, compare, copied, eager, first_dtype, limitations, samples

LIMITED = {(x.op, x.dtype): x for x in limitations()}


def differ(want, have):
    try:
        compare(want, have)
    except AssertionError:
        return True
    return False


def check(name, dtype, most):
    """Compare up to ``most`` samples; random operators have tests of their own."""
    function, done = OPERATORS[name], 0
    for sample in samples(name, dtype):
        try:
            want, other = eager(name, sample, 1), eager(name, sample, 2)
        except Exception:  # of any kind: eager refuses it
            continue
        if done == most or differ(want, other):
            break
        done += 1
        torch.manual_seed(1)
        have = lowered(function, copied(sample.input), *copied(sample.args), **copied(sample.kwargs))
        if differ(want, have):
            post = sample.output_process_fn_grad  # up to a sign or phase that the operator leaves open
            compare(post(want), post(have))


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_the_first_sample(name):
    dtype = first_dtype(name)
    limit = LIMITED.get((name, str(dtype).removeprefix("torch.")))
    try:
        check(name, dtype, 1)
    except UnsupportedOpError:
        if limit is None:
            raise


@pytest.mark.slow
@pytest.mark.parametrize("limit", [*LIMITED.values()], ids=lambda x: f"{x.op}-{x.dtype}")
def test_a_limitation_is_still_one(limit):
    with pytest.raises(UnsupportedOpError):
        check(limit.op, getattr(torch, limit.dtype), 1000)
