"""Programs of many shapes, compiled for xla: what goes in, what comes out, what is written, what is trained."""

import collections
import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import portable as pt
from portable.errors import RecompileError, UnsupportedInputError, UnsupportedOpError
from portable.testing import lowered


def xla(fn, **options):
    return pt.compile(fn, backend="xla", **options)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight  # tied

    def forward(self, ids, scale=1.0):
        x = self.norm(self.embedding(ids).mean(1)) * scale
        return {"logits": self.out(torch.tanh(x)), "hidden": x}


def clones(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    import copy

    return module, copy.deepcopy(module)


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Box:
    low: torch.Tensor
    high: torch.Tensor
    name: str = "box"


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"a": x + 1, "b": [x * 2, (x - 1,)]},
        lambda x: Point(x + 1, x * 2),
        lambda x: Box(x - 1, x + 1),
        lambda x: (x, x.t(), x[0], x.shape[0], "name", None, 2.5),
        lambda x: x.shape,
        lambda x: (),
    ],
    ids=["dict", "namedtuple", "dataclass", "mixed", "sizes", "nothing"],
)
@pytest.mark.filterwarnings("ignore:.*ran in eager")
def test_outputs_keep_their_structure(make):
    x = torch.arange(6.0).reshape(2, 3)
    got, want = xla(make)(x), make(x)
    assert type(got) is type(want)
    for g, w in zip(leaves(got), leaves(want), strict=True):
        torch.testing.assert_close(g, w) if isinstance(w, torch.Tensor) else check_equal(g, w)


def leaves(tree):
    return pytree.tree_leaves(vars(tree) if dataclasses.is_dataclass(tree) else tree)


def check_equal(got, want):
    assert got == want


def test_a_view_of_an_argument_stays_a_view():
    x = torch.zeros(2, 3)
    view = xla(lambda x: x.t()[1])(x)
    x.fill_(5)
    assert torch.equal(view, torch.full((2,), 5.0))


def write_slice(x):
    x[:, 1:] += 2
    return x.sum()


def write_view(x):
    y = x.view(-1)
    y[::2] = -1
    return y[0] + x[1, 1]


def write_twice(x):
    x.mul_(2)
    y = x * 3
    x.sub_(1)
    return y


@pytest.mark.parametrize("fn", [write_slice, write_view, write_twice], ids=lambda f: f.__name__)
def test_written_arguments_are_written(fn):
    x = torch.arange(6.0).reshape(2, 3)
    y = x.clone()
    torch.testing.assert_close(xla(fn)(x), fn(y))
    torch.testing.assert_close(x, y)


def test_a_written_argument_may_be_a_strided_view():
    base, other = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4)
    torch.testing.assert_close(xla(write_twice)(base.t()[1:]), write_twice(other.t()[1:]))
    torch.testing.assert_close(base, other)


def test_training_matches_eager_with_tied_weights_and_buffers():
    torch.manual_seed(0)
    eager, other = clones(TwoHeads())
    compiled = xla(other)
    ids = torch.randint(0, 11, (8, 5))
    optimisers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (eager, compiled)]
    for _ in range(5):
        losses = []
        for m, optimiser in zip((eager, compiled), optimisers, strict=True):
            optimiser.zero_grad()
            out = m(ids, scale=0.5)
            loss = nn.functional.cross_entropy(out["logits"], ids[:, 0]) + out["hidden"].square().mean()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert_same_state(eager, other)
    assert pt.explain(compiled, show=False).fallbacks == []


def test_evaluation_under_no_grad_and_inference_mode():
    model = TwoHeads().eval()
    compiled = xla(model)
    ids = torch.randint(0, 11, (8, 5))
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids)["logits"], model(ids)["logits"])
    with torch.inference_mode():
        out = compiled(ids)["logits"]
        torch.testing.assert_close(out, model(ids)["logits"])
        assert out.is_inference()


def test_the_gradient_of_an_input_and_of_a_part_of_the_outputs():
    fn = lambda x, w: (x @ w, (x * 2).sum(), x.detach())  # noqa: E731
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2)
    outputs = xla(fn)(x, w)
    assert [o.requires_grad for o in outputs] == [True, True, False]
    (got,) = torch.autograd.grad(outputs[0].sin().sum(), x)
    (want,) = torch.autograd.grad(fn(x, w)[0].sin().sum(), x)
    torch.testing.assert_close(got, want)


def test_dropout_is_reproducible_by_seed_and_differs_between_calls():
    compiled = xla(nn.Dropout(0.5).train())
    x = torch.ones(1000)
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    again = compiled(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert first.count_nonzero() == pytest.approx(500, abs=80)


def test_the_backward_pass_sees_the_forward_passs_dropout_mask():
    compiled = xla(lambda x: nn.functional.dropout(x, 0.5).square())
    x = torch.ones(256, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)


def test_a_compiled_module_is_the_module():
    model = TwoHeads()
    compiled = xla(model)
    assert isinstance(compiled, nn.Module)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in model.parameters()]
    assert compiled.eval() is compiled
    assert not model.training
    compiled.load_state_dict(TwoHeads().state_dict())
    compiled.note = "set on both"
    assert model.note == "set on both"
    seen = []
    compiled.register_forward_hook(lambda m, a, out: seen.append(type(m)))
    compiled(torch.randint(0, 11, (2, 5)))
    assert seen == [TwoHeads]


def test_a_compiled_module_can_be_copied_and_pickled():
    import copy
    import pickle

    compiled = xla(nn.Linear(3, 3))
    x = torch.ones(2, 3)
    for twin in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        torch.testing.assert_close(twin(x), compiled(x))
        assert twin.weight is not compiled.weight
        assert pt.explain(twin, show=False).backend == "xla"


def test_a_compiled_model_inside_a_compiled_model_is_one_graph():
    inner = xla(nn.Linear(3, 3))
    outer = xla(lambda x: inner(x).relu())
    x = torch.ones(2, 3)
    torch.testing.assert_close(outer(x), inner(x).relu())
    assert pt.explain(outer, show=False).graphs == 1


def test_a_decorated_function():
    @pt.compile(backend="xla")
    def double(x):
        """Twice x."""
        return x * 2

    assert double.__name__ == "double"
    assert double.__doc__ == "Twice x."
    assert double(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("value", "word", "remedy"),
    [
        (torch.eye(3).to_sparse(), "sparse", "to_dense"),
        (torch.eye(3).to_sparse_csr(), "sparse", "to_dense"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested", "to_padded_tensor"),
        (torch.ones(3, device="meta"), "meta", "to_empty"),
    ],
    ids=["coo", "csr", "nested", "meta"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_that_no_program_takes_is_refused_by_name(value, word, remedy):
    compiled = xla(lambda x, y: (x * 2, y * 2))
    with pytest.raises(UnsupportedInputError, match=f"(argument 1|y) is .*{word}(.|\n)*Remedy: .*{remedy}"):
        compiled(torch.ones(2), value)
    with pytest.raises(UnsupportedInputError, match=f"y is .*{word}"):
        compiled(torch.ones(2), y=value)


def test_a_model_on_meta_is_refused_by_the_parameters_name():
    with pytest.raises(UnsupportedInputError, match="weight is on the meta device(.|\n)*to_empty"):
        xla(nn.Linear(2, 2, device="meta"))(torch.ones(1, 2))


@pytest.mark.parametrize("value", [3, "text", None])
def test_what_is_not_callable_is_refused(value):
    if value is None:
        assert callable(pt.compile(value))
        return
    with pytest.raises(UnsupportedInputError, match="not callable"):
        xla(value)


def test_an_op_without_a_lowering_is_refused_with_the_users_line():
    with torch.library._scoped_library("portable_test", "FRAGMENT") as library:
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", lambda x: x * 2, "CPU")
        library.impl("unknown", torch.empty_like, "Meta")

        def readout(x):
            return torch.ops.portable_test.unknown(x) + 1

        with pytest.raises(
            UnsupportedOpError, match=r"portable_test.unknown.default \(test_capture.py:\d+, in readout\)"
        ):
            xla(readout, fallback="error")(torch.ones(3))


def test_an_unsupported_dtype_is_refused_by_name():
    x = torch.ones(3, dtype=torch.complex64).to(torch.complex32)
    with pytest.raises((UnsupportedInputError, UnsupportedOpError), match="complex32"):
        xla(lambda t: t.clone())(x)


def test_a_graph_break_is_explained_with_its_line():
    def readout(x):
        y = x.sin()
        return y[torch.nonzero(y > 0)].sum()

    compiled = xla(readout)
    torch.testing.assert_close(compiled(torch.ones(3)), readout(torch.ones(3)))
    breaks = pt.explain(compiled, show=False).graph_breaks
    assert len(breaks) == 1
    assert "Dynamic shape operator" in breaks[0].reason
    assert "test_capture.py" in breaks[0].where


def test_a_size_that_depends_on_data_is_refused_in_a_full_graph():
    with pytest.raises(UnsupportedOpError, match=r"aten.nonzero.default(.|\n)*depends on the data"):
        xla(lambda x: x[torch.nonzero(x > 0)].sum(), fullgraph=True)(torch.ones(3))


def test_one_capture_serves_all_sizes_and_each_compilation_says_why():
    compiled = xla(lambda x: (x * x.shape[0]).cumsum(0))
    for n in (3, 5, 7, 9, 5, 3):
        x = torch.randn(n, 2)
        torch.testing.assert_close(compiled(x), (x * n).cumsum(0))
    explanation = pt.explain(compiled, show=False)
    assert [c.cause for c in explanation.compiles][:4] == [
        "first call",
        "x: float32[3, 2] → float32[5, 2]",
        "x.shape[0]: 5 → 7",
        "x.shape[0]: 7 → 9",
    ]
    assert len(explanation.compiles) <= 5  # the first size may be compiled again for the capture of all sizes
    assert explanation.graphs == 2


def test_a_frozen_model_refuses_a_new_compilation_and_says_what_changed():
    compiled = xla(nn.Linear(2, 2))
    with torch.no_grad():
        compiled(torch.ones(3, 2))
        compiled.freeze()
        compiled(torch.ones(3, 2))
        with pytest.raises(
            RecompileError, match=r"Linear is frozen(.|\n)*(float32\[3, 2\] → float32\[4, 2\]|shape\[0\]: 3 → 4)"
        ):
            compiled(torch.ones(4, 2))
        compiled(torch.ones(3, 2))


@pytest.mark.parametrize("backend", ["cpu", "cpu:eager", "xla"])
def test_the_same_script_on_every_backend(backend):
    torch.manual_seed(0)
    eager, other = clones(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)))
    compiled = pt.compile(other, backend=backend)
    x = torch.randn(16, 4)
    for m in (eager, compiled):
        m(x).square().mean().backward()
    for p, q in zip(eager.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    explanation = pt.explain(compiled, show=False)
    assert explanation.backend == backend
    assert explanation.compiles
    assert explanation.ops


def test_a_compiled_model_leaves_memory_with_its_last_reference():
    model = nn.Linear(3, 2)
    xla(model)(torch.ones(1, 3))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_overlapping_arguments_without_a_known_base_are_refused():
    base = torch.arange(12.0)
    left, right = copy.deepcopy((base[:6], base[3:9]))  # they share a storage, but no longer a base
    with pytest.raises(UnsupportedInputError, match="overlap in memory"):
        xla(lambda x, y: x.add_(1) * y)(left, right)
    torch.testing.assert_close(
        xla(lambda x, y: x.add_(1) * y)(base[:6], base[3:9])[:3], torch.tensor([4.0, 10.0, 18.0])
    )


def test_a_write_to_a_tensor_that_overlaps_itself_is_refused_by_name():
    with pytest.raises(UnsupportedOpError, match="elements share memory"):
        lowered(lambda x: x.unfold(0, 3, 1).zero_(), torch.ones(5))
