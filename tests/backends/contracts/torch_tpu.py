"""A stand-in for torch_tpu: the names of it that `tpu:torch_tpu` may call, with their real signatures.

Source: the wheel torch-tpu 0.2.0 (October 2026), torch_tpu/_internal/device/_device_module.py, which it registers as
``torch.tpu``, and torch_tpu/_internal/compile/_backend.py for the Dynamo backend.
"""

import types

import torch
from torch._dynamo.backends.registry import register_backend
from torch.utils import backend_registration

CALLS = []


class _TpuDeviceProperties:
    name = "TPU v6 lite"
    total_memory = 32 << 30
    multi_processor_count = 1


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def synchronize(device: int | None = None) -> None:
    CALLS.append("synchronize")


def get_device_name(device: int | str | torch.device | None = None) -> str:
    return _TpuDeviceProperties.name


def get_device_properties(device: int | str | torch.device | None = None) -> _TpuDeviceProperties:
    return _TpuDeviceProperties()


def manual_seed_all(seed: int) -> None:
    CALLS.append(("manual_seed_all", seed))


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float32]


def _module() -> types.ModuleType:
    module = types.ModuleType("torch.tpu")
    for name in (
        "is_available", "device_count", "current_device", "synchronize", "get_device_name", "get_device_properties",
        "manual_seed_all", "_is_in_bad_fork", "get_amp_supported_dtype",
    ):  # fmt: skip
        setattr(module, name, globals()[name])
    return module


def tpu(model, example_inputs, **kwargs):
    """It refuses symbolic sizes: "If a torch.SymInt is encountered in the graph, an error will be raised"."""
    if any(isinstance(x, torch.SymInt) for x in example_inputs):
        raise RuntimeError("set dynamic=False")
    CALLS.append(("compile", [tuple(x.shape) for x in example_inputs]))
    return model.forward


backend_registration._setup_privateuseone_for_python_backend("tpu", _module())
register_backend(tpu, name="tpu")
