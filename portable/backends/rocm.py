"""`rocm`: AMD GPUs through stock torch (HIP behind torch.cuda) and Inductor."""

from __future__ import annotations

import torch

from portable.backends.base import State
from portable.backends.native import NativeBackend, cuda_state


class Rocm(NativeBackend):
    name = "rocm"
    device_type = "cuda"

    @classmethod
    def probe(cls) -> State:
        if not torch.version.hip:
            return State(False, "torch has no ROCm", "install a ROCm build of torch")
        ok, text = cuda_state()
        if not ok:
            return State(False, f"no usable GPU: {text}", "check the driver with rocminfo")
        return State(True, f"ready, {text}")


BACKEND = Rocm
