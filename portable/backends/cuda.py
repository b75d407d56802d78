"""`cuda`: NVIDIA GPUs through stock torch and Inductor, with CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from portable.backends import deviceless
from portable.backends.base import Capabilities, State
from portable.backends.gpu import Gpu, driver, usable

# TensorFloat-32 keeps 10 bits of the mantissa (NVIDIA A100 whitepaper): each factor is off by up to 2⁻¹¹. torch uses it
# for convolutions unless told otherwise.
TF32 = 2e-3


class Cuda(Gpu):
    name = "cuda"
    device_type = "cuda"
    evidence = "compiled for"

    @classmethod
    def deviceless(cls) -> tuple[str, ...]:
        return deviceless.devices(cls.name)

    @classmethod
    def probe(cls) -> State:
        if torch.version.hip:
            return State(False, "this torch is built for ROCm", "use backend 'rocm', or install a CUDA build of torch")
        if not torch.version.cuda:
            return State(False, "torch has no CUDA", "install a CUDA build of torch")
        ok, text = usable("cuda")
        if not ok:
            return State(False, f"no usable GPU: {text}", "check the driver with nvidia-smi")
        return State(True, f"ready, {text}")

    def capabilities(self) -> Capabilities:
        """Float8 from compute capability 8.9, bfloat16 from 8.0 (CUDA C++ Programming Guide, “Compute Capabilities”).

        128 bytes of a matrix's inner size are read at once (NVIDIA's “Matrix Multiplication Background”): 64 of half
        precision.
        """
        capability = torch.cuda.get_device_capability()
        narrow = {torch.float8_e4m3fn, torch.float8_e5m2} if capability >= (8, 9) else set()
        old = {torch.bfloat16: "computed in float32 before compute capability 8.0"} if capability < (8, 0) else {}
        return Capabilities(
            self.dtypes() | narrow,
            emulated=old,
            multiples={"matmul": 64},
            graphs=self.variant != "eager",
            collectives="nccl",
        )

    def hardware(self) -> dict[str, str]:
        about = self.properties()
        return {
            "device": about.name,
            "architecture": f"sm_{about.major}{about.minor}",
            "driver": driver(),
            "runtime": f"CUDA {torch.version.cuda} cuDNN {torch.backends.cudnn.version()}",
        }

    def tolerances(self) -> Mapping[torch.dtype, float]:
        exact = super().tolerances()
        tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
        return {**exact, torch.float32: max(TF32, exact[torch.float32])} if tf32 else exact


BACKEND = Cuda
