"""`xpu`: Intel GPUs through stock torch and Inductor."""

from __future__ import annotations

import torch

from portable.backends.base import State, ask
from portable.backends.native import NativeBackend


class Xpu(NativeBackend):
    name = "xpu"
    device_type = "xpu"

    @classmethod
    def probe(cls) -> State:
        if not torch.xpu._is_compiled():
            return State(False, "torch has no XPU", "install an XPU build of torch")
        ok, text = ask("import torch; torch.xpu.init(); print(torch.xpu.get_device_name(0))")
        if not ok:
            return State(False, f"no usable GPU: {text}", "check the driver with sycl-ls")
        return State(True, f"ready, {text}")


BACKEND = Xpu
