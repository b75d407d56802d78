"""What may be registered as a kernel, and how each mistake is named."""

import importlib.metadata
import logging
import threading
from dataclasses import dataclass

import pytest
import torch

from portable.errors import RegistrationError
from portable.kernels import registry
from portable.lowering.context import Spec

CUMSUM = "aten.cumsum.default"
X = Spec((2, 3), torch.float32)


def cumsum(self, dim, *, dtype=None):
    return self


def registered(kernel, function=cumsum, op=CUMSUM, provider="mine", backends=("xla",), **options):
    kernel(op, provider=provider, backends=backends, **options)(function)
    return registry.KERNELS[op, provider]


def test_a_kernel_is_found_for_its_backend_and_its_variants_and_no_other(kernel):
    found = registered(kernel)
    assert found in registry.kernels_for(CUMSUM, "xla")
    assert found in registry.kernels_for(CUMSUM, "xla:cpu")
    assert found not in registry.kernels_for(CUMSUM, "cpu")
    only_here = registered(kernel, provider="here", backends=("xla:cpu",))
    assert only_here in registry.kernels_for(CUMSUM, "xla:cpu")
    assert only_here not in registry.kernels_for(CUMSUM, "xla:cuda")
    assert CUMSUM in registry.ops_with_kernels("xla:cuda")


def test_registering_returns_the_function_and_changes_nothing_else(kernel):
    assert kernel(CUMSUM, provider="mine", backends=("xla",))(cumsum) is cumsum


@pytest.mark.parametrize(
    "op, message",
    [
        ("aten.cumsum", "not one overload.*aten.cumsum.default"),
        ("aten.nonsense.default", "no operator aten.nonsense.default"),
        ("aten.cumsum.nonsense", "cumsum.*aten.cumsum.default"),
        ("nonsense", "no portable op 'nonsense'"),
    ],
)
def test_an_op_that_does_not_exist_or_is_a_packet_is_refused(kernel, op, message):
    with pytest.raises(RegistrationError, match=f"(?s){message}"):
        registered(kernel, op=op)


@pytest.mark.parametrize("backends", [("bogus",), ("xla", "cpuu:eager")])
def test_a_backend_that_does_not_exist_is_refused_with_those_that_do(kernel, backends):
    name = backends[-1]
    with pytest.raises(RegistrationError, match=rf"mine is for backend '{name}'(?s:.*)one of tpu, cuda, .*cpu, xla"):
        registered(kernel, backends=backends)
    assert (CUMSUM, "mine") not in registry.KERNELS


def test_a_backend_of_another_package_is_known_without_being_loaded(kernel, monkeypatch):
    entry = importlib.metadata.EntryPoint("acme", "no_such_module:Acme", "portable.backends")
    found = importlib.metadata.EntryPoints([entry])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found.select(group=group))
    assert registered(kernel, backends=("acme",)) in registry.kernels_for(CUMSUM, "acme:1")
    with pytest.raises(RegistrationError, match="one of tpu, .*acme"):
        registered(kernel, provider="other", backends=("bogus",))


def test_a_duplicate_is_refused_and_the_first_stays(kernel):
    first = registered(kernel)
    with pytest.raises(RegistrationError, match=f"{CUMSUM}/mine is registered already"):
        registered(kernel, function=lambda self, dim, *, dtype=None: dim)
    assert registry.KERNELS[CUMSUM, "mine"] is first


@pytest.mark.parametrize("provider", ["portable", "auto", "off"])
def test_a_reserved_provider_is_refused(kernel, provider):
    with pytest.raises(RegistrationError, match="reserved"):
        registered(kernel, provider=provider)


@pytest.mark.parametrize("provider", ["", "my kernel", "a=b", "a,b"])
def test_a_provider_is_a_name(kernel, provider):
    with pytest.raises(RegistrationError, match="not a name"):
        registered(kernel, provider=provider)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"backends": ()}, "backends="),
        ({"backends": "xla"}, "backends="),
        ({"abi": "numpy"}, "unknown abi 'numpy'"),
        ({"dtypes": torch.float32}, "dtypes="),
        ({"dtypes": ("float32",)}, "dtypes="),
    ],
)
def test_an_illegal_declaration_is_refused_by_name(kernel, options, message):
    with pytest.raises(RegistrationError, match=message):
        registered(kernel, **options)


@pytest.mark.parametrize(
    "function",
    [lambda self, dim: 0, lambda self, dtype, dim: 0, lambda x, dim, dtype: 0, lambda self, dim, dtype, extra: 0],
    ids=["too few", "another order", "another name", "too many"],
)
def test_another_signature_than_the_op_s_is_refused_with_both(kernel, function):
    with pytest.raises(RegistrationError, match=r"the op takes \(self, dim, dtype\)"):
        registered(kernel, function=function)


def test_a_portable_op_s_signature_is_its_reference_s(kernel):
    registered(kernel, op="rms_norm", function=lambda x, weight, eps: x)
    with pytest.raises(RegistrationError, match=r"takes \(x, weight, eps\)"):
        registered(kernel, op="rms_norm", provider="other", function=lambda x, w, eps: x)


def test_the_context_comes_first_or_is_no_context(kernel):
    assert registered(kernel, function=lambda ctx, self, dim, *, dtype=None: self).takes_context
    assert not registered(kernel, provider="without").takes_context
    with pytest.raises(RegistrationError, match="exact signature"):
        registered(kernel, provider="last", function=lambda self, dim, dtype, ctx: self)


def test_what_has_no_signature_is_refused(kernel):
    with pytest.raises(RegistrationError, match="no signature"):
        registered(kernel, function=type)


@pytest.mark.parametrize("accepts", [lambda self: True, lambda self, dim, dtype, more: True, "yes"])
def test_a_predicate_that_cannot_be_called_as_the_op_is_refused(kernel, accepts):
    with pytest.raises(RegistrationError, match="accepts="):
        registered(kernel, accepts=accepts)


def test_gradients_are_brought_by_kernels_of_torch_tensors_of_portable_ops_alone(kernel):
    def backward(grads, needs, x, weight, eps):
        return grads[0], None, None

    options = {"op": "rms_norm", "function": lambda x, weight, eps: x}
    registered(kernel, backward=backward, abi="torch", **options)
    with pytest.raises(RegistrationError, match="cannot bring its own gradients"):
        registered(kernel, provider="jaxy", backward=backward, abi="jax", **options)
    with pytest.raises(RegistrationError, match="cannot bring its own gradients"):
        registered(kernel, backward=lambda *args: args)
    with pytest.raises(RegistrationError, match=r"cannot be called with \(grads, needs, x, weight, eps\)"):
        registered(kernel, provider="short", backward=lambda grads, x: x, abi="torch", **options)


@pytest.mark.parametrize(
    "accepts, why",
    [
        (lambda self, dim, dtype=None: dim == 1, ""),
        (lambda self, dim, dtype=None: dim == 0, "refuses"),
        (lambda self, dim, dtype=None: 1 / 0, "failed: ZeroDivisionError"),
        (lambda self, dim, dtype=None: dim, "gave int, not a bool"),
        (lambda self, dim, dtype=None: None, "gave NoneType, not a bool"),
    ],
)
def test_a_predicate_that_refuses_raises_or_gives_no_bool_keeps_the_kernel_out(kernel, accepts, why):
    assert why in (found := registered(kernel, accepts=accepts).why_not([X, 1], {}))
    assert bool(found) == bool(why)


@dataclass
class Symbolic:
    """A tensor of another kind: only what a predicate may read."""

    shape: tuple
    dtype: torch.dtype
    ndim: int = 2


@pytest.mark.parametrize("args, kwargs", [([X, 1], {}), ([], {"self": X, "dim": 1}), ([[X, X], 1], {})])
def test_the_dtype_is_that_of_the_first_tensor_wherever_it_stands(kernel, args, kwargs):
    assert registered(kernel, dtypes=(torch.float64,)).why_not(args, kwargs) == "not for torch.float32"
    assert registered(kernel, provider="both", dtypes=(torch.float64, torch.float32)).why_not(args, kwargs) == ""
    assert registered(kernel, provider="any").why_not([Symbolic((2,), torch.int8)], {}) == ""


def digest_of(folder, kernel, source, provider, name="mine"):
    path = folder / f"{name}.py"
    path.write_text(source)
    module: dict = {"__name__": name}
    exec(compile(source, str(path), "exec"), module)
    import linecache

    linecache.checkcache(str(path))
    found = registered(kernel, function=module["kernel"], provider=provider)
    return found.digest


def test_the_digest_is_of_the_source_and_of_what_it_calls_in_its_module(kernel, tmp_path):
    source = "def kernel(self, dim, *, dtype=None):\n    return part(self)\n\ndef part(x):\n    return x\n"
    first = digest_of(tmp_path, kernel, source, "first")
    assert len(first) == 64
    assert digest_of(tmp_path, kernel, source, "again") == first
    assert digest_of(tmp_path, kernel, source.replace("part(self)", "part(dim)"), "changed") != first
    assert digest_of(tmp_path, kernel, source.replace("return x", "return -x"), "part_changed") != first


def test_the_digest_covers_the_gradients(kernel):
    def norm(x, weight, eps):
        return x

    def made(n):
        namespace = {}
        exec(f"def backward(grads, needs, *args): return {n}, None, None", namespace)
        return namespace["backward"]

    ways = [{}, {"differentiable": True}, {"backward": made(1)}, {"backward": made(2)}]
    kinds = [registered(kernel, norm, "rms_norm", f"p{i}", ("cpu",), **way).digest for i, way in enumerate(ways)]
    assert len(set(kinds)) == len(ways)


def test_the_digest_of_a_function_without_source_covers_its_constants(kernel):
    def made(number):
        scope: dict = {}
        exec(f"def kernel(self, dim, *, dtype=None):\n    return {number}", scope)
        return scope["kernel"]

    digests = [registered(kernel, made(n), provider=f"p{i}").digest for i, n in enumerate((1.5, 1.5, 2.5))]
    assert digests[0] == digests[1] != digests[2]


# Other packages.


@dataclass
class Entry:
    value: str
    load: object


@pytest.fixture
def entry_points(monkeypatch):
    def given(*entries):
        monkeypatch.setattr(registry, "_LOADED", threading.Event())
        monkeypatch.setattr(registry, "BROKEN", {})
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries if "kernels" in group else ())

    return given


def test_an_entry_point_is_loaded_when_kernels_are_first_asked_for_and_once(kernel, entry_points):
    loads = []

    def load():
        loads.append(1)
        registered(kernel, provider="elsewhere")

    entry_points(Entry("elsewhere.kernels", load))
    for _ in range(2):
        assert "elsewhere" in [k.provider for k in registry.kernels_for(CUMSUM, "xla:cpu")]
    assert loads == [1]


def test_a_package_that_fails_to_load_costs_its_own_kernels_alone(kernel, entry_points, caplog):
    def broken():
        raise ImportError("no libmine.so")

    entry_points(
        Entry("broken.kernels", broken), Entry("good.kernels", lambda: registered(kernel, provider="elsewhere"))
    )
    with caplog.at_level(logging.WARNING, "portable"):
        providers = [k.provider for k in registry.kernels_for(CUMSUM, "xla:cpu")]
    assert {"elsewhere", "aten"} <= set(providers)
    assert "broken.kernels" in caplog.text and "no libmine.so" in caplog.text
    assert "ImportError" in registry.BROKEN["broken.kernels"]
