"""`pt.check`: models compiled by libtpu for TPUs that are not here."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import portable as pt
from portable.backends import deviceless, targets
from portable.cli import app
from portable.errors import BackendUnavailableError, ConfigError, UnsupportedInputError

pytestmark = pytest.mark.compiles_for("tpu:v5e:2x2")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("PORTABLE_CACHE_DIR", str(folder))
        yield folder


def network(n=256, layers=2, device=None, dtype=None):
    return nn.Sequential(*[nn.Linear(n, n, device=device, dtype=dtype) for _ in range(layers)])


DIRECTLY = """
import json, os, sys
import jax, numpy as np
from jax.experimental import topologies
topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
one = jax.sharding.SingleDeviceSharding(topology.devices[0])
def linear(x, w, b):
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision="highest") + b
f = jax.jit(linear, in_shardings=one, out_shardings=one)
shapes = [(16, 512), (256, 512), (256,)]
memory = f.lower(*[jax.ShapeDtypeStruct(s, np.float32) for s in shapes]).compile().memory_analysis()
json.dump([memory.argument_size_in_bytes, memory.output_size_in_bytes], sys.stdout)
"""


def test_memory_is_what_the_compiler_says_of_the_same_function_written_in_jax():
    environment = {**os.environ, **deviceless.ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", DIRECTLY], env=environment, capture_output=True, text=True, check=True)
    arguments, outputs = json.loads(done.stdout.splitlines()[-1])
    (program,) = pt.check(nn.Linear(512, 256), (torch.randn(16, 512),), target="tpu:v5e")["tpu:v5e:2x2"].programs
    seed = 512  # ours takes a random seed as well: eight bytes, in a tile of their own
    assert arguments <= program.argument_bytes <= arguments + seed
    assert program.output_bytes == outputs
    assert program.flops == {"float32": 2.0 * 16 * 512 * 256}


def test_a_model_that_fits_says_so_for_every_target():
    found = pt.check(network(), (torch.randn(16, 256),), target=["tpu:v5e", "tpu:v6e:2x2"])
    assert found.ok
    assert list(found.verdicts) == ["tpu:v5e:2x2", "tpu:v6e:2x2"]
    weights = 2 * (256 * 256 + 256) * 4
    for verdict in found.verdicts.values():
        assert verdict.compiles
        assert verdict.needed_bytes > weights
        assert 0 < verdict.seconds < 1e-3
    assert "✓" in str(found)


def test_a_model_that_does_not_fit_says_by_how_much_and_its_weights_are_never_made():
    with torch.device("meta"):
        model, x = network(32768, 10), torch.randn(8, 32768)  # 43 GB of weights
    found = pt.check(model, (x,), target="tpu:v5e")
    verdict = found["tpu:v5e:2x2"]
    assert verdict.compiles
    assert not verdict.fits
    assert verdict.needed_bytes > 10 * 32768**2 * 4 > verdict.memory_bytes
    assert "RESOURCE_EXHAUSTED" in verdict.problem
    assert verdict.batch == 0
    assert "does not fit, by" in str(found)


@pytest.mark.slow
def test_the_batch_that_is_predicted_to_fit_does():
    def batch(n):
        return pt.check(network(512), (torch.empty(n, 512, device="meta"),), target="tpu:v5e")["tpu:v5e:2x2"]

    predicted = batch(10_000_000).batch
    assert 100_000 < predicted < 10_000_000
    assert not batch(10_000_000).fits
    assert batch(int(0.95 * predicted)).fits


def test_the_model_is_left_as_it_was():
    model, x = network(), torch.randn(4, 256)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    want = model(x)
    pt.check(model, (x,), target="tpu:v5e")
    assert all(id(p) == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    assert torch.equal(model(x), want)


def test_the_backward_pass_is_a_program_of_its_own():
    (verdict,) = pt.check(network(), (torch.randn(4, 256),), target="tpu:v5e", backward=True).verdicts.values()
    assert len(verdict.programs) == 2
    assert verdict.programs[1].output_bytes >= 2 * 256 * 256 * 4  # the gradients of the weights


def test_what_has_no_lowering_is_named_with_the_users_line():
    found = pt.check(torch.linalg.matrix_exp, (torch.eye(3),), target="tpu:v5e")
    (verdict,) = found.verdicts.values()
    assert not verdict.compiles
    assert [op.op for op in verdict.refused] == ["aten.linalg_matrix_exp.default"]
    assert "refused: aten.linalg_matrix_exp.default" in str(found)


def scores(q, k):
    return nn.functional.scaled_dot_product_attention(q, k, k)


def test_emulated_dtypes_and_narrow_heads_are_noted_with_the_users_line():
    q = torch.randn(1, 2, 16, 64)
    (verdict,) = pt.check(scores, (q, q), target="tpu:v5e").verdicts.values()
    assert [n.text for n in verdict.notes] == ["head size 64 leaves 50% of a 128-wide lane empty"]
    assert "test_check.py" in verdict.notes[0].where[0]
    (verdict,) = pt.check(torch.cumsum, (torch.ones(8, dtype=torch.int64), 0), target="tpu:v5e").verdicts.values()
    assert [n.text for n in verdict.notes] == ["int64 is emulated as pairs of int32"]


def test_a_sharded_program_says_what_it_communicates():
    found = pt.check(network(512), (torch.randn(64, 512),), target="tpu:v5e:4x4", mesh={"batch": 4, "tensor": 4})
    (verdict,) = found.verdicts.values()
    assert verdict.fits
    assert verdict.collectives
    whole = 2 * (512 * 512 + 512) * 4 + 64 * 512 * 4
    assert verdict.programs[0].argument_bytes < whole / 3
    assert "on a mesh of 4 (batch) × 4 (tensor)" in str(found)


def test_a_mesh_has_to_be_the_whole_slice():
    with pytest.raises(ConfigError, match="is 4 devices, the mesh is 8"):
        pt.check(network(), (torch.randn(8, 256),), target="tpu:v5e", mesh={"batch": 8})


def test_one_chip_is_a_slice_and_one_that_does_not_exist_is_refused():
    assert pt.check(torch.tanh, (torch.ones(4),), target="tpu:v5e:1x1").ok
    with pytest.raises(ConfigError, match="tpu:v5e:3x3 is no slice that its compiler knows"):
        pt.check(torch.tanh, (torch.ones(4),), target="tpu:v5e:3x3")


class PartlyInEager(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(1 << 17, 1 << 17, device="meta")
        self.last = nn.Linear(8, 8, device="meta")

    @torch.compiler.disable
    def eager(self, x):
        return self.hidden(x)

    def forward(self, x):
        return self.last(self.eager(x)[:, :8])


def test_weights_that_no_program_takes_count_all_the_same():
    found = pt.check(PartlyInEager(), (torch.empty(2, 1 << 17, device="meta"),), target="tpu:v5e")
    (verdict,) = found.verdicts.values()
    assert verdict.needed_bytes > (1 << 34) * 4
    assert not found.ok
    assert "graph break" in str(found)


def test_a_model_of_which_nothing_is_compiled_is_not_ok():
    found = pt.check(torch.compiler.disable(nn.Linear(4, 4)), (torch.ones(2, 4),), target="tpu:v5e")
    assert not found.ok
    assert "no part of the model was compiled" in str(found)
    assert not pt.check(lambda x: x, (torch.ones(2),), target="tpu:v5e").ok


def test_training_counts_the_weights_once():
    with torch.device("meta"):
        model, x = network(16384, 4), torch.randn(8, 16384)
    (verdict,) = pt.check(model, (x,), target="tpu:v5e", backward=True).verdicts.values()
    weights = 4 * (16384 * 16384 + 16384) * 4
    assert 2 * weights < verdict.needed_bytes < 2.2 * weights  # and their gradients
    assert verdict.batch > 100  # activations are small beside them


def test_a_backward_pass_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="has no backward pass"):
        pt.check(network().requires_grad_(False), (torch.randn(4, 256),), target="tpu:v5e", backward=True)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.seen = nn.Linear(4, 4), 0, None

    def forward(self, x):
        self.calls, self.seen = self.calls + 1, x
        return self.linear(x)


def test_what_a_model_remembers_of_the_check_stays_in_the_check():
    model = Remembers()
    pt.check(model, (torch.ones(2, 4),), target="tpu:v5e")
    assert (model.calls, model.seen) == (0, None)


def test_threads_may_check_one_model_at_once():
    model = nn.Linear(16, 16)
    threads = [
        threading.Thread(target=pt.check, args=(model, (torch.ones(n, 16),), None, "tpu:v5e")) for n in (1, 2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert type(model.weight) is nn.Parameter
    assert type(model.weight.data) is torch.Tensor


@pytest.mark.parametrize(
    "broken", ["{", "[]", '{"collectives": {}}', '{"a": ' * 5000, "argument_bytes -5", "flops []", 'seconds "fast"']
)
def test_a_kept_result_that_is_none_is_refused(broken):
    name, _, value = broken.partition(" ")
    whole = asdict(deviceless.Compiled())
    text = json.dumps({**whole, name: json.loads(value)}) if name in whole else broken
    with pytest.raises((ValueError, RecursionError)):
        deviceless._from_json(text)


def depends_on_values(x):
    torch._dynamo.graph_break()
    return x * 2 if x.sum() > 0 else x - 1


def test_a_model_whose_control_flow_depends_on_values_is_called_with_its_values():
    found = pt.check(depends_on_values, (torch.ones(4),), target="tpu:v5e")
    assert found.ok
    with pytest.raises(UnsupportedInputError, match="depends on values"):
        pt.check(depends_on_values, (torch.ones(4, device="meta"),), target="tpu:v5e")


def test_a_result_is_compiled_once_and_a_broken_file_of_it_again(cache, monkeypatch):
    def verdict():
        return pt.check(torch.tanh, (torch.ones(3, 7),), target="tpu:v5e")["tpu:v5e:2x2"]

    first = verdict()
    monkeypatch.setattr(deviceless._Process, "compile", lambda *_: pytest.fail("compiled again"))
    assert verdict() == first
    monkeypatch.undo()
    for file in (cache / "check").iterdir():
        file.write_text("{")
    again = verdict()
    assert again.programs[0].argument_bytes == first.programs[0].argument_bytes


def test_a_compiler_that_dies_is_reported_and_the_next_check_works(monkeypatch):
    target = targets.find("tpu:v5e")
    pt.check(torch.sin, (torch.ones(5),), target="tpu:v5e")
    process = deviceless._process("tpu")._process
    monkeypatch.setattr(deviceless, "_key", lambda *_: "key")
    with pytest.raises(BackendUnavailableError, match=r"ended with status|was killed by signal"):
        deviceless.compile_for(target, b"no module")
    assert process.poll() is not None
    monkeypatch.undo()
    assert pt.check(torch.cos, (torch.ones(5),), target="tpu:v5e").ok


def test_a_compiler_that_is_not_installed_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(deviceless, "_version", lambda package: "")
    with pytest.raises(BackendUnavailableError, match=r"jax_cuda13_plugin is not installed\n.*portable\[cuda-check\]"):
        pt.check(torch.sin, (torch.ones(2),), target="cuda:h200")


MODELS = """
import torch

def fits():
    return torch.nn.Linear(64, 64), (torch.randn(4, 64),)

def large():
    return torch.nn.Linear(65536, 65536), (torch.randn(4, 65536),)

def values():
    return torch.nn.Linear(int(torch.tensor(8).item()), 8), (torch.randn(4, 8),)
"""


def run(tmp_path, *arguments):
    (tmp_path / "models.py").write_text(MODELS)
    function, *options = arguments
    return CliRunner().invoke(app, ["check", f"{tmp_path}/models.py:{function}", "--target", "tpu:v5e", *options])


def test_the_command_exits_with_1_where_a_model_does_not_fit(tmp_path):
    assert run(tmp_path, "fits").exit_code == 0
    result = run(tmp_path, "large", "--json")
    assert result.exit_code == 1
    row = json.loads(result.stdout)["targets"]["tpu:v5e:2x2"]
    assert (row["compiles"], row["fits"]) == (True, False)
    assert row["needed_bytes"] > row["memory_bytes"]


def test_a_function_that_needs_values_is_called_again_with_them(tmp_path):
    assert run(tmp_path, "values").exit_code == 0


@pytest.mark.parametrize(("option", "value"), [("--mesh", "batch"), ("--shard", "w=x"), ("--mesh", "batch=2,=3")])
def test_a_mesh_on_the_command_line_that_is_not_legal_is_refused(tmp_path, option, value):
    result = run(tmp_path, "fits", option, value)
    assert isinstance(result.exception, ConfigError)
