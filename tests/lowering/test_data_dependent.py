"""Ops whose result is a number, or as large as the data says, agree with eager in `lowered`.

It specialises on the data, and what the program computes itself is compared with what it was specialised on.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from portable.errors import SpecialisationError, UnsupportedOpError
from portable.lowering import specialise
from portable.testing import lowered

nan = math.nan
INTEGERS = torch.tensor([[1, 0, 2], [0, 0, 3], [1, 0, 2], [0, -1, 3]])
INPUTS = {
    "integers": INTEGERS,
    "bytes": INTEGERS.to(torch.uint8),
    "booleans": INTEGERS > 0,
    "NaN and zeros": torch.tensor([3.0, 1.0, nan, 1.0, nan, -0.0, 0.0, 3.0]),
    "doubles": torch.linspace(-1, 1, 6, dtype=torch.float64).round(),
    "half": INTEGERS.to(torch.bfloat16),
    "transposed": INTEGERS.t(),
    "empty": torch.zeros(0),
    "empty rows": torch.zeros(2, 0),
    "0-d": torch.tensor(2.0),
    "0-d zero": torch.tensor(0),
}
MASK = torch.tensor([[True, False, True], [False, False, True]])
X = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.0, -0.25]])


def same(got, want):
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w)
    elif isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True, check_stride=False)
    else:
        assert type(got) is type(want)
        assert got == want or (got != got and want != want)


def agrees(function, *args):
    def copies():
        return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]

    same(lowered(function, *copies()), function(*copies()))


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
def test_selections(x):
    agrees(
        lambda x: (
            torch.nonzero(x),
            torch.nonzero(x, as_tuple=True),
            torch.argwhere(x),
            torch.where(x > 0),
            x[x != 0],
            torch.masked_select(x, x == x),
            x.tolist(),
        ),
        x,
    )


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
def test_unique(x):
    def every(x):
        options = [(i, c) for i in (False, True) for c in (False, True)]
        return [
            f(x, return_inverse=i, return_counts=c)
            for f in (torch.unique, torch.unique_consecutive)
            for i, c in options
        ]

    agrees(every, x)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", ["integers", "bytes", "booleans", "half", "transposed"])
def test_unique_rows(name, dim):
    agrees(
        lambda x: (
            torch.unique(x, dim=dim, return_inverse=True, return_counts=True),
            torch.unique_consecutive(x, dim=dim, return_inverse=True, return_counts=True),
        ),
        INPUTS[name],
    )


def test_rows_with_nan_are_equal_to_none_and_have_no_order():
    rows = torch.tensor([[1.0, nan], [1.0, nan], [2.0, 0.0], [2.0, -0.0]])
    agrees(lambda x: torch.unique_consecutive(x, dim=0, return_counts=True), rows)
    with pytest.raises(UnsupportedOpError, match="aten.unique_dim.default.*NaN"):
        lowered(lambda x: torch.unique(x, dim=0), rows)


def test_many_nan_have_no_order_that_an_inverse_could_tell():
    x = torch.tensor([nan, 1.0, nan, 2.0] * 5)
    agrees(lambda x: torch.unique(x, return_counts=True), x)
    with pytest.raises(UnsupportedOpError, match="aten._unique2.default.*NaN"):
        lowered(lambda x: torch.unique(x, return_inverse=True), x)


def test_bincount():
    agrees(
        lambda x, w: (
            torch.bincount(x),
            torch.bincount(x, minlength=9),
            torch.bincount(x, w),
            torch.bincount(x, w.half(), 2),
            torch.bincount(x[:0]),
            torch.bincount(x[:0], w[:0], 3),
        ),
        torch.tensor([1, 5, 1, 0]),
        torch.tensor([0.5, 1.0, 2.0, 4.0]),
    )
    with pytest.raises(RuntimeError, match="non-negative"):
        lowered(torch.bincount, torch.tensor([1, -1]))


def test_repeats_and_classes():
    agrees(lambda x, r: (x.repeat_interleave(r, 1), torch.repeat_interleave(r)), X, torch.tensor([2, 0, 3]))
    agrees(lambda i: F.one_hot(i), torch.tensor([[1, 3], [0, 1]]))
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        lowered(torch.repeat_interleave, torch.tensor([1, -1]))


NUMBERS = {
    "item": lambda x, i: (x[0, 0].item(), (x > 0).all().item(), i[0].item(), float(x.max()), int(i.sum())),
    "equality": lambda x, i: (
        torch.equal(x, x),
        torch.equal(x, x[:1]),
        torch.equal(i, i + 1),
        torch.equal(x, x.double()),
    ),
    "nan is not equal": lambda x, i: torch.equal(x * nan, x * nan),
    "closeness": lambda x, i: (
        torch.allclose(x, x + 1e-9),
        torch.allclose(x, -x),
        torch.allclose(x * nan, x, equal_nan=True),
    ),
    "branch": lambda x, i: x + 1 if x.sum() > 0 else x - 1,
    "loop": lambda x, i: [x := x * 2 for _ in range(i[0])][-1],
    "size": lambda x, i: torch.zeros(int(i[0]), i[1].item()) + torch.arange(i[1].item()),
    "split": lambda x, i: torch.split(x, i.tolist(), 1),
    "tensor_split": lambda x, i: (torch.tensor_split(x, i, 1), torch.tensor_split(x, i[0])),
    "narrow": lambda x, i: torch.narrow(x, 1, i[0], 2),
    "select": lambda x, i: x[:, i[0]],
    "combinations": lambda x, i: torch.combinations(i, 2, with_replacement=True),
    "before and after a write": lambda x, i: (x.sum().item(), x.add_(1), x.sum().item(), x[x > 1]),
    "a constant": lambda x, i: (torch.tensor([3, 4])[torch.tensor([False, True])].item(), x[0][torch.tensor(1)]),
    "a tensor from outside": lambda x, i: (x[MASK], MASK.sum().item(), torch.nonzero(MASK)),
    "loss": lambda x, i: F.gaussian_nll_loss(x, x * 2, x * x),
}


@pytest.mark.parametrize("function", NUMBERS.values(), ids=NUMBERS)
def test_numbers(function):
    agrees(function, X, torch.tensor([1, 2]))


def test_indexing_by_several_masks():
    def write(x, m, i):
        x[m[:, 0], i] = 7.0
        x[:, m[0]] *= 2
        return x

    agrees(
        lambda x, m, i: (x[m[:, 2], m[0]], x[m[:, 0], i], x[..., m[1]], x[None, m], write(x, m, i)),
        X,
        MASK,
        torch.tensor(1),
    )
    with pytest.raises(IndexError, match="shape of the mask"):
        lowered(lambda x, m: x[m], X, MASK[:, :2])


GRADIENTS = {
    "masked_select": torch.masked_select,
    "by mask": lambda x, m: x[m] * x[0, 0].item(),
    "by mask of columns": lambda x, m: x[:, m[0]],
    "write by mask": lambda x, m: (x * 1).index_put((m,), x[0]),
    "write by mask and index": lambda x, m: (x * 1).index_put((m[:, 0], torch.tensor([1])), x[0, :1]),
    "nonzero": lambda x, m: x[torch.nonzero(x[0] > 0).squeeze(1) % 2],
    "repeats": lambda x, m: x.repeat_interleave(m.sum(1), 0),
    "branch": lambda x, m: x * 2 if x.sum() > 0 else x * 3,
}


def gradient(function):
    def run(x, *args):
        x = x.detach().requires_grad_()
        y = function(x, *args)
        return y, torch.autograd.grad(y, x, torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape))

    return run


@pytest.mark.parametrize("function", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients(function):
    agrees(gradient(function), X, MASK)


LABELS = torch.tensor([[1, 2, 2, 4], [2, 2, 2, 2], [3, 1, 0, 0], [1, 4, 3, 2]])
CTC = {
    "mean": (LABELS, [12, 12, 5, 3], [4, 3, 2, 0], {}),
    "sum": (LABELS, [12, 12, 5, 3], [4, 3, 2, 0], {"reduction": "sum"}),
    "impossible": (LABELS, [12, 1, 0, 0], [4, 3, 2, 0], {"reduction": "none"}),
    "impossible is zero": (LABELS, [12, 1, 0, 0], [4, 3, 2, 0], {"reduction": "none", "zero_infinity": True}),
    "another blank": (LABELS, [12, 12, 5, 3], [4, 3, 2, 0], {"blank": 4}),
    "blanks among the labels": (LABELS, [12, 12, 9, 3], [4, 3, 4, 0], {"reduction": "none"}),
    "in one row": (torch.tensor([1, 2, 2, 4, 2, 2, 2, 3, 1]), [12, 12, 5, 3], [4, 3, 2, 0], {}),
    "no labels": (LABELS, [12, 12, 5, 3], [0, 0, 0, 0], {}),
}


@pytest.mark.parametrize("lengths", [list, torch.tensor], ids=["list", "tensor"])
@pytest.mark.parametrize("case", CTC.values(), ids=CTC)
def test_connectionist_temporal_classification(case, lengths):
    labels, inputs, targets, options = case
    x = torch.randn(12, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    agrees(gradient(lambda x, t, i, n: F.ctc_loss(x, t, i, n, **options)), x, labels, lengths(inputs), lengths(targets))


@pytest.mark.parametrize("function", [lambda x: torch.rand(3).sum().item(), lambda x: x[F.dropout(x) > 0]])
def test_what_depends_on_random_numbers_is_refused(function):
    with pytest.raises(UnsupportedOpError, match=r"aten\.(_local_scalar_dense|nonzero|index).*random numbers"):
        lowered(function, X)


def test_a_number_is_the_programs_own_where_eager_rounds_otherwise():
    x = torch.randn(10007, generator=torch.Generator().manual_seed(0))

    def both(x):
        total = x.exp().sum()
        return total.item(), total, x.new_full((1,), total.item())

    number, total, used = lowered(both, x)
    assert number == total.item() == used.item()


@pytest.mark.parametrize(("wrong", "function"), [(2, lambda x: x[x > 0]), (True, lambda x: x if x.sum() > 9 else -x)])
def test_another_size_or_branch_than_the_program_computes_raises_by_name(monkeypatch, wrong, function):
    monkeypatch.setattr(specialise.Specialisation, "_evaluated_number", lambda self, x: wrong)
    with pytest.raises(SpecialisationError, match=rf"aten\.\w+\.\w+.* specialised on {wrong}, and computes (3|False)"):
        lowered(function, X)


def test_a_number_that_the_program_never_agrees_with_raises_by_name(monkeypatch):
    monkeypatch.setattr(specialise.Specialisation, "rounded", lambda self, computed: {0: 2.0})
    monkeypatch.setattr(specialise.Specialisation, "_evaluated_number", lambda self, x: 2.0)
    with pytest.raises(SpecialisationError, match=r"_local_scalar_dense.*specialised on 2.0, and computes 4.25"):
        lowered(lambda x: x.sum().item(), X)


def test_arguments_and_the_generator_are_as_after_one_call():
    x = X.clone()
    torch.manual_seed(3)
    lowered(lambda x: x.add_(x.exp().sum().item()) + torch.rand(3), x)
    after = torch.rand(1)
    torch.manual_seed(3)
    lowered(lambda x: x + torch.rand(3), X)
    assert torch.equal(after, torch.rand(1))
    torch.testing.assert_close(x, X + X.exp().sum())
