"""The calls on a device that scripts make for whichever backend is selected."""

import pytest
import torch

import portable as pt
from portable import backends
from portable.errors import BackendUnavailableError

HERE = ["cpu", "xla"]


@pytest.fixture
def noted(monkeypatch):
    """A backend that notes what it is asked."""
    from portable.backends.cpu import Cpu

    class Noted(Cpu):
        name = "noted"
        calls: list = []

        def synchronize(self):
            self.calls.append("synchronize")

        def manual_seed(self, seed):
            self.calls.append(seed)

    monkeypatch.setattr(backends, "plugins", lambda: {"noted": backends.Plugin("noted", "noted 1", Noted)})
    return Noted.calls


def test_they_go_to_the_selected_backend(noted, monkeypatch):
    monkeypatch.setenv("PORTABLE_BACKEND", "noted")
    pt.synchronize()
    pt.manual_seed(5)
    with pt.use_backend("cpu"):
        pt.synchronize()
        pt.synchronize(backend="noted")
    assert noted == ["synchronize", 5, "synchronize"]


@pytest.mark.parametrize("name", HERE)
def test_memory_stats_are_the_backends(name):
    stats = pt.memory_stats(name)
    assert 0 < stats.used <= stats.peak < stats.total


@pytest.mark.parametrize("name", HERE)
def test_manual_seed_reproduces_a_compiled_models_random_numbers(name):
    compiled = pt.compile(lambda x: torch.nn.functional.dropout(x), backend=name)
    with pt.use_backend(name):
        pt.manual_seed(0)
        first = compiled(torch.ones(64))
        pt.manual_seed(0)
        assert torch.equal(compiled(torch.ones(64)), first)


@pytest.mark.parametrize("name", HERE)
def test_autocast_is_of_the_device_of_the_backends_tensors(name):
    context = pt.autocast(backend=name)
    assert isinstance(context, torch.autocast)
    assert (context.device, context.fast_dtype) == ("cpu", torch.bfloat16)
    assert pt.autocast(torch.float16, backend=name).fast_dtype == torch.float16
    assert not pt.autocast(enabled=False, backend=name)._enabled


@pytest.mark.parametrize("name", HERE)
def test_a_compiled_model_under_autocast_computes_in_its_dtype_as_eager_does(name):
    model = torch.nn.Linear(8, 8)
    compiled = pt.compile(model, backend=name)
    x = torch.randn(4, 8)
    with pt.use_backend(name), torch.no_grad(), pt.autocast():
        got, want = compiled(x), model(x)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_a_backend_that_is_absent_is_named():
    for call in (pt.synchronize, pt.memory_stats):
        with pytest.raises(BackendUnavailableError, match="backend trainium cannot run here"):
            call("trainium")
