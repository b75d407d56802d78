"""Random numbers: the right distribution, reproduced by a seed, new ones each call; eager's own if seeded inside."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from portable.errors import UnsupportedOpError
from portable.testing import lowered

N = 20000
BLANK = torch.empty(N)

# name: (draw, mean, variance)
DISTRIBUTIONS = {
    "rand": (lambda x: torch.rand(N), 0.5, 1 / 12),
    "rand bf16": (lambda x: torch.rand(N, dtype=torch.bfloat16), 0.5, 1 / 12),
    "randn": (lambda x: torch.randn(N), 0, 1),
    "randn_like": (lambda x: torch.randn_like(x, dtype=torch.float64), 0, 1),
    "randint": (lambda x: torch.randint(-2, 3, (N,)), 0, 2),
    "randperm": (lambda x: torch.randperm(N) / N, 0.5, 1 / 12),
    "uniform": (lambda x: x.clone().uniform_(-1, 3), 1, 16 / 12),
    "normal": (lambda x: torch.normal(torch.full((N,), 2.0), 3.0), 2, 9),
    "normal_": (lambda x: x.clone().normal_(1, 2), 1, 4),
    "exponential": (lambda x: x.clone().exponential_(2.0), 0.5, 0.25),
    "geometric": (lambda x: x.clone().geometric_(0.25), 4, 12),
    "log_normal": (lambda x: x.clone().log_normal_(0, 0.5), math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25)),
    "cauchy": (lambda x: x.clone().cauchy_(0, 1).atan() / math.pi + 0.5, 0.5, 1 / 12),
    "bernoulli": (lambda x: torch.full((N,), 0.3).bernoulli(), 0.3, 0.21),
    "bernoulli_": (lambda x: x.clone().bernoulli_(0.3), 0.3, 0.21),
    "random_": (lambda x: x.clone().random_(1, 4), 2, 2 / 3),
    "multinomial": (lambda x: torch.multinomial(torch.tensor([0.0, 1, 2, 1, 0]), N, True), 2, 0.5),
    "multinomial once": (lambda x: torch.multinomial(torch.tensor([0.0, 1, 2, 1]).expand(N, 4), 1), 2, 0.5),
    "dropout": (lambda x: F.dropout(torch.ones(N), 0.2), 1, 0.25),
    "native_dropout": (lambda x: torch.native_dropout(torch.ones(N), 0.2, True)[0], 1, 0.25),
    "rrelu": (lambda x: F.rrelu(-torch.ones(N), 0.1, 0.3, True), -0.2, 0.04 / 12),
    "poisson": (lambda x: torch.poisson(torch.full((N,), 4.0)), 4, 4),
}


@pytest.fixture(scope="module")
def drawn():
    def program(x):
        return {name: draw(x) for name, (draw, _, _) in DISTRIBUTIONS.items()}

    torch.manual_seed(0)
    first = lowered(program, BLANK)
    torch.manual_seed(0)
    return first, lowered(program, BLANK), lowered(program, BLANK)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_seed_reproduces_and_two_calls_differ(drawn, name):
    first, again, later = drawn
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], later[name])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_distribution_is_right(drawn, name):
    draw, mean, variance = DISTRIBUTIONS[name]
    sample = drawn[0][name]
    assert sample.dtype == draw(BLANK).dtype
    sample = sample.double()
    assert abs(sample.mean() - mean) < 6 * math.sqrt(variance / N)
    assert abs(sample.var() - variance) < 0.12 * variance


def test_ranges_and_permutations(drawn):
    values = drawn[0]
    assert sorted((values["randperm"] * N).round().long().tolist()) == list(range(N))
    assert set(values["randint"].tolist()) == {-2, -1, 0, 1, 2}
    assert values["rand"].max() < 1 and values["rand bf16"].max() < 1 and values["exponential"].min() > 0
    assert set(values["multinomial"].tolist()) == {1, 2, 3}


def test_without_replacement_no_category_repeats():
    rows = lowered(lambda: torch.multinomial(torch.tensor([1.0, 2, 0, 1]).expand(50, 4), 3))
    assert all(sorted(row) == [0, 1, 3] for row in rows.tolist())


def test_two_uses_in_one_program_differ():
    a, b = lowered(lambda x: (torch.rand_like(x), torch.rand_like(x)), BLANK)
    assert not torch.equal(a, b)


SEEDED = {
    **{name: draw for name, (draw, _, _) in DISTRIBUTIONS.items() if name not in ("poisson", "rrelu")},
    "a transposed tensor": lambda x: torch.rand_like(x[:600].reshape(20, 30).t()),
    "integers": lambda x: torch.empty(9, dtype=torch.int16).random_(),
}


def test_what_the_function_seeds_itself_is_what_eager_draws(agrees):
    def program(x):
        torch.manual_seed(7)
        return [draw(x) for draw in SEEDED.values()]

    with torch.random.fork_rng():
        agrees({"all of them, one after the other": program}, torch.zeros(N))


def test_slopes_that_the_function_seeds_itself(agrees):
    def program(x):
        torch.manual_seed(7)
        return F.rrelu(x, training=True)

    with torch.random.fork_rng():
        agrees({"rrelu": program}, torch.linspace(-1, 1, 30))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float16])
def test_normal_numbers_that_the_function_seeds_itself(agrees, dtype):
    def program(x):
        torch.manual_seed(7)
        return x.clone().normal_(1.5, 2.0)

    with torch.random.fork_rng():
        agrees({"normal_": program}, torch.zeros(30, dtype=dtype))


def test_complex_normal_numbers_have_half_the_variance_in_each_part():
    z = lowered(lambda x: x.clone().normal_(1.5, 2.0), torch.zeros(N, dtype=torch.complex64))
    for part in (z.real, z.imag):
        assert abs(part.mean().item() - 1.5) < 0.1
        assert abs(part.var().item() - 2) < 0.1


def test_a_draw_that_depends_on_data_after_a_seed_is_refused():
    def program(x):
        torch.manual_seed(7)
        return torch.poisson(x)

    with torch.random.fork_rng(), pytest.raises(UnsupportedOpError, match="has seeded"):
        lowered(program, torch.ones(3))


def test_a_generator_of_its_own_is_refused():
    generator = torch.Generator()
    with pytest.raises(UnsupportedOpError, match="Generator"):
        lowered(lambda x: x.clone().uniform_(generator=generator), torch.ones(3))


def test_checkpointing_draws_the_same_mask_again():
    def program(x):
        x = x.clone().requires_grad_()
        y = checkpoint(lambda v: F.dropout(v.exp(), 0.5), x, use_reentrant=False)
        return (y.detach() > 0), (torch.autograd.grad(y.sum(), x)[0] > 0)

    kept, passed = lowered(program, torch.ones(200))
    assert torch.equal(kept, passed) and 0 < kept.sum() < 200


def test_a_trace_leaves_the_generator_where_it_was():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    lowered(lambda x: x + 1, torch.ones(2))
    assert torch.equal(before, torch.get_rng_state())
