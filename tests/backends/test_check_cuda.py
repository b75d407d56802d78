"""`pt.check`: models compiled by XLA:GPU for GPUs that are not here. Needs the extra `cuda-check`."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import portable as pt
from portable.backends import deviceless, targets

pytestmark = pytest.mark.slow

DIRECTLY = """
import json, sys
import jax, numpy as np
from jax.experimental import topologies
topology = topologies.get_topology_desc("h200", "cuda", target_config=sys.argv[1], topology="1x1x1")
one = jax.sharding.SingleDeviceSharding(topology.devices[0])
def linear(x, w, b):
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision="highest") + b
f = jax.jit(linear, in_shardings=one, out_shardings=one)
shapes = [(16, 512), (256, 512), (256,)]
memory = f.lower(*[jax.ShapeDtypeStruct(s, np.float32) for s in shapes]).compile().memory_analysis()
json.dump([memory.argument_size_in_bytes, memory.output_size_in_bytes], sys.stdout)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTABLE_CACHE_DIR", str(tmp_path))


def each(device):
    return pytest.param(device, marks=pytest.mark.compiles_for(f"cuda:{device}"))


@pytest.mark.parametrize("device", [each(d) for d in targets.devices("cuda")])
def test_a_network_compiles_forward_and_backward(device):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    found = pt.check(model, (torch.randn(2, 3, 8, 8),), target=f"cuda:{device}", backward=True)
    assert found.ok, found
    assert [p.temporary_bytes > 0 for p in found[f"cuda:{device}"].programs] == [True, True]


@pytest.mark.compiles_for("cuda:h200")
def test_memory_is_what_the_compiler_says_of_the_same_function_written_in_jax():
    command = [sys.executable, "-c", DIRECTLY, targets.find("cuda:h200").config]
    environment = {**os.environ, **deviceless.ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    arguments, outputs = json.loads(done.stdout.splitlines()[-1])
    (program,) = pt.check(nn.Linear(512, 256), (torch.randn(16, 512),), target="cuda:h200")["cuda:h200"].programs
    assert arguments <= program.argument_bytes <= arguments + 256  # ours takes a random seed as well
    assert program.output_bytes == outputs


@pytest.mark.compiles_for("cuda:h200")
def test_a_program_on_several_gpus_says_what_it_communicates():
    mesh = {"batch": 2, "tensor": 4}
    (verdict,) = pt.check(nn.Linear(512, 512), (torch.randn(64, 512),), target="cuda:h200", mesh=mesh).verdicts.values()
    assert verdict.fits
    assert verdict.programs[0].argument_bytes < (512 * 512 + 512 + 64 * 512) * 4 / 2


@pytest.mark.compiles_for("cuda:h200")
def test_rows_that_the_tensor_cores_do_not_take_are_noted():
    x = torch.randn(4, 33, dtype=torch.bfloat16)
    (verdict,) = pt.check(torch.mm, (x, x.t()), target="cuda:h200").verdicts.values()
    assert "backend cuda runs Inductor" in verdict.notes[0].text
    assert verdict.notes[1].text == "matrix width 33 is no multiple of 16 bytes: the tensor cores take no such rows"
