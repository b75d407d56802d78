"""`cuda`: NVIDIA GPUs through stock torch and Inductor."""

from __future__ import annotations

import torch

from portable.backends.base import State
from portable.backends.native import NativeBackend, cuda_state


class Cuda(NativeBackend):
    name = "cuda"
    device_type = "cuda"

    @classmethod
    def probe(cls) -> State:
        if torch.version.hip:
            return State(False, "this torch is built for ROCm", "use backend 'rocm', or install a CUDA build of torch")
        if not torch.version.cuda:
            return State(False, "torch has no CUDA", "install a CUDA build of torch")
        ok, text = cuda_state()
        if not ok:
            return State(False, f"no usable GPU: {text}", "check the driver with nvidia-smi")
        return State(True, f"ready, {text}")


BACKEND = Cuda
