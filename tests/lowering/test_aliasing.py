"""Writes through views, and what reads strides after them: equal to eager in values, strides and memory, or refused."""

import pytest
import torch

import portable as pt
from portable.errors import PortableError, UnsupportedOpError
from portable.testing import lowered
from tests.conformance.aliasing import Program, copied, difference, layouts


def _compiled(f, *args):
    torch._dynamo.reset()  # else another layout of the same function is a change of its sizes
    return pt.compile(f, backend="xla", fallback="error")(*args)


WAYS = {"lowered": lowered, "compiled": _compiled}


def memory(x):
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())


def check(way, program, x):
    """'' if the program gives what eager gives and leaves the same memory; else how they differ."""
    expected, given = copied(x), copied(x)
    want = program(expected)
    have = WAYS[way](program, given)
    pairs = [*zip(want, have, strict=True), (memory(expected), memory(given))]
    return "".join(difference(w, h) for w, h in pairs)


def _read_after_a_write(x):
    x.add_(1)
    return [torch.as_strided_copy(x, (3,), (x.stride(-1),)), x]


def _strided_view_from_before(x):
    view = x.as_strided((3,), (x.stride(-1),))
    x.mul_(2)
    return [view + 1, x]


def _result_of_a_matrix_write(x):
    x.copy_(torch.ones_like(x).cumsum(0))
    return [x * 2, x.stride(-1) + x[0]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["row-major", "transposed", "stepped", "offset", "stepped line"])
@pytest.mark.parametrize("program", [_read_after_a_write, _strided_view_from_before, _result_of_a_matrix_write])
def test_a_tensor_that_was_written_to_lies_where_it_lay(way, layout, program):
    assert check(way, program, layouts()[layout]) == ""


def _add_matrices(x):
    x.addmm_(torch.ones(4, 3), torch.ones(3, 6))
    return [x * 2, x]


@pytest.mark.parametrize("way", WAYS)
def test_the_strides_of_a_write_are_not_those_of_the_op_that_computes_it(way):
    assert check(way, _add_matrices, layouts()["transposed"]) == ""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda x: x.unfold(1, 2, 4).mul_(-3), "through an unfold view"),
        (lambda x: x.unfold(1, 4, 4)[0].zero_(), "through an unfold view"),  # 6 columns: two are in no window
        (lambda x: x.unfold(1, 3, 1).add_(1), "of which elements share memory"),
        (lambda x: x[:1].expand(3, 6).index_fill_(0, torch.tensor([0]), 1.0), "of which elements share memory"),
        (lambda x: x.view(-1).as_strided((2,), (3,)).add_(1), "an as_strided view of a view"),
    ],
)
def test_a_write_that_functionalisation_gets_wrong_is_refused_by_name(way, write, reason):
    with pytest.raises(UnsupportedOpError, match=reason):
        WAYS[way](write, torch.arange(24.0).reshape(4, 6))


@pytest.mark.parametrize("way", WAYS)
def test_a_write_through_windows_that_leave_nothing_out_is_exact(way):
    assert check(way, lambda x: [x.unfold(1, 2, 2).mul_(-3), x], layouts()["row-major"]) == ""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True)])
def test_dropout_that_drops_nothing_gives_its_argument_itself(way, p, training):
    def program(x):
        y = torch.nn.functional.dropout(x, p, training)
        return [y.add_(1), x]

    assert check(way, program, layouts()["stepped"]) == ""


def verdict(way, seed):
    """ "refused", or how a random program differs from eager."""
    program = Program(seed)
    try:
        return check(way, lambda x: program(x), program.input)
    except PortableError:
        return "refused"


@pytest.mark.parametrize("way", WAYS)
def test_random_programs_of_views_and_writes_are_exact_or_refused(way):
    verdicts = {seed: verdict(way, seed) for seed in range(12)}
    wrong = {Program(seed): how for seed, how in verdicts.items() if how not in ("", "refused")}
    assert not wrong
    assert [*verdicts.values()].count("refused") < len(verdicts) / 2


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_thousand_random_programs_of_views_and_writes_are_exact_or_refused(way):
    found = {seed: verdict(way, seed) for seed in range(1000)}
    assert not {Program(seed): how for seed, how in found.items() if how not in ("", "refused")}
