"""Targets: their names, and what is known of each."""

import pytest

from portable.backends import targets
from portable.errors import ConfigError


def test_a_tpu_without_a_topology_is_one_host_of_them():
    assert targets.find("tpu:v5e").name == "tpu:v5e:2x2"
    assert targets.find("tpu:v5e").size == 4
    assert targets.find("tpu:v5e:4x4").size == 16
    assert targets.find("TPU:v4 ").size == 8  # two devices a chip


@pytest.mark.parametrize(
    "name", ["tpu", "tpu:v9", "cuda:h200:2x2", "tpu:v5e:2 x2", "rocm:mi300x", "xla:cpu", "", "cpu"]
)
def test_what_is_no_target_is_refused_with_the_list_of_those_that_are(name):
    with pytest.raises(ConfigError, match=r"tpu:v5e.*rocm, xpu and trainium have no compiler"):
        targets.find(name)


@pytest.mark.parametrize("name", ["tpu:v5e:0x0", "tpu:v5e:1000x1000"])
def test_a_slice_has_a_size_that_exists(name):
    with pytest.raises(ConfigError, match="a slice has 1 to"):
        targets.find(name)


@pytest.mark.parametrize("name", targets.names())
def test_every_device_has_memory_bandwidth_and_the_rate_of_its_matrix_products(name):
    target = targets.find(name)
    assert target.memory_bytes > 2**32
    assert 1e11 < target.bandwidth < 1e13
    assert target.flops["bfloat16"] >= target.flops["float32"] > 1e12


@pytest.mark.parametrize("name", [n for n in targets.names() if n.startswith("cuda:")])
def test_a_gpu_is_described_in_the_syntax_that_xla_reads(name):
    config = targets.find(name).config
    assert config.count("{") == config.count("}") == 4
    assert "threads_per_warp: 32" in config
    assert f"device_memory_size: {targets.find(name).memory_bytes}" in config
    assert 'platform_name: "CUDA"' in config
