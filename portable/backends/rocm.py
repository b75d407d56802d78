"""`rocm`: AMD GPUs through stock torch (HIP behind torch.cuda) and Inductor, with HIP graphs."""

from __future__ import annotations

import torch

from portable.backends.base import Capabilities, State
from portable.backends.gpu import Gpu, driver, usable
from portable.kernels.fingerprint import ABSENT


class Rocm(Gpu):
    name = "rocm"
    device_type = "cuda"
    evidence = "compiled for"

    @classmethod
    def probe(cls) -> State:
        if not torch.version.hip:
            return State(False, "torch has no ROCm", "install a ROCm build of torch")
        ok, text = usable("cuda")
        if not ok:
            return State(False, f"no usable GPU: {text}", "check the driver with rocminfo")
        return State(True, f"ready, {text}")

    def capabilities(self) -> Capabilities:
        """The matrix instructions take 32 × 32 or 16 × 16 tiles; MI300 has the float8 of its own (“fnuz”), MI350 the
        OCP's (AMD's CDNA 3 and CDNA 4 instruction set references)."""
        architecture = self._architecture()
        narrow: set[torch.dtype] = set()
        if architecture.startswith("gfx942"):
            narrow = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
        elif architecture.startswith("gfx950"):
            narrow = {torch.float8_e4m3fn, torch.float8_e5m2}
        return Capabilities(
            self.dtypes() | narrow,
            multiples={"matmul": 32},
            graphs=self.variant != "eager",
            collectives="nccl",  # RCCL, under torch's name for it
        )

    def _architecture(self) -> str:
        return str(getattr(self.properties(), "gcnArchName", ABSENT))

    def hardware(self) -> dict[str, str]:
        return {
            "device": self.properties().name,
            "architecture": self._architecture(),
            "driver": driver(),
            "runtime": f"HIP {torch.version.hip}",
        }


BACKEND = Rocm
