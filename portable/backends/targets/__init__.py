"""Devices that need not be here: what is known of each, as data, one file a backend.

A target is written ``backend:device`` or ``backend:device:topology``: ``cuda:h200``, ``tpu:v5e:2x2``.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from portable.errors import ConfigError

# The limits that every NVIDIA GPU since 2017 has in common (CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability").
_GPU_LIMITS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}

LARGEST = 16384  # chips of a slice; the largest pods have fewer


@dataclass(frozen=True)
class Target:
    """A device, or a slice of devices, that a program can be compiled for.

    Attributes:
        name: in full, as ``tpu:v5e:2x2``.
        backend, device, topology: its parts; a GPU has no topology.
        platform: XLA's name of the platform.
        package, remedy: what has to be installed to compile for it, and how.
        host: the topology of one host; '' for a GPU.
        note: what to know of every verdict about it.
        size: how many devices a slice has; 0 for a GPU, of which any number may stand in a host.
        memory_bytes: what one device has for a program.
        bandwidth: of its memory, in bytes per second.
        flops: {dtype: floating-point operations per second, of matrix products}.
        emulated: {dtype: how} of those that the device lacks.
        multiples: what the width of a matrix should be a multiple of: {"lane": elements}, {"word": bytes}.
        config: XLA:GPU's target config (a GpuTargetConfigProto as text); '' for a TPU.
    """

    name: str
    backend: str
    device: str
    topology: str
    host: str
    note: str
    platform: str
    package: str
    remedy: str
    size: int
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    emulated: Mapping[str, str]
    multiples: Mapping[str, int]
    config: str

    def __str__(self) -> str:
        return self.name


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    files = (f for f in resources.files(__name__).iterdir() if f.name.endswith(".toml"))
    return {f.name.removesuffix(".toml"): tomllib.loads(f.read_text(encoding="utf-8")) for f in files}


def devices(backend: str) -> tuple[str, ...]:
    """The devices that programs of ``backend`` can be compiled for, whether or not its compiler is installed."""
    return tuple(_tables().get(backend, {}).get("devices", ()))


def names() -> tuple[str, ...]:
    """Every device that can be named, as ``tpu:v5e`` and ``cuda:h200``."""
    return tuple(f"{backend}:{device}" for backend in sorted(_tables()) for device in devices(backend))


def find(name: str) -> Target:
    """The target with this name; a TPU without a topology is one host of them.

    Raises:
        ConfigError: there is none; the message lists those that there are.
    """
    backend, _, rest = name.strip().lower().partition(":")
    device, _, topology = rest.partition(":")
    table = _tables().get(backend, {})
    about = table.get("devices", {}).get(device)
    legal = about is not None and (not topology or ("topology" in about and re.fullmatch(r"\d+(x\d+)*", topology)))
    if about is None or not legal:
        raise ConfigError(
            f"{name!r} is no target that programs can be compiled for",
            remedy=f"one of {', '.join(names())}; the size of a TPU slice may follow, as in tpu:v5e:2x2. rocm, xpu and "
            "trainium have no compiler that works without their devices",
        )
    host = about.get("topology", "")
    topology = topology or host
    chips = math.prod(map(int, topology.split("x"))) if topology else 0
    if topology and not 1 <= chips <= LARGEST:
        raise ConfigError(f"{name!r} has {chips} chips", remedy=f"a slice has 1 to {LARGEST}, as tpu:v5e:2x2")
    return Target(
        name=":".join(filter(None, (backend, device, topology))),
        backend=backend,
        device=device,
        topology=topology,
        platform=table["platform"],
        package=table["package"],
        remedy=table["remedy"],
        host=host,
        note=table.get("note", ""),
        size=chips * about.get("devices_per_chip", 1),
        memory_bytes=about["memory_bytes"],
        bandwidth=about["bandwidth"],
        flops=about["flops"],
        emulated=table["emulated"],
        multiples=table["multiples"],
        config=_gpu_config(table, about) if "gpu_device_info" in about else "",
    )


def _gpu_config(table: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """A GpuTargetConfigProto as text."""
    info = {**_GPU_LIMITS, **about["gpu_device_info"], "device_memory_size": about["memory_bytes"]}
    versions = {name: table[name] for name in ("dnn_version_info", "runtime_version")}
    fields = {"gpu_device_info": info, "platform_name": "CUDA", **versions}
    return _textproto({**fields, "device_description_str": about["description"]})


def _textproto(fields: Mapping[str, Any]) -> str:
    def written(value: Any) -> str:
        if isinstance(value, Mapping):
            return f" {{ {_textproto(value)} }}"
        return f': "{value}"' if isinstance(value, str) else f": {value}"

    return " ".join(f"{name}{written(value)}" for name, value in fields.items())
