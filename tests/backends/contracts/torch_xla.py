"""A stand-in for torch_xla: the names of it that `tpu:torch_xla` may call, with their real signatures.

Source: the wheel torch-xla 2.9.0 (November 2025): torch_xla/torch_xla.py, torch_xla/core/xla_model.py,
torch_xla/runtime.py, torch_xla/_dynamo/dynamo_bridge.py. The Dynamo backend "openxla" is torch's own.
"""

import sys
import types

import torch

CALLS = []
__path__: list[str] = []
__version__ = "2.9.0"


def device(index: int | None = None) -> torch.device:
    return torch.device("xla", index or 0)


def real_devices() -> list[str]:
    return ["TPU:0", "TPU:1"]


def sync(wait: bool = False, reset_scope: bool = True):
    CALLS.append(("sync", wait))


def manual_seed(seed, device=None):
    CALLS.append(("manual_seed", seed))


def get_memory_info(device: torch.device | None = None):
    return {"bytes_used": 290816, "bytes_limit": 34088157184, "peak_bytes_used": 500816}


def wait_device_ops(devices: list[str] = []):  # noqa: B006 - as the vendor writes it
    CALLS.append("wait_device_ops")


def device_type() -> str | None:
    return "TPU"


def extract_compiled_graph(xla_model: torch.fx.GraphModule, xla_args):
    CALLS.append(("compile", [tuple(x.shape) for x in xla_args]))
    return xla_model


def _submodule(name: str, *functions) -> types.ModuleType:
    module = types.ModuleType(f"{__name__}.{name}")
    for function in functions:
        setattr(module, function.__name__, function)
    sys.modules[module.__name__] = module
    return module


core = _submodule("core")
core.__path__ = []
core.xla_model = _submodule("core.xla_model", get_memory_info, wait_device_ops)
core.dynamo_bridge = _submodule("core.dynamo_bridge", extract_compiled_graph)
runtime = _submodule("runtime", device_type)
