"""Control flow agrees with eager: cond, while_loop, scan and map in one program, with their checks and gradients."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_rows

import portable
from portable.errors import UnsupportedOpError
from portable.testing import lowered

X = torch.linspace(-1, 2, 12).reshape(3, 4)


def compiled(function):
    torch._dynamo.reset()
    return portable.compile(function, backend="xla", fullgraph=True)


def agrees(function, *cases):
    run = compiled(function)
    for args in cases:
        torch.testing.assert_close(run(*args), function(*args))
    return run


def gradients(function, *args):
    leaves = [a.detach().clone().requires_grad_() for a in args]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    total = sum((o * torch.linspace(0.5, 1.5, o.numel()).reshape(o.shape)).sum() for o in outputs)
    return torch.autograd.grad(total, leaves)


def gradients_agree(function, *cases):
    run = compiled(function)
    for args in cases:
        torch.testing.assert_close(gradients(run, *args), gradients(function, *args))


def either(x):
    return torch.cond(x.sum() > 0, torch.sin, lambda x: x * 2, (x,))


def test_cond_takes_the_branch_that_the_data_names():
    run = agrees(either, (X,), (-X,))
    ops = portable.explain(run).ops
    assert ops["higher_order.cond"] == ops["aten.sin.default"] == ops["aten.mul.Tensor"] == {"lowered": 1}


def test_nested_cond():
    def nested(x):
        def inner(x):
            return torch.cond(x.max() > 1, lambda x: (x + 1, x.sum()), lambda x: (x - 1, x.prod()), (x,))

        return torch.cond(x.sum() > 0, inner, lambda x: (x.cos(), x.min()), (x,))

    agrees(nested, (X,), (X.abs() / 9,), (-X,))


def test_a_number_out_of_a_cond():
    agrees(lambda x: torch.cond(x.sum() > 0, lambda x: (x.sin(), 3), lambda x: (x.cos(), 4), (x,)), (X,), (-X,))


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.left(x).relu(), lambda x: self.right(x) + self.left.bias, (x,))


@pytest.mark.parametrize("x", [X, -X], ids=["true", "false"])
def test_branches_close_over_parameters_that_train(x):
    torch.manual_seed(0)
    model = Gated()
    run = compiled(model)
    torch.testing.assert_close(run(x), model(x))
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(torch.autograd.grad(run(x).square().sum(), list(model.parameters())), want)


def test_gradients_through_cond():
    def function(x, w):
        return torch.cond(x.sum() > 0, lambda x: (x * w).sin(), lambda x: x.cos() / w, (x,))

    gradients_agree(function, (X, torch.rand(4) + 1), (-X, torch.rand(4) + 1))


def test_while_loop_with_a_tensor_counter():
    def function(n, x):
        return while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x * 2 + i), (torch.zeros((), dtype=torch.int64), x))

    agrees(function, (torch.tensor(5), X), (torch.tensor(0), X))


def test_while_loop_with_a_carried_integer():
    def function(x):
        return while_loop(lambda i, x: i < 7, lambda i, x: (i + 2, x * 2 + i), (1, x))

    run = agrees(function, (X,))
    assert type(run(X)[0]) is int


def test_a_cond_in_a_while_loop():
    def body(i, x):
        return i + 1, torch.cond(x.sum() > 3, lambda x: x / 2, lambda x: x * 3, (x,))

    agrees(lambda x: while_loop(lambda i, x: i < 6, body, (torch.tensor(0), x)), (X,), (X.abs(),))


def rows_until(n, x):
    return while_loop(lambda i, a: i < n.sum(), lambda i, a: (i + 1, a + x[i]), (0, torch.zeros(4)))[1]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_scan_and_its_gradients(dim, reverse):
    def function(start, x, w):
        def combine(carry, row):
            return (carry + row) * w, carry * row

        return scan(combine, start, x, dim=dim, reverse=reverse)

    args = torch.rand(X.shape[1 - dim]), X, torch.rand(X.shape[1 - dim])
    agrees(function, args)
    gradients_agree(function, args)


def test_map_and_its_gradients():
    def function(x, w):
        return map_rows(lambda row, w: (row * w).sin(), x, w)

    agrees(function, (X, torch.rand(4)))
    gradients_agree(function, (X, torch.rand(4)))


def test_kernels_with_threads_of_their_own_run_in_turn_across_branches_and_loops():
    def function(x):
        x = torch.cond(x.sum() > 0, lambda x: x.cumsum(1) + 1, lambda x: x.cos(), (x,)).cumsum(1)
        total, rows = scan(lambda c, row: (c + row.cumsum(0), row.cumsum(0) * 2), torch.zeros(4), x)
        start = torch.zeros(1, dtype=torch.int64)
        _, x = while_loop(lambda i, x: (i.cumsum(0) < 3).all(), lambda i, x: (i + 1, x.cumsum(1) / 2), (start, rows))
        return x.cumsum(1), total

    torch._dynamo.reset()
    run = portable.compile(function, backend="xla", fullgraph=True, kernels="aten.cumsum.default=aten")
    for x in (X, -X):
        torch.testing.assert_close(run(x), function(x))
    assert portable.explain(run).ops["aten.cumsum.default"] == {"kernel aten": 7}


@pytest.mark.parametrize("n", [3, 5])
def test_branches_of_symbolic_sizes(n):
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: torch.cat([x, x]).sum(0) + x.shape[0], lambda x: x.sum(0), (x,))

    torch._dynamo.reset()
    run = portable.compile(function, backend="xla", fullgraph=True, dynamic=True)
    torch.testing.assert_close(run(torch.ones(n, 2)), function(torch.ones(n, 2)))


def row_of(x, i):
    return torch.cond(x.sum() > 0, lambda x, i: x[i].sin(), lambda x, i: x[:2].cos(), (x, i))


def test_a_check_in_a_branch_raises_only_where_the_branch_runs():
    run = agrees(row_of, (X, torch.tensor([1, 2])), (-X, torch.tensor([1, 7])))
    with pytest.raises(IndexError):
        run(X, torch.tensor([1, 7]))


def test_a_check_in_a_scan_raises_in_any_iteration():
    def function(x, places):
        return scan(lambda carry, i: (carry + x[i], carry.clone()), torch.zeros(1, 4), places)

    run = agrees(function, (X, torch.tensor([[0], [2], [1]])))
    with pytest.raises(IndexError):
        run(X, torch.tensor([[0], [3], [1]]))


def test_a_check_in_a_while_loop_raises_in_any_iteration():
    run = agrees(rows_until, (torch.tensor([3]), X), (torch.tensor([0]), X))
    with pytest.raises(IndexError):
        run(torch.tensor([5]), X)


def test_random_numbers_differ_in_each_iteration_and_repeat_with_the_seed():
    def function(x):
        rows = map_rows(lambda row: row * 0 + torch.rand(4), x)
        _, last = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.rand(3, 4)), (torch.tensor(0), x.clone()))
        return rows, last

    run = compiled(function)
    torch.manual_seed(0)
    rows, last = run(X)
    assert len({*rows.flatten().tolist(), *last.flatten().tolist()}) == 24
    assert rows.min() >= 0
    torch.manual_seed(0)
    assert all(map(torch.equal, run(X), (rows, last)))


def inverse(x):
    return torch.linalg.inv(x).contiguous()


REFUSED = {
    "an error that the capture loses": (
        lambda x: torch.cond(x.sum() > 0, inverse, torch.cos, (x[:, :3].contiguous(),)),
        "higher_order.with_effects",
    ),
    "random where a gradient is wanted": (
        lambda x: torch.cond(x.sum() > 0, lambda x: torch.nn.functional.dropout(x), torch.cos, (x,)),
        "native_dropout",
    ),
    "the gradient of a while loop": (
        lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x))[1],
        "while_loop_stack_output",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    function, op = REFUSED[name]
    x = X.clone().requires_grad_("capture" not in name)
    with pytest.raises(UnsupportedOpError, match=op):
        compiled(function)(x)


def test_a_single_program_refuses_control_flow():
    with pytest.raises(UnsupportedOpError, match=r"higher_order\.cond"):
        lowered(either, X)


@pytest.mark.parametrize("bad", [(), (0,), (2,), (3,)])
def test_checks_in_nested_branches_and_loops_reach_the_caller(bad):
    """Row 3 of ``places`` is not read, since the branch around it does not run."""

    def function(x, places):
        def read(total, row):
            return total + x[row.reshape(1)].sum(), total.clone()

        def body(i, total):
            rows = places[i]
            return i + 1, torch.cond(
                i < 3, lambda t, r: scan(read, t, r)[0], lambda t, r: t + r.sum() * 0, (total, rows)
            )

        return while_loop(lambda i, t: i < 4, body, (0, x.sum()))[1]

    places = torch.arange(8).reshape(4, 2) % 3
    places[list(bad), 1] = 3
    run = compiled(function)
    if bad in ((), (3,)):
        torch.testing.assert_close(run(X, places), function(X, places))
    else:
        with pytest.raises(IndexError):
            run(X, places)
