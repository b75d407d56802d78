"""What eager refuses is refused, by name and in a line or two; what eager takes is not."""

import pytest
import torch
import torch.nn.functional as F

import portable as pt
from portable.errors import InvalidInputError, LoweringError
from portable.testing import lowered

f32, f64, bf16, i32, i64 = torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64


def ones(*shape, dtype=f32):
    return torch.ones(shape, dtype=dtype)


REFUSED = {
    "mm of an integer": (torch.mm, ones(3, 3, dtype=i64), ones(3, 3)),
    "mm of float64": (torch.mm, ones(3, 3, dtype=f64), ones(3, 3)),
    "mm of many bfloat16": (torch.mm, ones(300, 300, dtype=bf16), ones(300, 300)),
    "a bias of another dtype": (F.linear, ones(2, 3), ones(4, 3), ones(4, dtype=f64)),
    "float64 in a float32 layer": (F.linear, ones(2, 3, dtype=f64), ones(4, 3), ones(4)),
    "a convolution of two dtypes": (F.conv2d, ones(1, 3, 40, 40), ones(16, 3, 7, 7, dtype=f64)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (3,), w), ones(2, 3), ones(3, dtype=f64)),
    "group_norm": (lambda x, w: F.group_norm(x, 3, w), ones(2, 3, 4), ones(3, dtype=f64)),
    "batch_norm": (
        lambda x, m, w: F.batch_norm(x, m, m, w, w),
        ones(2, 3, dtype=f64),
        ones(3, dtype=bf16),
        ones(3, dtype=bf16),
    ),
    "int32 classes": (F.cross_entropy, ones(2, 3), torch.zeros(2, dtype=i32)),
    "index_add": (lambda x, i, y: x.index_add(0, i, y), ones(2, 3), torch.zeros(2, dtype=i64), ones(2, 3, dtype=f64)),
    "a float as index": (lambda x, i: x.index_select(0, i), ones(3), ones(2)),
    "gather by int32 floats": (lambda x, i: x.gather(0, i), ones(3), ones(2)),
    "bits of a float": (torch.bitwise_and, ones(3), ones(3)),
    "a dimension of a scalar": (lambda x: torch.softmax(x, 3), ones()),
    "hardshrink of integers": (F.hardshrink, ones(3, dtype=i64)),
    "one_hot of a float": (lambda x: F.one_hot(x, 5), ones(2)),
    "another dtype as out": (lambda x, y: torch.mm(x, x, out=y), ones(2, 2), ones(2, 2, dtype=f64)),
    "covariance": (lambda x, w: torch.cov(x, fweights=w), ones(2, 3), ones(2, 3, dtype=i64)),
    "a part of another size": (lambda x, y: torch.slice_scatter(x, y, 0, 0, 9), ones(20, 20, 20), ones(20, 20)),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_eager_refuses_is_refused(call):
    function, *args = REFUSED[call]
    with pytest.raises((RuntimeError, IndexError, NotImplementedError)):
        function(*[x.clone() for x in args])
    with pytest.raises((RuntimeError, IndexError)) as caught:  # torch's own, where its shape propagation sees it
        lowered(function, *args)
    assert not isinstance(caught.value, LoweringError)


TAKEN = {
    "an index of int32": (lambda x, i: x.index_select(0, i), ones(3), torch.zeros(2, dtype=i32)),
    "a mask that selects as many": (
        lambda x, m, y: x.index_put((m,), y),
        torch.arange(4.0),
        torch.tensor([True, False, True, False]),
        ones(2),
    ),
    "repeats that add up": (
        lambda x, n: x.repeat_interleave(n, output_size=5),
        torch.arange(2.0),
        torch.tensor([2, 3]),
    ),
    "a positive definite matrix": (torch.linalg.cholesky, torch.eye(3) + 1),
    "an integer divisor": (lambda x, y: x // y, torch.arange(4), torch.tensor([1, 2, 3, 4])),
    "promotion": (torch.add, ones(3, dtype=i64), ones(3, dtype=bf16)),
    "float32 weights for bfloat16": (
        lambda x, w: F.layer_norm(x, (3,), w, w),
        ones(2, 3, dtype=bf16),
        ones(3),
    ),
}


@pytest.mark.parametrize("call", TAKEN)
def test_what_eager_takes_is_taken(call):
    function, *args = TAKEN[call]
    torch.testing.assert_close(lowered(function, *args), function(*args))


def test_the_error_names_op_dtypes_shapes_and_what_torch_says():
    def product(x, y):
        return x @ y

    with pytest.raises(InvalidInputError) as caught:
        pt.compile(product, backend="xla", dynamic=False)(ones(3, 2, dtype=i64), ones(2, 4))
    said = str(caught.value)
    assert said.startswith("aten.matmul.default at test_refusals.py:") and "in product" in said
    assert "(int64[3, 2], float32[2, 4])" in said and "same dtype" in said
    assert said.count("\n") <= 1


@pytest.mark.parametrize("backend", ["xla", "cpu"])
def test_an_input_of_the_wrong_size_is_one_short_error(backend, caplog):
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    with pytest.raises(InvalidInputError) as caught:
        pt.compile(model, backend=backend, dynamic=False)(ones(2, 8))
    said = str(caught.value)
    assert said.startswith("linear at test_refusals.py:") and "(float32[2, 4], float32[2, 5], float32[2])" in said
    assert said.count("\n") <= 1
    assert not [r for r in caplog.records if r.name == "torch._subclasses.fake_tensor"]


def test_sizes_that_are_symbols_are_told_with_those_of_the_call():
    compiled = pt.compile(lambda x: x @ ones(8, 2), backend="xla", dynamic=True)
    with pytest.raises(InvalidInputError, match=r"float32\[s\d+, s\d+\](.*)of a call with float32\[2, 7\]"):
        compiled(ones(2, 7))


def test_a_layer_of_torch_is_named_with_the_line_that_calls_the_model():
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 4))
    with pytest.raises(InvalidInputError, match=r"addmm.default at test_refusals.py:\d+, in .*, module 1 does"):
        pt.compile(model, backend="xla", dynamic=False)(ones(2, 8, dtype=f64))


def test_an_index_out_of_range_is_one_short_error():
    def third(x):
        return x[3]

    with pytest.raises(IndexError) as caught:
        pt.compile(third, backend="xla")(ones(2))
    assert isinstance(caught.value, InvalidInputError)
    assert "in third" in str(caught.value) and str(caught.value).count("\n") <= 1


def test_an_error_that_the_user_raises_is_the_users():
    def picky(x):
        raise ValueError("not today")

    with pytest.raises(ValueError, match="^not today$") as caught:
        pt.compile(picky, backend="xla")(ones(2))
    assert type(caught.value) is ValueError


def test_lengths_that_do_not_fill_the_axis_are_refused_when_the_program_runs():
    def total(x, lengths):
        return torch.segment_reduce(x, "sum", lengths=lengths)

    torch.testing.assert_close(lowered(total, ones(4), torch.tensor([1, 3])), torch.tensor([1.0, 3.0]))
    for lengths in ([1, 2], [5, -1]):
        with pytest.raises(RuntimeError, match="segment_reduce"):
            lowered(total, ones(4), torch.tensor(lengths))
