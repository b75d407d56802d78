"""`pt.coverage`: what runs where, by op and line, for targets that need not be here."""

import json

import pytest
import torch
from typer.testing import CliRunner

import portable as pt
from portable import cli
from portable.errors import ConfigError
from portable.lowering.coverage import ALL, platform_of


class Readout(torch.nn.Module):
    """One op of each way to run."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        y = torch.nn.functional.hardshrink(y)
        values = torch.linalg.eigvals(y @ y.mT)
        order = y.to(torch.int16).flatten().repeat(2).sort().indices
        return values.abs(), order


@pytest.fixture(scope="module")
def found():
    return pt.coverage(Readout(), (torch.randn(4, 4),))


def hows(found, target, op):
    return {use.how for use in found.uses[target] if use.op == op}


def test_all_is_the_cpu_a_gpu_and_a_tpu(found):
    assert tuple(found.uses) == ALL == ("xla:cpu", "xla:cuda", "tpu")


def test_what_has_a_lowering_is_lowered_everywhere(found):
    assert all(hows(found, target, "aten.addmm.default") == {"lowered"} for target in ALL)


def test_an_op_without_an_exact_lowering_falls_back_on_the_host_alone(found):
    assert hows(found, "xla:cpu", "aten.sort.default") == {"aten fallback"}
    assert hows(found, "tpu", "aten.sort.default") == {"refused"}


def test_what_xla_lacks_on_a_platform_is_named_as_the_op_with_the_users_line(found):
    assert hows(found, "xla:cpu", "aten.linalg_eig.default") | hows(found, "xla:cpu", "aten._linalg_eigvals.default")
    (refused,) = [use for use in found.refused("tpu") if "eig" in use.op]
    assert "XLA has no eig on tpu" in refused.reason
    assert refused.where.startswith("test_coverage.py:")
    assert refused.where.endswith("in forward")


def test_complete_says_whether_anything_is_refused(found):
    assert not found.complete
    assert pt.coverage(torch.nn.ReLU(), (torch.ones(2),)).complete


def test_it_prints_and_is_json(found):
    text = str(found)
    assert "refused on tpu: " in text
    assert "aten.addmm" in text
    data = json.loads(json.dumps(found.to_dict()))
    assert {row["how"] for row in data["targets"]["xla:cpu"]} >= {"lowered", "aten fallback"}


def test_the_backward_pass_is_surveyed_on_request():
    layer, x = torch.nn.LayerNorm(4), torch.randn(2, 4)
    op = "aten.native_layer_norm_backward.default"
    assert not hows(pt.coverage(layer, (x,), targets="xla"), "xla", op)
    assert hows(pt.coverage(layer, (x,), targets="xla", backward=True), "xla", op) == {"lowered"}
    assert layer.weight.grad is None


def test_the_backward_pass_of_what_a_function_closes_over_is_surveyed():
    layer, x = torch.nn.LayerNorm(4), torch.randn(2, 4)
    surveyed = pt.coverage(lambda x: layer(x), (x,), targets="xla", backward=True)
    assert hows(surveyed, "xla", "aten.native_layer_norm_backward.default") == {"lowered"}


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_the_backward_pass_of_a_recurrent_layer_is_surveyed(layer):
    surveyed = pt.coverage(layer(4, 4), (torch.randn(3, 2, 4),), targets="xla", backward=True)
    assert hows(surveyed, "xla", "recurrent_layer_backward") == {"lowered"}


@pytest.mark.parametrize("survey", [pt.coverage, pt.check])
def test_a_tensor_in_place_of_the_tuple_of_arguments_is_refused(survey):
    with pytest.raises(pt.errors.ConfigError, match="args is a tensor"):
        survey(torch.nn.Linear(4, 4), torch.randn(1, 4))


def test_graph_breaks_are_listed():
    def broken(x):
        torch._dynamo.graph_break()
        return x.relu()

    (found,) = pt.coverage(lambda x: broken(x + 1) * 2, (torch.ones(2),), targets="xla").graph_breaks
    assert found.where.startswith("test_coverage.py:")


@pytest.mark.parametrize(
    ("target", "platform"),
    [("xla", "cpu"), ("xla:cuda", "cuda"), ("tpu", "tpu"), ("tpu:v5e:2x2", "tpu"), ("cuda:h200", "cuda")],
)
def test_a_target_names_a_platform(target, platform):
    assert platform_of(target) == platform


@pytest.mark.parametrize("target", ["", "cpu", "xpu", "xla:abacus", "tpuu"])
def test_another_target_is_refused_with_the_legal_ones(target):
    with pytest.raises(ConfigError, match="name some of xla"):
        pt.coverage(torch.nn.ReLU(), (torch.ones(2),), targets=[target])


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "made.py"
    relu, eig = (
        f"def {n}(): return {f}, (torch.eye(2),)" for n, f in (("relu", "torch.relu"), ("eig", "torch.linalg.eigvals"))
    )
    path.write_text(f"import torch\n{relu}\n{eig}\n")
    return path


def test_the_command_ends_with_1_if_something_is_refused(model_file):
    run = CliRunner().invoke
    assert run(cli.app, ["coverage", f"{model_file}:relu"]).exit_code == 0
    result = run(cli.app, ["coverage", f"{model_file}:eig", "--target", "tpu", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["complete"] is False
