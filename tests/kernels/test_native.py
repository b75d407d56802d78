"""Kernels of torch tensors on the native path: found in Inductor's graph, fused around, right in training."""

import re

import pytest
import torch

import portable as pt
from portable import ops
from portable.errors import KernelError, RegistrationError
from portable.kernels import substitution

LOG_SOFTMAX = "aten._log_softmax.default"  # Inductor decomposes it
CUMSUM = "aten.cumsum.default"  # Inductor does not
X, W = torch.randn(4, 8), torch.randn(8)


@pytest.fixture
def calls():
    return []


@pytest.fixture
def rms_norm(kernel, calls):
    @kernel("rms_norm", provider="doubled", backends=("cpu",))
    def rms_norm(x, weight, eps):
        calls.append(tuple(x.shape))
        return 2 * ops.rms_norm.reference(x, weight, eps)


@pytest.fixture
def log_softmax(kernel, calls):
    @kernel(LOG_SOFTMAX, provider="noted", backends=("cpu",), accepts=lambda x, dim, half: x.shape[-1] < 100)
    def log_softmax(self, dim, half_to_float):
        calls.append(tuple(self.shape))
        return torch.log_softmax(self, dim)


@pytest.fixture
def cumsum(kernel, calls):
    @kernel(CUMSUM, provider="noted", backends=("cpu",))
    def cumsum(self, dim, *, dtype=None):
        calls.append(tuple(self.shape))
        return torch.cumsum(self, dim, dtype=dtype)


def run(function, *args, backend="cpu", **options):
    compiled = pt.compile(function, backend=backend, **options)
    with torch.no_grad():
        return compiled, compiled(*args)


def rows(compiled, op):
    return [(r.n, r.runs_as, r.why) for r in pt.explain(compiled, show=False).decisions[op]]


def block(x, w):
    return pt.ops.rms_norm(x * 3, w).relu() + 1


@pytest.mark.parametrize("backend", ["cpu", "cpu:eager"])
def test_a_portable_op_runs_as_its_kernel(rms_norm, calls, backend):
    compiled, got = run(block, X, W, backend=backend, kernels="rms_norm=doubled")
    torch.testing.assert_close(got, 2 * ops.rms_norm(X * 3, W).relu() + 1)
    assert calls == [(4, 8)]
    assert rows(compiled, "rms_norm") == [(1, "kernel doubled", "named by PORTABLE_KERNELS")]
    assert list(pt.explain(compiled, show=False).units) == [("rms_norm", "float32[4,8] float32[8] 1e-06")]


def test_everything_around_a_kernel_is_fused(rms_norm):
    from torch._inductor.utils import run_and_get_code

    compiled = pt.compile(block, backend="cpu", kernels="rms_norm=doubled")
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, X, W)
    assert len(re.findall(r"= torch\.ops\.portable_kernel\.rms_norm_doubled\w*\.default\(", code)) == 1
    assert code.count("async_compile.cpp_pybinding(") == 2  # x * 3 before it, relu and + 1 after it


def test_without_a_decision_the_graph_has_neither_kernel_nor_wall(rms_norm, log_softmax, cumsum, calls):
    compiled, got = run(lambda x, w: torch.log_softmax(block(x, w), -1), X, W)
    torch.testing.assert_close(got, torch.log_softmax(block(X, W), -1))
    assert calls == []
    assert set(pt.explain(compiled, show=False).ops) == set(
        pt.explain(run(lambda x, w: torch.log_softmax(block(x, w), -1), X, W, kernels="off")[0], show=False).ops
    )
    assert not any("rms_norm" in op or "log_softmax" in op for op in pt.explain(compiled, show=False).ops)


def test_the_ledger_s_decision_runs_and_other_signatures_are_decomposed(log_softmax, rms_norm, calls, decide):
    decide(LOG_SOFTMAX, "float32[4,8] -1 False", "cpu", "noted")
    decide("rms_norm", "float32[4,8] float32[8] 1e-06", "cpu", "doubled")

    def both(x, y, w):
        return tuple(torch.log_softmax(pt.ops.rms_norm(v, w), -1) for v in (x, y))

    other = torch.randn(5, 8)
    compiled, got = run(both, X, other, W)
    want = torch.log_softmax(2 * ops.rms_norm(X, W), -1), torch.log_softmax(ops.rms_norm(other, W), -1)
    torch.testing.assert_close(got, want)
    assert calls == [(4, 8), (4, 8)]
    assert rows(compiled, LOG_SOFTMAX) == [
        (1, "kernel noted", "kernel 1.02× [1.00, 1.05]"),
        (1, "native", "unmeasured on this machine"),
    ]
    targets = pt.explain(compiled, show=False).ops
    assert targets[LOG_SOFTMAX] == {"kernel noted": 1}
    assert "portable.rms_norm.default" not in targets


def test_training_uses_the_kernel_forward_and_torch_s_gradient(log_softmax, calls):
    layer = torch.nn.Linear(8, 8)

    def loss(x):
        return torch.log_softmax(layer(x), -1)[:, 0].mean()

    want = torch.autograd.grad(loss(X), list(layer.parameters()))
    compiled = pt.compile(loss, backend="cpu", kernels=f"{LOG_SOFTMAX}=noted")
    got = torch.autograd.grad(compiled(X), list(layer.parameters()))
    torch.testing.assert_close(got, want)
    assert calls == [(4, 8)]
    kinds = [c.kind for c in pt.explain(compiled, show=False).compiles]
    assert kinds == ["forward", "backward"]


def test_training_through_a_portable_op_s_kernel_has_the_reference_s_gradient(rms_norm, calls):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    compiled = pt.compile(pt.ops.rms_norm, backend="cpu", kernels="rms_norm=doubled")
    got = torch.autograd.grad(compiled(x, w), (x, w), torch.ones_like(x))
    want = torch.autograd.grad(ops.rms_norm(x, w), (x, w), torch.ones_like(x))
    torch.testing.assert_close(got, want)
    assert calls == [(4, 8)]


def test_an_op_that_inductor_does_not_decompose_is_found_too(cumsum, calls):
    _, got = run(lambda x: torch.cumsum(x, 1) * 2, X, kernels=f"{CUMSUM}=noted")
    torch.testing.assert_close(got, torch.cumsum(X, 1) * 2)
    assert calls == [(4, 8)]


def test_a_kernel_sees_each_size_of_a_dynamic_graph(cumsum, calls):
    compiled = pt.compile(lambda x: torch.cumsum(x, 1), backend="cpu", dynamic=True, kernels=f"{CUMSUM}=noted")
    with torch.no_grad():
        for rows_ in (3, 5, 7):
            x = torch.randn(rows_, 6)
            torch.testing.assert_close(compiled(x), torch.cumsum(x, 1))
    assert calls == [(3, 6), (5, 6), (7, 6)]
    assert len(pt.explain(compiled, show=False).compiles) == 1
    assert pt.explain(compiled, show=False).units == {}


def test_a_predicate_on_a_symbolic_size_refuses_instead_of_specialising(log_softmax, calls):
    compiled = pt.compile(
        lambda x: torch.log_softmax(x, -1), backend="cpu", dynamic=True, kernels=f"{LOG_SOFTMAX}=noted"
    )
    with torch.no_grad():
        for size in (4, 200):
            x = torch.randn(3, size)
            torch.testing.assert_close(compiled(x), torch.log_softmax(x, -1))
    (row,) = pt.explain(compiled, show=False).decisions[LOG_SOFTMAX]
    assert calls == []
    assert len(pt.explain(compiled, show=False).compiles) == 1
    assert row.runs_as == "native"
    assert "predicate" in row.why


def test_a_kernel_of_jax_values_is_rejected_with_the_reason(kernel):
    @kernel("rms_norm", provider="jaxy", backends=("cpu",), abi="jax")
    def rms_norm(x, weight, eps):
        return x

    compiled, got = run(block, X, W, kernels="rms_norm=jaxy")
    torch.testing.assert_close(got, block(X, W))
    (row,) = pt.explain(compiled, show=False).decisions["rms_norm"]
    assert row.rejected == (("rms_norm/jaxy", 'the native path takes kernels with abi="torch", it has "jax"'),)


def test_the_gate_meets_overloads_that_inductor_decomposes_and_portable_ops(log_softmax, rms_norm):
    from benchmarks.gating import units_of
    from benchmarks.workloads.workload import Workload

    def model(x, w):
        return torch.log_softmax(pt.ops.rms_norm(x, w), -1)

    units = units_of(Workload("model/x", "model", "a model", lambda: (model, (X, W))), "cpu")
    assert [(u.op, u.signature) for u in units] == [
        ("rms_norm", "float32[4,8] float32[8] 1e-06"),
        (LOG_SOFTMAX, "float32[4,8] -1 False"),
    ]


def test_kernels_of_the_host_s_xla_are_none_of_the_native_path_s():
    assert "native" not in str(pt.explain(run(lambda x: x.cumsum(0), X)[0], show=False).units)


def test_eager_says_where_a_kernel_cannot_go(rms_norm, cumsum, calls):
    x = X.clone().requires_grad_()
    compiled = pt.compile(
        lambda x, w: pt.ops.rms_norm(x, w).cumsum(0), backend="cpu:eager", kernels=f"rms_norm=doubled,{CUMSUM}=noted"
    )
    torch.testing.assert_close(compiled(x, W), ops.rms_norm(x, W).cumsum(0))
    assert calls == []
    ((_, runs_as, why),) = rows(compiled, "rms_norm")
    assert (runs_as, why) == (
        "native",
        "PORTABLE_KERNELS names doubled: gradients are wanted, and this graph runs in eager",
    )
    assert rows(compiled, CUMSUM)[0][2].startswith("not looked for: cpu:eager runs the captured graph")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x.double(), r"gave torch.float64\[4, 8\] instead of torch.float32\[4, 8\]"),
        (lambda x: x[:2], r"gave torch.float32\[2, 8\] instead of"),
        (lambda x: (x, x), "gave 2 results instead of 1"),
        (lambda x: None, "gave NoneType instead of"),
    ],
)
def test_a_kernel_of_another_dtype_or_shape_is_named(kernel, result, message):
    @kernel(CUMSUM, provider="bad", backends=("cpu",))
    def cumsum(self, dim, *, dtype=None):
        return result(self)

    with pytest.raises(KernelError, match=rf"kernel {CUMSUM}/bad at test_native.py:\d+, in \S+ {message}"):
        run(lambda x: x.cumsum(0), X, kernels=f"{CUMSUM}=bad")


@pytest.mark.parametrize("backend", ["cpu", "cpu:eager"])
def test_a_kernel_that_raises_is_named_with_what_it_raised(kernel, backend):
    @kernel("rms_norm", provider="bad", backends=("cpu",))
    def rms_norm(x, weight, eps):
        return x / (1 // 0)

    compiled = pt.compile(pt.ops.rms_norm, backend=backend, kernels="rms_norm=bad")
    message = (
        r"kernel rms_norm/bad at test_native.py:\d+, in test_a_kernel\S+ raised ZeroDivisionError"
        r".*\(test_native.py:\d+, in rms_norm\)(?s:.*)rms_norm=off"
    )
    with (
        torch.no_grad(),
        pytest.raises(KernelError, match=message) as raised,
    ):
        compiled(X, W)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_memory_that_runs_out_in_a_kernel_is_torch_s_own_error(kernel):
    @kernel("rms_norm", provider="bad", backends=("cpu",))
    def rms_norm(x, weight, eps):
        raise torch.OutOfMemoryError("no more")

    compiled = pt.compile(pt.ops.rms_norm, backend="cpu", kernels="rms_norm=bad")
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        compiled(X, W)


def test_a_kernel_may_give_other_strides_or_its_input(kernel):
    @kernel(CUMSUM, provider="turned", backends=("cpu",))
    def turned(self, dim, *, dtype=None):
        return torch.cumsum(self, dim).t().contiguous().t()

    @kernel("aten.relu.default", provider="same", backends=("cpu",))
    def same(self):
        return self

    x = X.abs()
    _, got = run(lambda x: x.cumsum(0).view(-1) + 1, x, kernels=f"{CUMSUM}=turned")
    torch.testing.assert_close(got, x.cumsum(0).view(-1) + 1)
    operator = substitution.operator(pt_kernel("aten.relu.default", "same"), torch.ops.aten.relu.default)
    assert operator(x).data_ptr() != x.data_ptr()
    torch.library.opcheck(operator, (x,), test_utils=("test_schema", "test_faketensor"))


def pt_kernel(op, provider):
    from portable.kernels.registry import KERNELS

    return KERNELS[op, provider]


def test_a_kernel_cannot_stand_for_a_view(kernel):
    @kernel("aten.t.default", provider="mine", backends=("cpu",))
    def t(self):
        return self

    with pytest.raises(RegistrationError, match="returns a view"):
        substitution.operator(pt_kernel("aten.t.default", "mine"), torch.ops.aten.t.default)


def test_an_op_with_several_results_is_decomposed_in_place(kernel, decide):
    @kernel("aten.native_layer_norm.default", provider="mine", backends=("cpu",))
    def native_layer_norm(input, normalized_shape, weight, bias, eps):
        return torch.native_layer_norm(input, normalized_shape, weight, bias, eps)

    name = "aten.native_layer_norm.default"
    decide(name, "float32[4,8] (8) float32[8] None 1e-05", "cpu", "mine")

    def norms(x, y, w):
        return tuple(torch.nn.functional.layer_norm(v, (8,), w).relu() for v in (x, y))

    y = torch.randn(6, 8)
    compiled, got = run(norms, X, y, W)
    torch.testing.assert_close(got, norms(X, y, W))
    assert [r[:2] for r in rows(compiled, name)] == [(1, "kernel mine"), (1, "native")]
    assert "aten.var_mean.correction" in pt.explain(compiled, show=False).ops


@pytest.fixture
def differentiable(kernel, calls):
    """A kernel whose gradients tell that they are its own."""

    def backward(grads, needs, x, weight, eps):
        calls.append(("backward", [g is not None for g in grads], list(needs)))
        return 5 * grads[0], None, None

    @kernel("rms_norm", provider="own", backends=("cpu",), backward=backward)
    def rms_norm(x, weight, eps):
        calls.append(tuple(x.shape))
        return 2 * ops.rms_norm.reference(x, weight, eps)


def test_training_uses_the_gradients_that_a_kernel_brings(differentiable, calls):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    compiled = pt.compile(lambda x, w: 3 * pt.ops.rms_norm(x, w), backend="cpu", kernels="rms_norm=own")
    out = compiled(x, w)
    torch.testing.assert_close(out, 6 * ops.rms_norm(x, w))
    of_x, of_w = torch.autograd.grad(out, (x, w), torch.ones_like(x))
    torch.testing.assert_close(of_x, torch.full_like(x, 15.0))
    torch.testing.assert_close(of_w, torch.zeros_like(w))
    assert calls == [(4, 8), ("backward", [True], [True, True, False])]
    assert rows(compiled, "rms_norm") == [(1, "kernel own", "named by PORTABLE_KERNELS")]
    assert pt.explain(compiled, show=False).ops["rms_norm"] == {"kernel own": 2}
    assert list(pt.explain(compiled, show=False).units) == [("rms_norm", "float32[4,8] float32[8] 1e-06")]


def test_a_kernel_of_torch_ops_that_is_differentiable_has_its_own_gradients(kernel):
    @kernel("rms_norm", provider="double", backends=("cpu",), differentiable=True)
    def rms_norm(x, weight, eps):
        return 2 * ops.rms_norm.reference(x, weight, eps)

    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    compiled = pt.compile(pt.ops.rms_norm, backend="cpu", kernels="rms_norm=double")
    got = torch.autograd.grad(compiled(x, w), (x, w), torch.ones_like(x))
    torch.testing.assert_close(got, torch.autograd.grad(2 * ops.rms_norm(x, w), (x, w), torch.ones_like(x)))


def test_only_gradients_that_are_wanted_are_asked_for(differentiable, calls):
    x = X.clone().requires_grad_()
    compiled = pt.compile(pt.ops.rms_norm, backend="cpu", kernels="rms_norm=own")
    torch.autograd.grad(compiled(x, W).sum(), x)
    assert calls[1] == ("backward", [True], [True, False, False])


def test_without_gradients_such_a_kernel_runs_as_any_other(differentiable, calls):
    compiled, got = run(block, X, W, kernels="rms_norm=own")
    torch.testing.assert_close(got, 2 * ops.rms_norm(X * 3, W).relu() + 1)
    assert calls == [(4, 8)]
    assert rows(compiled, "rms_norm") == [(1, "kernel own", "named by PORTABLE_KERNELS")]


def test_training_counts_a_call_that_no_kernel_takes_once(differentiable, calls, decide):
    decide("rms_norm", "float32[9,8] float32[8] 1e-06", "cpu", "own")
    x = X.clone().requires_grad_()
    compiled = pt.compile(pt.ops.rms_norm, backend="cpu")
    torch.autograd.grad(compiled(x, W).sum(), x)
    assert calls == []
    assert rows(compiled, "rms_norm") == [(1, "native", "unmeasured on this machine")]


def test_training_with_a_dynamic_size_uses_them_too(differentiable, calls):
    compiled = pt.compile(pt.ops.rms_norm, backend="cpu", dynamic=True, kernels="rms_norm=own")
    for n in (3, 5):
        x = torch.randn(n, 8, requires_grad=True)
        (of_x,) = torch.autograd.grad(compiled(x, W).sum(), x)
        torch.testing.assert_close(of_x, torch.full_like(x, 5.0))
    assert [c for c in calls if c[0] != "backward"] == [(3, 8), (5, 8)]
    assert [c.kind for c in pt.explain(compiled, show=False).compiles] == ["forward", "backward"]


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        (lambda g: (g,), "gave 1 gradients for 3 arguments"),
        (lambda g: (g.double(), None, None), r"gave torch.float64\[4, 8\] as the gradient of argument 0, which is"),
        (lambda g: (g[:2], None, None), r"gave torch.float32\[2, 8\] as the gradient"),
        (lambda g: 1 // 0, "raised ZeroDivisionError"),
    ],
)
def test_a_wrong_gradient_is_named(kernel, gradients, message):
    @kernel("rms_norm", provider="bad", backends=("cpu",), backward=lambda grads, needs, *args: gradients(grads[0]))
    def rms_norm(x, weight, eps):
        return ops.rms_norm.reference(x, weight, eps)

    x = X.clone().requires_grad_()
    compiled = pt.compile(pt.ops.rms_norm, backend="cpu", kernels="rms_norm=bad")
    with pytest.raises(KernelError, match=f"backward of kernel rms_norm/bad {message}"):
        torch.autograd.grad(compiled(x, W).sum(), x)


def test_the_op_around_a_kernel_with_gradients_is_a_sound_custom_op(kernel):
    def backward(grads, needs, x, weight, eps):
        return grads[0], None, None  # the very tensor that it was given

    @kernel("rms_norm", provider="sound", backends=("cpu",), backward=backward)
    def rms_norm(x, weight, eps):
        return ops.rms_norm.reference(x, weight, eps)

    operator = substitution.operator(pt_kernel("rms_norm", "sound"), ops.rms_norm.overload)
    torch.library.opcheck(operator, (X.clone().requires_grad_(), W), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(operator, (X.clone().requires_grad_(), W), test_utils="test_autograd_registration")
