"""A kernel that brings its own gradients is tried on them too."""

import pytest
import torch

from portable import ops
from portable.kernels import registry
from portable.slo import trial
from portable.slo.gradients import wrong_gradients

SHAPE = torch.Size((4, 8))


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Registers a kernel of swiglu whose gradients are what ``change`` makes of the right ones."""
    monkeypatch.setenv("PORTABLE_LEDGER", str(tmp_path / "ledger.sqlite"))
    registry.load()
    before = dict(registry.KERNELS)

    def register(change):
        def backward(grads, needs, gate, up):
            s = gate.sigmoid()
            return change(grads[0] * up * s * (1 + gate * (1 - s)), grads[0] * gate * s)

        @registry.register_kernel("swiglu", provider="tried", backends=("cpu",), backward=backward)
        def swiglu(gate, up):
            return ops.swiglu.reference(gate, up)

    yield register
    registry.KERNELS.clear()
    registry.KERNELS.update(before)
    torch._dynamo.reset()


def tried() -> trial.Trial:
    spec = trial.Spec(SHAPE, torch.float32)
    return trial.try_here(
        trial.Request(trial.Unit("swiglu", (spec, spec), {}, "float32[4,8] float32[4,8]"), "tried", "cpu", budget_s=0.1)
    )


def test_right_gradients_pass(kernel):
    kernel(lambda gate, up: (gate, up))
    result = tried()
    assert (result.outcome, result.reason) == ("measured", "")
    assert result.cases == 7


@pytest.mark.parametrize(
    "change",
    [lambda gate, up: (up, gate), lambda gate, up: (1.01 * gate, up), lambda gate, up: (gate, None)],
    ids=["swapped", "off by 1 %", "one is left out"],
)
def test_a_kernel_with_wrong_gradients_does_not_pass(kernel, change):
    kernel(change)
    result = tried()
    assert result.outcome == "wrong"
    assert "fresh values: its gradients: result" in result.reason


def test_gradients_that_raise_are_the_kernel_s_fault(kernel):
    kernel(lambda gate, up: 1 / 0)
    result = tried()
    assert (result.outcome, result.cases) == ("wrong", 0)
    assert "ZeroDivisionError" in result.reason


def test_a_gradient_that_is_missing_altogether_is_named():
    args = [torch.randn(3), torch.randn(3)]
    problem = wrong_gradients(lambda a, b: [a * b.detach()], torch.mul, args, {})
    assert problem == "there is one, or none, of argument 1"


def test_what_has_no_floating_point_argument_has_no_gradient():
    assert not wrong_gradients(lambda a: [a], torch.neg, [torch.arange(3)], {})
