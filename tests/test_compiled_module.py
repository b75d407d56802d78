"""A compiled module is its model in all but how it computes: attributes, special methods, hooks, copies, forward."""

import copy
import inspect
import pickle
import types
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import portable as pt

T = TypeVar("T")


def xla(model, **options):
    return pt.compile(model, backend="xla", fallback="error", **options)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 4), nn.Linear(4, 2), 0

    def forward(self, x, scale: float = 1.0):
        """Two layers."""
        self.calls += 1
        return self.second(self.first(x).relu()) * scale

    def loss(self, x):
        return self(x).square().sum()


def same(found, wanted):
    torch.testing.assert_close(found, wanted)


# --- attributes ------------------------------------------------------------------------------------------------------

MODULES = [
    lambda: nn.Linear(2, 2),
    lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
    lambda: nn.ModuleList([nn.Linear(2, 2)]),
    lambda: nn.ModuleDict({"a": nn.ReLU()}),
    lambda: nn.ParameterList([nn.Parameter(torch.ones(2))]),
    lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
    lambda: nn.LSTM(2, 2),
    lambda: nn.LSTMCell(2, 2),
    lambda: nn.BatchNorm1d(2),
    lambda: nn.MultiheadAttention(4, 2),
    lambda: nn.TransformerEncoderLayer(4, 2, batch_first=True),
    lambda: nn.Transformer(4, 2, 1, 1, 4),
    lambda: nn.Embedding(3, 2),
    lambda: nn.EmbeddingBag(3, 2),
    lambda: nn.Conv2d(1, 1, 1),
    lambda: nn.LazyLinear(3),
    lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 5, [2]),
    lambda: nn.CrossEntropyLoss(),
    lambda: nn.Dropout(),
    lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
    Net,
]
# how it is called, made, copied and pickled, what looks attributes up and who refers to it weakly, are its own
OWN = {
    "__call__",
    "__copy__",
    "__deepcopy__",
    "__getattr__",
    "__init_subclass__",
    "__new__",
    "__reduce__",
    "__reduce_ex__",
    "__weakref__",
}


def attributes(module):
    found = {}
    for name in dir(module):
        try:
            found[name] = getattr(module, name)
        except Exception as failure:  # some have properties that refuse
            found[name] = type(failure)
    return found


def differences(model, compiled):
    """The names of the attributes of ``compiled`` that are not those of ``model``."""
    ours = attributes(compiled)
    for name, wanted in attributes(model).items():
        found = ours.pop(name, None)
        if isinstance(wanted, types.MethodType) and isinstance(found, types.MethodType):
            equal = name == "forward" or wanted.__func__ is found.__func__
            equal &= inspect.signature(wanted) == inspect.signature(found)
            equal &= (wanted.__name__, wanted.__doc__) == (found.__name__, found.__doc__)
        elif isinstance(wanted, types.MethodWrapperType | types.BuiltinMethodType):
            equal = type(wanted) is type(found)
        else:
            equal = wanted is found or type(wanted) is type(found) and bool(torch.as_tensor(wanted == found).all())
        if not equal and name not in OWN:
            yield name
    yield from ours.keys() - OWN


@pytest.mark.parametrize("make", MODULES, ids=lambda make: type(make()).__name__)
def test_every_attribute_is_that_of_the_model(make):
    model = make()
    compiled = xla(model)
    assert list(differences(model, compiled)) == []
    assert isinstance(compiled, type(model))
    assert compiled.__class__ is type(model)
    assert type(compiled).__name__ == type(model).__name__
    assert repr(compiled) == repr(model)


def test_special_methods():
    layers = xla(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert len(layers) == 2
    assert layers[1] is list(layers)[1]
    layers.append(nn.Tanh())
    del layers[1]
    assert [type(layer).__name__ for layer in layers] == ["Linear", "Tanh"]
    layers[1] = nn.ReLU()
    assert "a" in xla(nn.ModuleDict({"a": nn.ReLU()}))

    class Session(nn.Module):
        open = False

        def __enter__(self):
            self.open = True
            return self

        def __exit__(self, *failure):
            self.open = False

        def __bool__(self):
            return False

    session = xla(Session())
    with session as entered:
        assert entered is session
        assert session.open
    assert not session.open
    assert not session


def test_what_a_method_returns_of_itself_is_the_compiled_module():
    compiled = xla(Net())
    for same_module in (compiled.eval(), compiled.train(), compiled.float(), compiled.apply(lambda m: None)):
        assert same_module is compiled
    assert compiled.requires_grad_(False) is compiled
    assert not any(p.requires_grad for p in compiled.parameters())


def test_attributes_are_set_and_deleted_on_the_model():
    model = Net()
    compiled = xla(model)
    compiled.first, compiled.note = nn.Linear(4, 4), 1
    assert model.first is compiled.first
    del compiled.note
    assert not hasattr(model, "note")
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [name for name, _ in nn.Sequential(compiled).named_modules()] == ["", "0", "0.first", "0.second"]


def test_a_method_that_calls_the_module_runs_compiled():
    compiled, x = xla(Net()), torch.randn(3, 4)
    same(compiled.loss(x), compiled._portable_run.target.loss(x))
    assert pt.explain(compiled, show=False).graphs == 1


# --- classes ---------------------------------------------------------------------------------------------------------


def test_classes_with_rules_of_their_own_for_subclasses_slots_and_ends():
    derived, ended = [], []

    class Registered(nn.Module, Generic[T]):
        __slots__ = ("hidden",)

        def __init_subclass__(cls, *, wanted):
            derived.append(cls)

        def __init__(self, width):
            super().__init__()
            self.hidden, self.layer = width, nn.Linear(width, width)

        def forward(self, x):
            return self.layer(x) * self.hidden

        def freeze(self):
            return "its own"

        def __del__(self):
            ended.append(self.hidden)

    model = Registered(3)
    compiled, x = xla(model), torch.randn(2, 3)
    assert derived == []
    assert compiled.hidden == 3
    compiled.hidden = 5
    assert model.hidden == 5
    same(compiled(x), model(x))
    assert compiled.freeze() == "its own"
    assert type(type(compiled)(7)) is Registered
    ended.clear()
    del compiled
    assert ended == []


@pytest.mark.parametrize("through", ["model", "compiled"])
def test_a_model_may_change_its_class(through):
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    compiled = xla(model)
    compiled(x)
    parametrizations.weight_norm(model if through == "model" else compiled)
    assert type(compiled.weight) is type(model.weight)
    assert compiled.__class__ is type(model) is not nn.Linear
    same(compiled(x), model(x))
    nn.utils.parametrize.remove_parametrizations(compiled, "weight")
    assert compiled.__class__ is type(model) is nn.Linear
    same(compiled(x), model(x))


def test_a_lazy_module_becomes_what_it_becomes():
    compiled, x = xla(nn.LazyLinear(3)), torch.randn(2, 5)
    assert compiled(x).shape == (2, 3)
    assert compiled.__class__ is nn.Linear
    same(compiled(x), nn.functional.linear(x, compiled.weight, compiled.bias))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_a_copy_is_compiled_and_shares_nothing(copied):
    compiled, x = xla(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), torch.randn(2, 4)
    twin = copied(nn.Sequential(compiled, nn.Tanh()))[0]
    same(twin(x), compiled(x))
    assert twin[0].weight is not compiled[0].weight
    assert pt.explain(twin, show=False).backend == "xla"


def test_a_shallow_copy_has_attributes_of_its_own():
    compiled = xla(Net())
    twin = copy.copy(compiled)
    twin.calls = 7
    assert compiled.calls == 0
    assert twin.first is compiled.first
    assert pt.explain(twin, show=False).backend == "xla"


# --- forward ---------------------------------------------------------------------------------------------------------


def test_forward_has_the_signature_of_the_model_and_runs_compiled_without_hooks():
    model, x = Net(), torch.randn(3, 4)
    compiled = xla(model)
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert compiled.forward.__doc__ == "Two layers."
    model.register_forward_hook(lambda module, args, out: out + 100)
    same(compiled.forward(x, scale=2.0), model.forward(x, scale=2.0))
    same(compiled(x), model(x))
    assert pt.explain(compiled, show=False).graphs >= 2


def decorated(forward):
    def wrapped(self, *args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(self, *args, **kwargs).float()

    wrapped.__wrapped__ = forward
    return wrapped


def replace_by_closure(module):
    old = module.forward
    module.forward = lambda *args: old(*args) * 2


def replace_by_method(module):
    module.forward = types.MethodType(decorated(module.forward.__func__), module)


def replace_twice(module):
    replace_by_closure(module)
    replace_by_closure(module)


@pytest.mark.parametrize("replace", [replace_by_closure, replace_by_method, replace_twice])
@pytest.mark.parametrize("called_before", [False, True])
def test_a_forward_that_is_replaced_may_call_the_one_before(replace, called_before):
    model, x = Net(), torch.randn(3, 4)
    reference, compiled = copy.deepcopy(model), xla(model)
    if called_before:
        same(compiled(x), reference(x))
    for module in (reference, compiled):
        replace(module)
    tolerance = 2e-2 if replace is replace_by_method else 1e-5
    for _ in range(2):
        torch.testing.assert_close(compiled(x), reference(x), rtol=tolerance, atol=tolerance)
    assert model.calls == compiled.calls == reference.calls
    del compiled.forward
    same(compiled(x), Net.forward(model, x))


# --- hooks -----------------------------------------------------------------------------------------------------------

FORWARD = {
    "register_forward_hook": lambda module, args, out: out * 3,
    "register_forward_pre_hook": lambda module, args: (args[0] * 3,),
}
BACKWARD = {
    "register_full_backward_hook": lambda module, grads, out: tuple(None if g is None else g * 3 for g in grads),
    "register_full_backward_pre_hook": lambda module, out: (out[0] * 3,),
}


def gradients(module, x):
    x = x.clone().requires_grad_()
    module.zero_grad()
    module(x).square().sum().backward()
    return [x.grad, *[p.grad.clone() for p in module.parameters()]]


@pytest.mark.parametrize("place", ["itself", "a layer"])
@pytest.mark.parametrize("kind", FORWARD | BACKWARD)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_hooks_come_and_go_between_calls(kind, place):
    model, x = Net(), torch.randn(3, 4)
    compiled = xla(model)
    on = model if place == "itself" else model.first

    def agree():
        same(compiled(x), model(x))
        same(gradients(compiled, x), gradients(model, x))

    agree()
    handle = getattr(on, kind)((FORWARD | BACKWARD)[kind])
    agree()
    handle.remove()
    agree()
    first, _ = getattr(on, kind)((FORWARD | BACKWARD)[kind]), getattr(on, kind)(lambda module, *rest: None)
    agree()
    first.remove()
    agree()
    assert not pt.explain(compiled, show=False).fallbacks


def test_a_hook_of_every_module():
    model, x = Net(), torch.randn(3, 4)
    compiled, seen = xla(model), []
    compiled(x)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module)))
    try:
        compiled(x)
    finally:
        handle.remove()
    assert seen == [nn.Linear, nn.Linear, Net]
    compiled(x)
    assert len(seen) == 3


# --- methods and functions -------------------------------------------------------------------------------------------


class Scaler:
    factor = 2

    @pt.compile(backend="xla")
    def scale(self, x, by: int = 1):
        """Scaled."""
        return x * self.factor * by

    @pt.compile(backend="xla")
    @staticmethod
    def double(x):
        return x * 2

    @pt.compile(backend="xla")
    @classmethod
    def times(cls, x):
        return x * cls.factor


def test_a_method_can_be_compiled():
    x, one, other = torch.ones(3), Scaler(), Scaler()
    other.factor = 5
    assert one.scale(x).tolist() == [2, 2, 2]
    assert other.scale(x, by=2).tolist() == [10, 10, 10]
    assert Scaler.scale(one, x).tolist() == [2, 2, 2]
    assert one.double(x).tolist() == Scaler.double(x).tolist() == [2, 2, 2]
    assert one.times(x).tolist() == [2, 2, 2]
    assert str(inspect.signature(one.scale)) == "(x, by: int = 1)"
    assert pt.explain(one.scale, show=False).graphs > 0


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    @pt.compile(backend="xla")
    def forward(self, x):
        return self.layer(x)


def test_the_forward_of_a_class_can_be_compiled():
    one, other, x = Decorated(), Decorated(), torch.randn(2, 3)
    for module in (one, other, one):
        same(module(x), module.layer(x))
    module = copy.deepcopy(one)
    same(module(x), one(x))
    one.forward = pt.compile(one.forward, backend="xla")
    same(one(x), one.layer(x))


@pt.compile(backend="xla")
def doubled(x):
    return x * 2


def test_a_decorated_function_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert copy.deepcopy(doubled) is doubled
    assert doubled.__code__.co_name == "doubled"


# --- state of the process, and of recurrent layers -------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [lambda x: x > 16777216.5, lambda x: x * 0.1, lambda x: x / 3, lambda x: x.sqrt(), lambda x: torch.ones(2) + x],
    ids=["comparison", "product", "quotient", "root", "constant"],
)
def test_the_default_dtype_may_change_between_calls(function):
    x = torch.tensor([16777216, 16777217])
    compiled = xla(function)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16):
            torch.set_default_dtype(dtype)
            found, wanted = compiled(x), function(x)
            assert found.dtype == wanted.dtype
            same(found, wanted)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "change", [lambda m: m.double(), lambda m: setattr(m, "batch_first", True)], ids=["dtype", "attribute"]
)
def test_a_recurrent_layer_may_change_at_sizes_seen_before(kind, change):
    model = kind(4, 4)
    compiled, x = xla(model), torch.randn(3, 3, 4)
    compiled(x)
    change(model)
    x = x.to(model.weight_hh_l0.dtype)
    same(compiled(x)[0], model(x)[0])
    assert not pt.explain(compiled, show=False).fallbacks


def test_an_integer_that_counts_calls_is_captured_as_one_that_varies():
    compiled, x = xla(Net()), torch.randn(2, 4)
    for _ in range(12):
        compiled(x)
    assert compiled.calls == 12
    explanation = pt.explain(compiled, show=False)
    assert explanation.graphs <= 2
    assert not explanation.fallbacks


# --- what is told of it ----------------------------------------------------------------------------------------------


def test_captures_that_were_given_up_are_not_counted():
    compiled = xla(lambda x: x.sin().nonzero().float().cos(), fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), pytest.raises(pt.errors.UnsupportedOpError):
        compiled(torch.randn(4))
    explanation = pt.explain(compiled, show=False)
    assert (explanation.graphs, explanation.compiles, explanation.ops) == (0, [], {})
