"""What `pt.explain` says, to people and to programs."""

import json

import pytest
import torch

import portable as pt
from portable.errors import UnsupportedInputError
from portable.explain import plain_name


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, features):
        return self.linear(features).relu()


def model() -> torch.nn.Module:
    return Model()


@pytest.fixture(scope="module")
def explanation():
    torch._dynamo.reset()  # forgets which sizes other models have changed
    compiled = pt.compile(model(), backend="xla")
    with torch.no_grad():
        compiled(torch.ones(2, 4))
        compiled(torch.ones(3, 4))
    return pt.explain(compiled, show=False)


def test_it_counts_the_ops_and_how_each_ran(explanation):
    assert explanation.ops["aten.addmm.default"] == {"lowered": 2}
    assert explanation.ops["aten.relu.default"] == {"lowered": 2}
    (chosen,) = explanation.decisions["aten.relu.default"]
    assert (chosen.n, chosen.runs_as, chosen.why) == (2, "portable", "unmeasured on this machine")


def test_it_times_each_compilation(explanation):
    first, second = explanation.compiles
    assert (first.kind, first.cause) == ("inference", "first call")
    assert "2, 4" in second.cause
    assert all(c.capture_s > 0 and c.lowering_s > 0 and c.compile_s > 0 for c in (first, second))


def test_its_headline_says_where_and_how_much(explanation):
    assert explanation.headline().startswith("Model on xla (stablehlo): 2 graphs, 0 breaks, 2 compilations (capture ")


def test_it_is_json(explanation):
    data = json.loads(json.dumps(explanation.to_dict()))
    assert data["backend"] == "xla"
    assert data["fallbacks"] == []
    assert [c["graph"] for c in data["compiles"]] == [0, 1]


def test_it_prints_a_table(capsys):
    compiled = pt.compile(model(), backend="xla")
    compiled(torch.ones(2, 4))
    shown = pt.explain(compiled)
    text = capsys.readouterr().out
    assert "aten.addmm" in text
    assert "fallbacks: none" in text
    assert "aten.addmm" in str(shown)


def test_before_the_first_call_there_is_nothing_to_tell():
    explanation = pt.explain(pt.compile(model(), backend="xla"), show=False)
    assert explanation.compiles == []
    assert str(explanation) == "Model on xla (stablehlo): not called yet: its first call compiles it"


@pytest.mark.parametrize(
    ("backend", "how", "indexing"),
    [("cpu", "inductor", "aten.select.int"), ("cpu:eager", "eager", "<built-in function getitem>")],
)
def test_python_on_sizes_and_on_several_results_is_no_op(backend, how, indexing):
    def several(x):
        values, _ = x.max(0)
        return torch.split(x, 2)[1] + x[0] * (x.shape[0] * 2) + values

    compiled = pt.compile(several, backend=backend, dynamic=True)
    compiled(torch.ones(4, 4))
    ops = pt.explain(compiled, show=False).ops
    assert ops[indexing] == {how: 1}  # x[0] alone
    assert sum(ops.get(name, {}).get(how, 0) for name in ("<built-in function mul>", "aten.mul.Tensor")) == 1
    assert ("<built-in function getitem>" in ops) == (backend == "cpu:eager")


def test_what_was_not_compiled_is_refused():
    with pytest.raises(UnsupportedInputError, match="was not made by portable.compile"):
        pt.explain(model())


def test_a_call_that_torch_compile_skips_is_counted_and_warned_of_once():
    compiled = pt.compile(lambda x: x + 1, backend="xla")
    with torch.compiler.set_stance("force_eager"):
        with pytest.warns(UserWarning, match="ran in eager, not on xla"):
            compiled(torch.ones(2))
        compiled(torch.ones(2))
    (fallback,) = pt.explain(compiled, show=False).fallbacks
    assert "torch.compile skipped" in fallback.reason


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['x']", "x"),
        ("L['self']._modules['layer']._modules['0']._parameters['weight']", "self.layer.0.weight"),
        ("L['x'].size()[1]", "x.shape[1]"),
        ("L['inputs']['ids']", "inputs['ids']"),
    ],
)
def test_names_are_the_users(source, name):
    assert plain_name(source) == name


def test_the_hlo_carries_module_path_and_source_line():
    from portable.backends import xla

    programs = []
    original = xla._Program.__init__

    def spy(self, client, lowered):
        original(self, client, lowered)
        programs.append(self)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x).cos()

    xla._Program.__init__ = spy
    try:
        pt.compile(Block(), backend="xla")(torch.ones(2, 4))
    finally:
        xla._Program.__init__ = original
    hlo = programs[0].executable.hlo()
    assert "inner/aten.addmm" in hlo
    assert "test_explain.py" in hlo
