"""Every op, on every one of its samples: its values, its gradients, and the ways in which torch captures it."""

import itertools

import pytest
import torch
from torch.utils import _pytree as pytree

import portable as pt
from portable import ops
from portable.errors import OpArgumentError

NAMES = ops.names()
HALF = (torch.float16, torch.bfloat16)

# By the narrowest floating dtype of the arguments, relative to the value and, for sums that cancel, to the largest.
TOLERANCE = {
    torch.float64: 1e-12,  # a sum in another order
    torch.float32: 1e-5,  # sums of up to a few hundred float32 products
    torch.float16: 2e-3,  # one rounding is 2^-11; attention and the fused loss round their weights or logits too
    torch.bfloat16: 1.6e-2,  # the same with 2^-8
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """The tests compile one code object for every op: each is a recompilation otherwise."""
    yield
    torch._dynamo.reset()


def samples(name):
    return list(getattr(ops, name).samples())


CASES = [(name, i) for name in NAMES for i in range(len(samples(name)))]


def tensors(value):
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def floats(value):
    return [x for x in tensors(value) if x.is_floating_point()]


def narrowest(value):
    return min((x.dtype for x in floats(value)), key=lambda d: (d.itemsize, -torch.finfo(d).eps))


def converted(value, change):
    """``value`` with ``change`` applied to each floating tensor."""
    keep = lambda x: change(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    return pytree.tree_map(keep, value)


def finite(sample):
    return all(x.isfinite().all() for x in floats(sample))


def tiny(name):
    """The first samples with finite values and something in them, in float64."""
    good = [s for s in samples(name) if finite(s) and narrowest(s) not in HALF and all(x.numel() for x in floats(s))]
    return [converted(s, lambda x: x.double()) for s in good[:4]]


def agree(got, want, dtype, slack=1):
    rtol = slack * TOLERANCE[dtype]
    for g, w in zip(tensors(got), tensors(want), strict=True):
        assert g.shape == w.shape
        if not w.is_floating_point():
            assert torch.equal(g, w)
            continue
        g, w = g.double(), w.double()
        scale = w[w.isfinite()].abs().max().item() if w.isfinite().any() else 0.0
        torch.testing.assert_close(g, w, rtol=rtol, atol=rtol * scale, equal_nan=True)


@pytest.mark.parametrize(("name", "i"), CASES)
def test_the_reference_agrees_with_itself_in_float64(name, i):
    args, kwargs = samples(name)[i]
    exact_args, exact_kwargs = converted((args, kwargs), lambda x: x.double())
    op = getattr(ops, name)
    got = op(*args, **kwargs)
    agree(got, op(*exact_args, **exact_kwargs), narrowest((args, kwargs)))


@pytest.mark.parametrize("name", NAMES)
def test_no_argument_is_written_to_and_samples_are_the_same_each_time(name):
    for used, fresh in zip(samples(name), samples(name), strict=True):
        getattr(ops, name)(*used[0], **used[1])
        assert all(
            torch.equal(u.nan_to_num(), f.nan_to_num()) for u, f in zip(tensors(used), tensors(fresh), strict=True)
        )


@pytest.mark.parametrize("name", NAMES)
def test_samples_cover_empty_strided_half_precision_and_special_values(name):
    every = samples(name)
    assert any(x.numel() == 0 for s in every for x in tensors(s))
    assert any(not x.is_contiguous() for s in every for x in tensors(s))
    assert {d for d in HALF if any(x.dtype == d for s in every for x in floats(s))} == set(HALF)
    assert any(x.isnan().any() for s in every for x in floats(s))


@pytest.mark.parametrize("form", ["reference", "overload"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_finite_differences(name, form):
    function = getattr(getattr(ops, name), form)
    for args, kwargs in tiny(name):
        leaves, tree = pytree.tree_flatten((args, kwargs))
        where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()]

        def call(*inputs, leaves=leaves, where=where, tree=tree):
            values = list(leaves)
            for i, x in zip(where, inputs, strict=True):
                values[i] = x
            a, k = pytree.tree_unflatten(values, tree)
            return [out for out in tensors(function(*a, **k)) if out.is_floating_point()]

        inputs = [leaves[i].detach().clone().requires_grad_() for i in where]
        assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def every_sample(name):
    op = getattr(ops, name)
    return lambda batch: [op(*args, **kwargs) for args, kwargs in batch]


def eager(name):
    return [getattr(ops, name)(*args, **kwargs) for args, kwargs in samples(name)]


def all_agree(got, name):
    for g, w, s in zip(got, eager(name), samples(name), strict=True):
        assert [x.dtype for x in tensors(g)] == [x.dtype for x in tensors(w)]
        agree(g, w, narrowest(s))


@pytest.mark.parametrize("name", NAMES)
def test_torch_compile_captures_it_whole(name):
    compiled = torch.compile(every_sample(name), backend="aot_eager", fullgraph=True)
    all_agree(compiled(samples(name)), name)


@pytest.mark.parametrize("name", NAMES)
def test_torch_export_captures_it_as_aten(name):
    class Model(torch.nn.Module):
        def forward(self, batch):
            return every_sample(name)(batch)

    exported = torch.export.export(Model(), (samples(name),))
    namespaces = {n.target.namespace for n in exported.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    assert namespaces <= {"aten"}
    all_agree(exported.module()(samples(name)), name)


@pytest.mark.parametrize("name", NAMES)
def test_the_xla_backend_agrees_with_eager(name):
    compiled = pt.compile(every_sample(name), backend="xla", fullgraph=True)
    all_agree(compiled(samples(name)), name)


def gradients(function, batch):
    batch = converted(batch, lambda x: x.detach().clone().requires_grad_())
    outs = [x for x in floats(function(batch)) if x.requires_grad]
    # a gradient other than one for each element; torch's CPU kernels want it contiguous in the dtype of the result
    together = sum((x.double() * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in outs)
    return torch.autograd.grad(together, floats(batch), allow_unused=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_xla_backend_trains_as_eager_does(name):
    # the gradient through the norm of a single value is zero, computed as a difference: rounding errors alone
    batch = [s for s in samples(name) if finite(s) and not any(x.shape[-1:] == (1,) for x in floats(s))]
    want = gradients(every_sample(name), batch)
    got = gradients(pt.compile(every_sample(name), backend="xla", fullgraph=True), batch)
    owners = [narrowest(s) for s in batch for _ in floats(s)]
    for g, w, dtype in zip(got, want, owners, strict=True):
        agree(g, w, dtype, slack=10)  # differences of sums


@pytest.mark.parametrize("form", ["reference", "overload"])
@pytest.mark.parametrize("name", NAMES)
def test_vmap_is_a_loop(name, form):
    function = getattr(getattr(ops, name), form)
    for args, kwargs in tiny(name):
        batched = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in (*args, *kwargs.values())]
        stack = lambda x: torch.stack([x, 2 * x, x - 1])  # noqa: E731
        many = converted([*args, *kwargs.values()], stack)

        def call(*values, keys=tuple(kwargs)):
            cut = len(values) - len(keys)
            return function(*values[:cut], **dict(zip(keys, values[cut:], strict=True)))

        got = torch.vmap(call, tuple(0 if b else None for b in batched))(*many)
        for i in range(3):
            want = call(*[x[i] if b else x for x, b in zip(many, batched, strict=True)])
            agree([x[i] for x in tensors(got)], want, torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_the_custom_op_is_well_formed(name):
    overload = getattr(ops, name).overload
    for args, kwargs in samples(name):
        torch.library.opcheck(overload, args, kwargs, test_utils=("test_schema", "test_faketensor"))
    for args, kwargs in itertools.islice(filter(finite, samples(name)), 2):
        args, kwargs = converted((args, kwargs), lambda x: x.detach().clone().requires_grad_())
        tests = ("test_autograd_registration", "test_aot_dispatch_dynamic")
        torch.library.opcheck(overload, args, kwargs, test_utils=tests)


X = torch.ones(2, 4)
REFUSED = {
    "attention": [(X, X, X), (torch.ones(1, 3, 2, 4), torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4))],
    "embedding_bag": [
        (X, torch.zeros(2, 2, dtype=torch.int64), torch.zeros(1)),
        (X, torch.zeros(2), torch.zeros(1), "min"),
    ],
    "fused_linear_cross_entropy": [(X, torch.ones(5, 3), torch.zeros(2)), (X, X, torch.zeros(2), None, 0, 0.0, "max")],
    "geglu": [(X, torch.ones(2, 1)), (X, X, "sigmoid")],
    "int8_linear": [(X, X, torch.ones(2)), (X, torch.ones(3, 5, dtype=torch.int8), torch.ones(3))],
    "layer_norm": [(X, torch.ones(3)), (torch.ones(()),)],
    "moe_combine": [(X, torch.zeros(3, dtype=torch.int64), torch.ones(1, 2))],
    "moe_dispatch": [(X, torch.zeros(3, 1, dtype=torch.int64), 2)],
    "moe_route": [(X, 0), (X, 5)],
    "paged_kv_update": [(X, X, X, X, torch.zeros(2))],
    "rms_norm": [(X, torch.ones(3)), (torch.ones(()),)],
    "rotary_embedding": [(X, torch.ones(2, 3), torch.ones(2, 3)), (X, torch.ones(2, 2), torch.ones(2, 1))],
    "softmax_cross_entropy": [(X, torch.zeros(3)), (X, torch.zeros(2, dtype=torch.int64), -100, 0.0, "max")],
    "swiglu": [(X, torch.ones(2, 1)), (X, X.half())],
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_arguments_that_do_not_fit_are_refused_by_the_op_s_name(name):
    for args in REFUSED[name]:
        with pytest.raises(OpArgumentError, match=f"^{name}: (.|\n)*Remedy: "):
            getattr(ops, name)(*args)
