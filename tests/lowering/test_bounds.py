"""What eager raises for a value that an op does not allow, a compiled call raises too, with the same error."""

import re

import pytest
import torch
import torch.nn.functional as F

import portable as pt
from portable.errors import InvalidInputError, UnsupportedOpError
from portable.testing import lowered

X = torch.arange(20, dtype=torch.float32).reshape(4, 5)
COLUMN = X[:, 0].clone()
MASK = torch.tensor([True, False, True, True])


def at(*index: int) -> torch.Tensor:
    return torch.tensor(index)


INDEXED = {
    "index": lambda x, i: x[i],
    "index of a second dim": lambda x, i: x.t()[:, i],
    "index_put": lambda x, i: x.index_put((i,), x[0, 0]),
    "index_put that accumulates": lambda x, i: x.index_put((i,), x[0, 0], accumulate=True),
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding_bag": lambda x, i: F.embedding_bag(i[None], x),
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[None]),
    "take": lambda x, i: x[:, 0].take(i),
    "put": lambda x, i: x[:, 0].put(i, x[0, :1]),
    "index_add": lambda x, i: x.index_add(0, i, x[:1]),
    "index_add of a vector": lambda x, i: x[:, 0].index_add(0, i, x[0, :1]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:1]),
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x[:1], "amax"),
    "scatter": lambda x, i: x.scatter(0, i[None], x),
    "scatter of a number": lambda x, i: x.scatter(0, i[None], 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i[None], x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i[None], x, "amax"),
    "nll_loss": lambda x, i: F.nll_loss(x.t()[:1], i, ignore_index=-100),
    "multi_margin_loss": lambda x, i: F.multi_margin_loss(x.t()[:1], i),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("function", INDEXED.values(), ids=INDEXED)
@pytest.mark.parametrize("index", [4, -1, -5, 3])
def test_an_index_raises_where_it_does_in_eager(function, index):
    assert_same(function, X, at(index))


def assert_same(function, *args):
    try:
        want = function(*args)
    except (IndexError, RuntimeError) as expected:
        with pytest.raises(type(expected)) as raised:
            lowered(function, *args)
        assert _told(raised.value) in _told(expected)
    else:
        torch.testing.assert_close(lowered(function, *args), want)


def _told(error):
    """The message without what differs: eager counts only the indexed dims, and says which index it is."""
    return re.sub(r"(dimension|Index) \d+( of )?", r"\1 ", str(error)).removeprefix("Index ")


BAD = {
    "a quotient": (lambda x, y: x // y, at(3, 1), at(1, 0)),
    "a truncated quotient": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), at(3), at(0)),
    "a remainder": (lambda x, y: x % y, at(3), at(0)),
    "a remainder by a number": (lambda x: x % 0, at(3)),
    "fmod": (torch.fmod, at(3).to(torch.uint8), at(0).to(torch.uint8)),
    "no remainder at all": (lambda x: x % 0, at()),
    "too few values for a mask": (lambda x, m, v: x.index_put((m,), v), COLUMN, MASK, COLUMN[:2]),
    "too many values for a mask": (lambda x, m, v: x.index_put((m,), v), COLUMN, MASK, COLUMN),
    "as many values as a mask takes": (lambda x, m, v: x.index_put((m,), v), COLUMN, MASK, COLUMN[:3]),
    "too few values for masked_scatter": (torch.masked_scatter, COLUMN, MASK, COLUMN[:2]),
    "as many as masked_scatter takes": (torch.masked_scatter, COLUMN, MASK, COLUMN[:3]),
    "cross entropy of a number beyond 1": (lambda x: F.binary_cross_entropy(x, x), COLUMN),
    "a negative probability": (lambda x: x.multinomial(1), -COLUMN),
    "no probability": (lambda x: x.multinomial(1), COLUMN * 0),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_other_values_raise_where_they_do_in_eager(case):
    function, *args = case
    assert_same(lambda *a: function(*a), *args)


@pytest.mark.parametrize(
    "function", [lambda x: x[:0].max(), lambda x: x[:0].min(), lambda x: x.select_scatter(x[0], 0, 9)]
)
def test_what_shapes_alone_rule_out_is_refused(function):
    with pytest.raises((UnsupportedOpError, InvalidInputError)):  # the second where torch is asked first
        lowered(function, X)


def test_a_compiled_model_raises_and_then_goes_on():
    table = torch.nn.Embedding(4, 3)
    compiled = pt.compile(table, backend="xla")
    for index in (at(1, 3), at(1, 4), at(0, 2)):
        try:
            want = table(index)
        except IndexError:
            with pytest.raises(IndexError, match="out of range"):
                compiled(index)
        else:
            torch.testing.assert_close(compiled(index), want)


def test_a_failed_call_writes_to_no_argument():
    def write(x, i):
        x.add_(1)
        return x[i]

    x = X.clone()
    with pytest.raises(IndexError):
        pt.compile(write, backend="xla")(x, at(9))
    assert torch.equal(x, X)
