"""A portable op reaches its kernel on the stablehlo path: as one node where a kernel was chosen, and only there."""

import pytest
import torch

import portable as pt
from portable import capture, ops
from portable.errors import ConfigError
from portable.kernels.choice import whole_ops
from portable.kernels.select import Policy


def block(x, w):
    return pt.ops.rms_norm(x, w).relu()


X, W = torch.randn(4, 8), torch.randn(8)
SIGNATURE = "float32[4,8] float32[8] 1e-06"


@pytest.fixture
def doubled(kernel):
    """A kernel that tells by its answer that it ran."""

    @kernel("rms_norm", provider="doubled", backends=("xla",), abi="jax")
    def rms_norm(x, weight, eps):
        import jax.numpy as jnp
        from jax import lax

        return 2 * x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


@pytest.fixture
def graphs(monkeypatch):
    """The ATen graphs that reach the lowering, as rows of (op, target, shape)."""
    seen = []
    original = capture.aot

    def spy(gm, inputs, compile_aten):
        def noting(aten, fakes, kind):
            seen.append([(n.op, str(n.target), str(n.meta.get("val"))) for n in aten.graph.nodes])
            return compile_aten(aten, fakes, kind)

        return original(gm, inputs, noting)

    monkeypatch.setattr(capture, "aot", spy)
    return seen


def run(kernels=None, function=block, **options):
    compiled = pt.compile(function, backend="xla", kernels=kernels, **options)
    with torch.no_grad():
        return compiled, compiled(X, W)


def test_a_named_kernel_runs_and_explain_says_so(doubled):
    compiled, got = run("rms_norm=doubled")
    torch.testing.assert_close(got, 2 * block(X, W))
    (row,) = pt.explain(compiled, show=False).decisions["rms_norm"]
    assert (row.n, row.runs_as, row.why) == (1, "kernel doubled", "named by PORTABLE_KERNELS")
    assert "portable.rms_norm.default" not in pt.explain(compiled, show=False).ops


def test_a_provider_named_for_every_op_runs_it_too(doubled):
    torch.testing.assert_close(run("doubled")[1], 2 * block(X, W))


def test_the_ledger_s_decision_runs_where_it_was_made_for_and_nowhere_else(doubled, decide):
    decide("rms_norm", SIGNATURE, "xla:cpu", "doubled")
    compiled, got = run()
    torch.testing.assert_close(got, 2 * block(X, W))
    (row,) = pt.explain(compiled, show=False).decisions["rms_norm"]
    assert (row.runs_as, row.why) == ("kernel doubled", "kernel 1.02× [1.00, 1.05]")
    assert row.verdict
    other = torch.randn(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(other, W), block(other, W))
    torch.testing.assert_close(run("off")[1], block(X, W))


def test_the_signature_holds_the_arguments_that_the_call_leaves_out(doubled):
    compiled, _ = run("rms_norm=doubled")
    assert list(pt.explain(compiled, show=False).units) == [("rms_norm", SIGNATURE)]


def test_stale_evidence_changes_nothing(doubled, decide, graphs):
    decide("rms_norm", SIGNATURE, "xla:cpu", "doubled", digest="0" * 64)
    torch.testing.assert_close(run()[1], block(X, W))
    assert not any("portable" in target for _, target, _ in graphs[0])


def test_with_nothing_chosen_the_graph_is_as_without_a_registry(graphs, doubled):
    run()
    run("off")
    run(function=lambda x, w: ops.rms_norm.reference(x, w).relu())
    assert graphs[0] == graphs[1] == graphs[2]


def test_gradients_of_a_call_that_runs_as_a_kernel_are_the_reference_s(doubled):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    compiled = pt.compile(pt.ops.rms_norm, backend="xla", kernels="rms_norm=doubled")
    got = torch.autograd.grad(compiled(x, w), (x, w), torch.ones_like(x))
    want = torch.autograd.grad(ops.rms_norm(x, w), (x, w), torch.ones_like(x))
    torch.testing.assert_close(got, want)


def test_two_compiled_forms_of_one_function_keep_their_own_kernels(doubled):
    with_kernel, _ = run("rms_norm=doubled")
    without, _ = run("off")
    with torch.no_grad():
        torch.testing.assert_close(with_kernel(X, W), 2 * without(X, W))


def test_a_kernel_of_torch_tensors_is_rejected_with_the_reason(kernel):
    @kernel("rms_norm", provider="torchy", backends=("xla",), abi="torch")
    def rms_norm(x, weight, eps):
        return x

    reason = 'the stablehlo path takes kernels with abi="jax", it has "torch"'
    with pytest.warns(UserWarning, match=f"kernel rms_norm/torchy is named and does not run.*: {reason}"):
        compiled, got = run("rms_norm=torchy")
    torch.testing.assert_close(got, block(X, W))
    (row,) = pt.explain(compiled, show=False).decisions["rms_norm"]
    ((name, why),) = [r for r in row.rejected if r[0] == "rms_norm/torchy"]
    assert row.runs_as == "portable"
    assert why == reason


@pytest.mark.parametrize("backend", ["xla", "cpu"])
@pytest.mark.parametrize("kernels", ["rms_norm=choosy", "choosy"])
def test_a_kernel_that_is_named_and_cannot_run_is_warned_of_once_a_model(kernel, recwarn, backend, kernels):
    @kernel("rms_norm", provider="choosy", backends=(backend,), abi="jax" if backend == "xla" else "torch",
            accepts=lambda x, weight, eps: x.ndim == 3)  # fmt: skip
    def rms_norm(x, weight, eps):
        raise AssertionError

    def twice(x, w):
        y = pt.ops.rms_norm(x, w)
        torch._dynamo.graph_break()
        return pt.ops.rms_norm(y + 1, w)

    compiled = pt.compile(twice, backend=backend, kernels=kernels, dynamic=False)
    with torch.no_grad():
        for x in (X, X[:2]):
            torch.testing.assert_close(compiled(x, W), twice(x, W))
    told = [str(w.message) for w in recwarn if "is named" in str(w.message)]
    assert len(told) == 1
    assert told[0].startswith(
        "kernel rms_norm/choosy is named and does not run in a call, the portable path does: its predicate"
    )


def test_a_kernel_that_nobody_named_is_rejected_without_a_warning(kernel, recwarn):
    @kernel("rms_norm", provider="torchy", backends=("xla",), abi="torch")
    def rms_norm(x, weight, eps):
        raise AssertionError

    for kernels in ("auto", "off"):
        run(kernels)
    assert [w for w in recwarn if "rms_norm" in str(w.message)] == []


def test_a_kernel_that_does_not_exist_is_refused_by_name(doubled):
    with pytest.raises(ConfigError, match="rms_norm has no kernel by 'mine' here"):
        run("rms_norm=mine")
    with pytest.raises(ConfigError, match="no portable op 'rms_nrm'"):
        run("rms_nrm=mine")
    with pytest.raises(ConfigError, match="aten.relu.default has no kernel by 'mine' here"):
        run("aten.relu.default=mine")


def test_the_gate_meets_the_op_in_a_model_that_calls_it(doubled):
    from benchmarks.gating import units_of
    from benchmarks.workloads.workload import Workload

    units = units_of(Workload("rms_norm/x", "rms_norm", "a model", lambda: (block, (X, W))), "xla")
    assert [(u.op, u.signature) for u in units] == [("rms_norm", SIGNATURE)]


def test_overloads_need_not_be_kept_whole_on_the_stablehlo_path():
    assert whole_ops("xla:cpu", "stablehlo", Policy.parse("aten.cumsum.default=aten")) == frozenset()
