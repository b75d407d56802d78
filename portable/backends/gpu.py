"""GPUs that torch itself drives. torch.cuda (NVIDIA, and AMD through HIP) and torch.xpu (Intel) have one surface."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from portable.backends.base import TOLERANCES, Capabilities, MemoryStats, ask
from portable.backends.native import NativeBackend
from portable.kernels.fingerprint import ABSENT

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COMPLEX = (torch.complex64, torch.complex128)


class Gpu(NativeBackend):
    """Compiles with Inductor; ``torch.<device_type>`` answers for the device."""

    no_graphs = "eager launches each op as it comes"

    def module(self) -> Any:
        """torch.cuda or torch.xpu."""
        return getattr(torch, self.device_type)

    def dtypes(self) -> frozenset[torch.dtype]:
        """What every such GPU computes with."""
        return frozenset({*TOLERANCES, *_INTEGERS, *_COMPLEX})

    def capabilities(self) -> Capabilities:
        return Capabilities(self.dtypes())

    def properties(self) -> Any:
        """torch's description of the current device."""
        return self.module().get_device_properties()

    def synchronize(self) -> None:
        self.module().synchronize()

    def seconds(self, function: Callable[[], object]) -> float:
        gpu = self.module()
        began, ended = gpu.Event(enable_timing=True), gpu.Event(enable_timing=True)
        gpu.synchronize()
        began.record()
        function()
        ended.record()
        ended.synchronize()
        milliseconds: float = began.elapsed_time(ended)
        return milliseconds / 1e3

    def memory_stats(self) -> MemoryStats:
        gpu = self.module()
        return MemoryStats(gpu.memory_allocated(), gpu.max_memory_allocated(), self.properties().total_memory)


def usable(module: str) -> tuple[bool, str]:
    """(there is a usable device, its name or why not) of ``torch.<module>``; asked in a fresh process."""
    return ask(f"import torch; torch.{module}.init(); print(torch.{module}.get_device_name(0))")


def driver() -> str:
    """The version of the GPU's kernel module, as the kernel says."""
    for path in ("/sys/module/nvidia/version", "/sys/module/amdgpu/version", "/proc/driver/nvidia/version"):
        try:
            return Path(path).read_text(encoding="utf-8").partition("\n")[0]
        except OSError:
            continue
    return f"with kernel {platform.release()}" if Path("/dev/kfd").exists() else ABSENT
