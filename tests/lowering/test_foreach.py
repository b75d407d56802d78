"""Ops of lists of tensors, and what is made of them: compiled steps of optimisers."""

import copy

import pytest
import torch
from torch import nn
from torch.testing._internal import common_methods_invocations as database

import portable as pt
from portable.lowering import foreach, registry
from portable.testing import lowered
from tests.lowering.networks import assert_agree

OPS = [
    op
    for group in ("unary", "binary", "pointwise", "reduce", "other")
    for op in getattr(database, f"foreach_{group}_op_db")
]
WITHOUT = {"_foreach_addcdiv.Tensor", "_foreach_addcmul.Tensor"}  # numbers in a tensor decide what runs


def test_every_foreach_op_is_a_loop_or_known():
    packets = [getattr(torch.ops.aten, n) for n in dir(torch.ops.aten) if n.startswith("_foreach_")]
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::_foreach_")}
    packets += [getattr(torch.ops.aten, name.removeprefix("aten::")) for name in names]
    overloads = {getattr(p, o) for p in packets for o in p.overloads()}
    without = {
        f"{o._schema.name.removeprefix('aten::')}.{o._overloadname}"
        for o in overloads
        if not o._schema.is_mutable and "out" not in o._overloadname and registry.decomposition(o) is None
    }
    assert without == WITHOUT


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_lists(op, inplace):
    variant = op.inplace_variant if inplace else op.method_variant
    if variant is None:
        assert inplace or op.name in ("_foreach_zero", "_foreach_copy")
        return
    torch.manual_seed(0)
    dtype = torch.float32 if torch.float32 in op.supported_dtypes("cpu") else torch.int64
    tried = 0
    for sample in list(op.sample_inputs("cpu", dtype, num_input_tensors=[3]))[:6]:

        def call(tensors, *args, kwargs=sample.kwargs):
            tensors = [x.clone() for x in tensors]
            result = variant(tensors, *args, **kwargs)
            return list(tensors if inplace else result)

        try:
            want = call(sample.input, *sample.args)
        except RuntimeError:  # the sample is of a call that torch refuses
            continue
        for got, expected in zip(lowered(call, sample.input, *sample.args), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-5, equal_nan=True)  # sums in another order
        tried += 1
    assert tried


def test_gradients():
    def weighed(x, y):
        return torch._foreach_norm(torch._foreach_addcmul([x, y], [y, x], [x, x], value=0.5))

    assert_agree(weighed, torch.randn(3, 4), torch.randn(3, 4))


def test_a_mutable_op_is_no_loop():
    assert foreach.decomposition(torch.ops.aten._foreach_add_.Scalar) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.Adam(p, foreach=True),
        lambda p: torch.optim.Adam(p, foreach=False),
        lambda p: torch.optim.RMSprop(p, foreach=True),
    ],
    ids=["sgd", "adam", "adam of single tensors", "rmsprop"],
)
def test_the_compiled_step_of_an_optimiser(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    twin, x = copy.deepcopy(model), torch.randn(8, 4)
    eager, optimiser = make(model.parameters()), make(twin.parameters())
    step = pt.compile(optimiser.step, backend="xla", fallback="error")
    for _ in range(3):
        for network, advance in ((model, eager.step), (twin, step)):
            network.zero_grad()
            network(x).square().sum().backward()
            advance()
    for want, got in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, want)
    assert pt.explain(step).ops


def test_a_factor_in_place():
    def multiplied(x, y, z):
        x = x.clone()
        return x.addcmul_(y, z, value=0.3).addcdiv_(y, z, value=-2.0)

    args = torch.randn(3, 4), torch.randn(3, 4), torch.rand(3, 1) + 1
    torch.testing.assert_close(pt.compile(multiplied, backend="xla", fallback="error")(*args), multiplied(*args))
    assert_agree(multiplied, *args)
