"""PyTorch/XLA as an executor of `tpu`: `tpu:torch_xla`. Its device is torch's `xla`, its Dynamo backend "openxla".

Facts from the wheel torch-xla 2.9.0 (November 2025, the last one): it loads beside torch 2.9 alone, so that the probe
says on any later torch that it does not load. It rounds float32 to bfloat16 in matrix products unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from portable.backends.base import Capabilities, MemoryStats
from portable.backends.vendor import VendorBackend
from portable.kernels.fingerprint import ABSENT, version


class TorchXla(VendorBackend):
    name = "tpu"
    variants = ("torch_xla",)
    device_type = "xla"
    package = "torch_xla"
    dynamo = "openxla"
    device_name = "', '.join(torch_xla.real_devices())"
    where = "a TPU host"
    static_shapes = "PyTorch/XLA compiles each shape apart"
    no_graphs = "PyTorch/XLA makes one program of a graph: there are no launches to record"

    def capabilities(self) -> Capabilities:
        from portable.backends.tpu import capabilities

        return capabilities("")

    def hardware(self) -> dict[str, str]:
        import torch_xla.runtime

        return {
            "device": str(torch_xla.runtime.device_type()),
            "architecture": "xla",
            "driver": ABSENT,
            "runtime": f"torch-xla {version('torch-xla')} libtpu {version('libtpu')}",
        }

    def synchronize(self) -> None:
        """Run what PyTorch/XLA has only noted so far, and wait for it."""
        import torch_xla.core.xla_model

        torch_xla.sync(wait=True)
        torch_xla.core.xla_model.wait_device_ops()

    def memory_stats(self) -> MemoryStats:
        import torch_xla.core.xla_model

        about = torch_xla.core.xla_model.get_memory_info()
        return MemoryStats(about["bytes_used"], about.get("peak_bytes_used"), about["bytes_limit"])

    def manual_seed(self, seed: int) -> None:
        import torch_xla

        super().manual_seed(seed)
        torch_xla.manual_seed(seed)

    def tolerances(self) -> Mapping[torch.dtype, float]:
        exact = super().tolerances()
        return {**exact, torch.float32: exact[torch.bfloat16]}
