"""Which backend is used, and what a wrong name says."""

import threading

import pytest
import torch

import portable as pt
from portable import backends
from portable.errors import BackendUnavailableError, ConfigError, UnknownBackendError


def backend_of(compiled) -> str:
    return pt.explain(compiled, show=False).backend


def identity(x):
    return x + 1


def test_argument_beats_context_beats_environment_beats_auto(monkeypatch):
    monkeypatch.delenv("PORTABLE_BACKEND", raising=False)
    assert backend_of(pt.compile(identity)) == backends.autodetected()
    monkeypatch.setenv("PORTABLE_BACKEND", "xla")
    assert backend_of(pt.compile(identity)) == "xla"
    with pt.use_backend("cpu:eager"):
        assert backend_of(pt.compile(identity)) == "cpu:eager"
        with pt.use_backend("xla:cpu"):
            assert backend_of(pt.compile(identity)) == "xla:cpu"
        assert backend_of(pt.compile(identity, backend="cpu")) == "cpu"
    assert backend_of(pt.compile(identity)) == "xla"


def test_an_empty_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("PORTABLE_BACKEND", "  ")
    assert backends.selected() == "auto"


def test_the_context_is_this_threads_own():
    seen = []
    with pt.use_backend("xla"):
        thread = threading.Thread(target=lambda: seen.append(backends.selected()))
        thread.start()
        thread.join()
        assert backends.selected() == "xla"
    assert seen != ["xla"]


@pytest.mark.parametrize("name", ["gpu", "cpu:fast", "xla:metal", "auto:x", "cpu:"])
def test_an_unknown_name_lists_the_legal_ones(name, monkeypatch):
    monkeypatch.setenv("PORTABLE_BACKEND", name)
    if name == "cpu:":
        assert backend_of(pt.compile(identity)) == "cpu"
        return
    with pytest.raises(UnknownBackendError, match="Remedy: (choose one of|legal):"):
        pt.compile(identity)


@pytest.mark.parametrize("name", ["tpu", "cuda", "rocm", "xpu", "trainium", "xla:rocm"])
def test_an_absent_backend_raises_with_the_reason_that_doctor_shows(name):
    base = name.partition(":")[0]
    if ":" not in name and backends.backend_class(base).probe().ready:
        pytest.skip(f"{name} is here")
    with pytest.raises(BackendUnavailableError, match="Remedy: ") as caught:
        pt.compile(identity, backend=name)
    if ":" not in name:
        assert backends.backend_class(base).probe().reason in str(caught.value)


def test_auto_follows_the_documented_order(monkeypatch):
    assert backends.AUTO_ORDER == ("tpu", "cuda", "rocm", "xpu", "trainium", "cpu")
    backends.autodetected.cache_clear()
    from portable.backends.base import State
    from portable.backends.xpu import Xpu

    monkeypatch.setattr(Xpu, "probe", classmethod(lambda cls: State(True, "ready")))
    try:
        assert backends.autodetected() == "xpu"
    finally:
        backends.autodetected.cache_clear()


def test_a_variable_with_an_illegal_value_names_the_legal_ones(monkeypatch):
    monkeypatch.setenv("PORTABLE_FALLBACK", "maybe")
    with pytest.raises(ConfigError, match="warn, allow, error"):
        pt.compile(identity, backend="cpu")


@pytest.mark.parametrize(
    ("option", "message"),
    [("dims", "dims= is not supported yet"), ("slo", "is not an objective"), ("kernels", "kernels=.* is not legal")],
)
def test_an_option_that_is_not_built_yet_or_has_a_wrong_value_is_refused(option, message):
    with pytest.raises(ConfigError, match=message):
        pt.compile(identity, backend="cpu", **{option: object()})


@pytest.mark.parametrize("name", ["cpu", "cpu:eager", "xla"])
def test_the_device_of_a_host_backend_is_the_cpu(name):
    assert pt.device(name) == torch.device("cpu")


class _Entry:
    """An installed entry point, as importlib.metadata gives it."""

    dist = None

    def __init__(self, name, load):
        self.name, self.value, self.load = name, f"{name}_package:Backend", load


def _broken():
    raise ImportError("libacme.so: not found")


def test_a_broken_plugin_keeps_its_traceback_and_raises_only_when_named(monkeypatch):
    monkeypatch.setattr(
        backends.importlib.metadata, "entry_points", lambda group: [_Entry("acme", _broken), _Entry("cpu", _broken)]
    )
    backends.plugins.cache_clear()
    try:
        assert "acme" in backends.names()
        assert backend_of(pt.compile(identity, backend="cpu")) == "cpu"
        with pytest.raises(BackendUnavailableError, match=r"acme(.|\n)*libacme.so: not found"):
            pt.compile(identity, backend="acme")
    finally:
        backends.plugins.cache_clear()


def test_a_plugin_backend_is_chosen_by_name(monkeypatch):
    from portable.backends.cpu import Cpu

    acme = type("Acme", (Cpu,), {"name": "acme"})
    monkeypatch.setattr(backends.importlib.metadata, "entry_points", lambda group: [_Entry("acme", lambda: acme)])
    backends.plugins.cache_clear()
    try:
        assert backend_of(pt.compile(identity, backend="acme:eager")) == "acme:eager"
    finally:
        backends.plugins.cache_clear()
