"""TorchTPU as an executor of `tpu`: `tpu:torch_tpu`. Its device is torch's `tpu`, its Dynamo backend "tpu".

Facts from the wheel torch-tpu 0.2.0 (October 2026): it needs Python ≥ 3.12, takes no symbolic size, and rounds float32
to bfloat16 in matrix products unless torch.tpu.precision says otherwise (its guide from GPU to TPU).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from portable.backends.base import Capabilities, MemoryStats
from portable.backends.vendor import VendorBackend
from portable.kernels.fingerprint import ABSENT, version


class TorchTpu(VendorBackend):
    name = "tpu"
    variants = ("torch_tpu",)
    device_type = "tpu"
    package = "torch_tpu"
    dynamo = "tpu"
    device_name = "torch.tpu.get_device_name()"
    where = "a TPU host"
    static_shapes = "TorchTPU takes static shapes alone"
    no_graphs = "TorchTPU makes one program of a graph: there are no launches to record"

    def capabilities(self) -> Capabilities:
        from portable.backends.tpu import capabilities

        return capabilities(torch.tpu.get_device_name())  # type: ignore[attr-defined]

    def hardware(self) -> dict[str, str]:
        return {
            "device": torch.tpu.get_device_name(),  # type: ignore[attr-defined]
            "architecture": "tpu",
            "driver": ABSENT,
            "runtime": f"torch-tpu {version('torch-tpu')} libtpu {version('libtpu')}",
        }

    def synchronize(self) -> None:
        torch.tpu.synchronize()  # type: ignore[attr-defined]

    def memory_stats(self) -> MemoryStats:
        """Its total; it counts what is used in no public place."""
        return MemoryStats(None, None, torch.tpu.get_device_properties().total_memory)  # type: ignore[attr-defined]

    def tolerances(self) -> Mapping[torch.dtype, float]:
        exact = super().tolerances()
        return {**exact, torch.float32: exact[torch.bfloat16]}
