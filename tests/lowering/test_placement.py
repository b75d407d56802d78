"""What a compiled model returns has the strides, offsets and sharing that eager's has."""

import pytest
import torch

import portable as pt
from portable.errors import UnsupportedInputError, UnsupportedOpError, UnsupportedOutputError
from portable.lowering.placement import Place, overlapping
from portable.testing import lowered


def _half(x):
    return x[x.shape[0] // 2 :]


def _same_place(found, wanted):
    assert torch.equal(found, wanted)
    assert (found.stride(), found.storage_offset()) == (wanted.stride(), wanted.storage_offset())


def _each(outputs):
    return outputs if isinstance(outputs, tuple | list) else (outputs,)


PROGRAMS = {
    "slice": _half,
    "chunk": lambda x: x.chunk(2),
    "narrow": lambda x: x.narrow(0, 1, x.shape[0] - 1),
    "select of a view": lambda x: x.view(2, -1)[1],
    "tensor_split": lambda x: x.tensor_split(2)[1],
    "transpose of an argument": lambda x: x.t(),
    "as_strided": lambda x: x.as_strided((2,), (1,), x.shape[0] // 2),
    "windows of an argument": lambda x: x.unfold(0, 2, 1),
    "bits of an argument": lambda x: x.view(torch.int32)[1:],
    "expanded argument": lambda x: x[:1].expand(x.shape[0], 3),
    "transpose": lambda x: (x + 1).t(),
    "expanded": lambda x: (x + 1)[:1].expand(x.shape[0], 3),
    "every second row": lambda x: (x + 1)[::2],
    "windows": lambda x: (x + 1).unfold(0, 2, 1),
    "part with its whole": lambda x: (lambda y: (y, _half(y), y.t()))(x * 2),
    "channels last": lambda x: x.reshape(1, x.shape[0], 3, 1).add(1).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("dynamic", [None, True, False], ids=["automatic", "dynamic", "static"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_outputs_lie_in_memory_as_in_eager(program, dynamic):
    compiled = pt.compile(program, backend="xla", dynamic=dynamic)
    for rows in (4, 6, 8):
        x = torch.arange(3.0 * rows).view(rows, 3)
        for found, wanted in zip(_each(compiled(x.clone())), _each(program(x)), strict=True):
            _same_place(found, wanted)


@pytest.mark.parametrize("dynamic", [None, True, False], ids=["automatic", "dynamic", "static"])
def test_a_view_of_a_part_of_a_tensor_begins_where_eagers_does(dynamic):
    compiled = pt.compile(lambda x: (_half(x), x.t(), (x + 1).t()), backend="xla", dynamic=dynamic)
    base = torch.arange(77.0).view(7, 11)
    for x in (base, base[:, 2:5], base[1:, 2:8], base.t(), base[1:4, ::2]):
        for found, wanted in zip(compiled(x), (_half(x), x.t(), (x + 1).t()), strict=True):
            _same_place(found, wanted)


@pytest.mark.parametrize("view", [lambda x: _half(x.conj()), lambda x: _half(x.conj().imag)], ids=["conj", "neg"])
def test_a_conjugated_view_of_an_argument_is_exact_or_refused(view):
    x = torch.randn(6, dtype=torch.complex64)
    assert torch.equal(pt.compile(view, backend="xla", dynamic=False)(x), view(x))
    with pytest.raises(UnsupportedOutputError, match="conjugated or negated view"):
        pt.compile(view, backend="xla", dynamic=True)(x)
    both = lambda x: (lambda y: (y, view(y)))(x * 2)  # noqa: E731
    with pytest.raises(UnsupportedOutputError, match="conjugated or negated view"):
        pt.compile(both, backend="xla", dynamic=True)(x)
    copied = pt.compile(lambda x: view(x).clone(), backend="xla", dynamic=True)
    assert torch.equal(copied(x), view(x))


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_a_write_through_a_returned_view_writes_to_the_argument(dynamic):
    compiled = pt.compile(_half, backend="xla", dynamic=dynamic)
    compiled(torch.ones(6))
    x = torch.ones(8)
    compiled(x).zero_()
    assert x.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_a_view_of_an_argument_that_was_written_to(dynamic):
    def doubled(x):
        x.mul_(2)
        return _half(x)

    compiled = pt.compile(doubled, backend="xla", dynamic=dynamic)
    for n in (4, 6, 8):
        x = torch.arange(float(n))
        half = compiled(x)
        _same_place(half, _half(2 * torch.arange(float(n))))
        half.zero_()
        assert x.tolist() == [*range(0, n, 2), *[0] * (n // 2)]


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_gradients_through_views_and_writes_to_outputs(dynamic):
    def program(x):
        y = x * 2
        return _half(x), y, _half(y).t(), (x * 3).t()

    def gradient(function, rows):
        x = torch.arange(3.0 * rows).view(rows, 3).requires_grad_()
        outputs = function(x)
        outputs[3].mul_(2)
        sum((i + 1) * (out * out).sum() for i, out in enumerate(outputs)).backward()
        return x.grad

    compiled = pt.compile(program, backend="xla", dynamic=dynamic)
    for rows in (4, 6):
        assert torch.equal(gradient(compiled, rows), gradient(program, rows))


def test_strides_hold_over_a_graph_break():
    def flat(x):
        y = (x + 1).t()
        torch._dynamo.graph_break()
        return y.t().view(-1), y.is_contiguous()

    found, contiguous = pt.compile(flat, backend="xla")(torch.ones(2, 3))
    assert torch.equal(found, torch.full((6,), 2.0))
    assert not contiguous


@pytest.mark.parametrize(
    ("place", "order"),
    [
        (Place((2, 3), (3, 1), 0), [0, 1]),
        (Place((2, 3), (1, 2), 0), [1, 0]),
        (Place((2, 3, 4), (4, 0, 1), 0), [0, 2, 1]),
        (Place((2, 3), (4, 1), 0), None),  # a gap
        (Place((2, 3), (1, 1), 0), None),  # an overlap
        (Place((2, 3), (3, 1), 1), None),
    ],
)
def test_memory_without_gaps_has_an_order(place, order):
    assert place.order() == order


def test_a_copy_has_the_strides_and_elements_where_memory_overlaps_or_has_gaps():
    for place in (Place((2, 3), (1, 1), 2), Place((2, 3), (8, 2), 1), Place((2, 2), (0, 1), 3)):
        wanted = torch.arange(40.0).as_strided(place.size, place.stride, place.offset)
        _same_place(place.copy(wanted.contiguous()), wanted)


OVERLAPS = {
    "the same": (lambda x: (x, x), True),
    "without history": (lambda x: (x, x.detach()), True),
    "parts": (lambda x: (x[:8], x[6:]), True),
    "transposed": (lambda x: (x.view(3, 4), x.view(3, 4).t()), True),
    "other bits": (lambda x: (x, x.view(torch.int32)), True),
    "halves": (lambda x: (x[:6], x[6:]), False),
    "even and odd": (lambda x: (x[::2], x[1::2]), False),
    "columns": (lambda x: (x.view(3, 4)[:, :2], x.view(3, 4)[:, 2:]), False),
    "empty": (lambda x: (x, x[:0]), False),
    "other memory": (lambda x: (x, x.clone()), False),
}


@pytest.mark.parametrize(("parts", "overlap"), OVERLAPS.values(), ids=OVERLAPS)
def test_tensors_overlap_where_they_share_an_element(parts, overlap):
    tensors = parts(torch.arange(12.0))
    assert [overlapping(tensors, [written]) for written in (0, 1)] == [overlap, overlap]
    assert not overlapping(tensors, [])


def _zeroed(a, b):
    b.zero_()
    return a.sum()


def test_lowered_refuses_a_write_to_arguments_that_overlap():
    x = torch.arange(12.0)
    with pytest.raises(UnsupportedInputError, match="overlap"):
        lowered(_zeroed, x[:8], x[6:])
    assert torch.equal(x, torch.arange(12.0))
    assert lowered(lambda a, b: a.sum() + b.sum(), x[:8], x[6:]) == 28 + 51
    assert lowered(_zeroed, x[::2], x[1::2]) == 30
    assert x.tolist() == [0, 0, 2, 0, 4, 0, 6, 0, 8, 0, 10, 0]


def test_a_program_for_arguments_that_do_not_overlap_refuses_those_that_do():
    compiled = pt.compile(_zeroed, backend="xla")
    assert compiled(torch.ones(8), torch.ones(8)) == 8
    x = torch.arange(16.0)
    with pytest.raises(UnsupportedInputError, match="overlap"):
        compiled(x[:8], x[4:12])
    assert torch.equal(x, torch.arange(16.0))
    assert compiled(x[::2], x[1::2]) == 56


CHANGES = {
    "shape": lambda x: x.unsqueeze_(0),
    "strides": lambda x: x.t_(),
    "size": lambda x: x.resize_(2, 3),
    "memory": lambda x: x.set_(torch.ones(5)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_lowered_refuses_to_make_another_tensor_of_an_argument(change):
    with pytest.raises(UnsupportedOpError, match="changes the shape, strides or memory of an argument"):
        lowered(change, torch.ones(3, 2))
