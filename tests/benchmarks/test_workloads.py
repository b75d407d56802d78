"""The workloads: named well, complete, the same every time."""

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks import workloads
from benchmarks.measurement import measure
from benchmarks.workloads.workload import workload

ALL = list(workloads.WORKLOADS.values())


def test_suites_hold_what_they_say():
    assert {w.name for w in workloads.suite("all")} == set(workloads.WORKLOADS)
    assert all(w.group == "ops" for w in workloads.suite("ops"))
    assert all(w.op == "model" for w in workloads.suite("models"))
    assert 10 <= len(workloads.suite("quick")) <= 14
    with pytest.raises(ValueError, match="not one of quick"):
        workloads.suite("fast")


@pytest.mark.parametrize(
    "op",
    ["convolution", "native_layer_norm", "attention", "gelu", "rms_norm", "rotary_embedding", "swiglu", "moe_routing"]
    + ["cumsum", "sort", "bmm", "addmm", "native_group_norm", "upsample_nearest2d", "softmax_cross_entropy"],
)
def test_each_family_is_measured(op):
    assert any(w.is_of(op) for w in ALL)


def test_an_op_is_named_with_or_without_aten_and_overload():
    found = workloads.WORKLOADS["cumsum/mamba-1k"]
    assert all(found.is_of(op) for op in ("cumsum", "aten.cumsum", "aten.cumsum.default", "cumsum/mamba-1k"))
    assert not any(found.is_of(op) for op in ("cum", "aten", "cumprod"))


@pytest.mark.parametrize("name", ["layer_norm/bert-b8", "sort/top-p-32k", "moe_routing/mixtral-256"])
def test_a_workload_is_the_same_every_time_and_leaves_the_generator_alone(name):
    before = torch.random.get_rng_state()
    (_, first), (_, second) = workloads.WORKLOADS[name].make(), workloads.WORKLOADS[name].make()
    for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_name_is_taken_once():
    table = {}
    workload(table, "a/b", "op", "model")(lambda: (abs, ()))
    with pytest.raises(ValueError, match="defined twice"):
        workload(table, "a/b", "op", "model")(lambda: (abs, ()))


@pytest.mark.parametrize("name", ["layer_norm_backward/bert-b8", "cumsum/mamba2-chunks", "rotary/llama-decode"])
def test_a_workload_is_measured_and_found_correct(name):
    found = measure(workloads.WORKLOADS[name], "xla", compare=("eager",), budget_s=0.0, min_rounds=2)
    assert found.wrong == ""
    assert {n: len(s) for n, s in found.samples_s.items()} == {"portable": 2, "eager": 2}
    assert found.compile_s["portable"] > found.samples_s["portable"][0]
    assert found.cost.moved > 0
