"""`xpu`: Intel GPUs through stock torch and Inductor.

Intel's extension is at its end of life (2.8, August 2025) and stock torch needs nothing of it. Where it is installed it
is imported at first use, since it registers ops that the programs of its users call; the log says so.
"""

from __future__ import annotations

import functools

import torch

from portable import config
from portable.backends.base import Backend, Capabilities, State, installed
from portable.backends.gpu import Gpu, usable
from portable.errors import BackendUnavailableError
from portable.kernels.fingerprint import ABSENT

EXTENSION = "intel_extension_for_pytorch"


class Xpu(Gpu):
    name = "xpu"
    device_type = "xpu"
    no_graphs = "Inductor records launches on CUDA and HIP devices alone"

    @classmethod
    def probe(cls) -> State:
        if not torch.xpu._is_compiled():
            return State(False, "torch has no XPU", "install an XPU build of torch")
        ok, text = usable("xpu")
        if not ok:
            return State(False, f"no usable GPU: {text}", "check the driver with sycl-ls")
        return State(True, f"ready, {text}")

    def require(self) -> Backend:
        super().require()
        _extended()
        return self

    def capabilities(self) -> Capabilities:
        """The matrix engine multiplies 8 × 16 by 16 × 16 tiles of half precision (Intel's oneAPI GPU Optimization
        Guide, “XMX”). Double precision is absent from some GPUs: torch says from which."""
        about = self.properties()
        dtypes = self.dtypes()
        if not getattr(about, "has_fp64", True):
            dtypes -= {torch.float64, torch.complex128}
        return Capabilities(dtypes, multiples={"matmul": 16}, collectives="xccl")

    def hardware(self) -> dict[str, str]:
        about = self.properties()
        return {
            "device": about.name,
            "architecture": str(getattr(about, "architecture", ABSENT)),
            "driver": str(getattr(about, "driver_version", ABSENT)),
            "runtime": f"XPU {getattr(torch.version, 'xpu', ABSENT)}",
        }


@functools.cache
def _extended() -> None:
    if not installed(EXTENSION):
        return
    try:
        import intel_extension_for_pytorch as extension
    except Exception as failure:  # it is built against one torch release, and refuses others in ways of its own
        raise BackendUnavailableError(
            f"{EXTENSION} is installed and does not load: {failure}",
            remedy=f"pip uninstall {EXTENSION.replace('_', '-')}: stock torch needs nothing of it",
        ) from failure
    config.logger().warning(
        "xpu: %s %s is installed and was imported; stock torch needs nothing of it", EXTENSION, extension.__version__
    )


BACKEND = Xpu
