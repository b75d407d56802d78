"""A stand-in for torch_neuronx: the names of it that `trainium` may call, with their real signatures.

Source: aws-neuron/torch-neuronx, release v2.33.0 (October 2026; packages 2.13.3.0 and 2.14.3.0), the module that it
registers as ``torch.neuron``; for the Dynamo backend AWS's Neuron documentation 2.33, “torch.compile backend
reference”.
"""

import types

import torch
from torch._dynamo.backends.registry import register_backend
from torch.utils import backend_registration

CALLS = []


class _Properties:
    name = "trn2"
    total_memory = 24 << 30


class _Event:
    def __init__(self, enable_timing, blocking):
        self.timed = enable_timing

    def record(self, stream=None):
        CALLS.append("record")

    def synchronize(self):
        CALLS.append("event.synchronize")

    def elapsed_time(self, end_event):
        if not (self.timed and end_event.timed):
            raise RuntimeError("both events must be created with enable_timing=True")
        return 2.0


def is_available() -> bool:
    return True


def device_count() -> int:
    return 4


def current_device() -> int:
    return 0


def synchronize(device=None) -> None:
    CALLS.append("synchronize")


def Event(enable_timing=False, blocking=False):
    return _Event(enable_timing, blocking)


def get_device_properties(device=None):
    return _Properties()


def memory_allocated(device=None):
    return 1 << 20


def max_memory_allocated(device=None):
    return 2 << 20


def manual_seed_all(seed: int) -> None:
    CALLS.append(("manual_seed_all", seed))


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype():
    return [torch.float32, torch.float16, torch.bfloat16]


def _module() -> types.ModuleType:
    module = types.ModuleType("torch.neuron")
    for name in (
        "is_available", "device_count", "current_device", "synchronize", "Event", "get_device_properties",
        "memory_allocated", "max_memory_allocated", "manual_seed_all", "_is_in_bad_fork", "get_amp_supported_dtype",
    ):  # fmt: skip
        setattr(module, name, globals()[name])
    return module


def neuron(gm, example_inputs):
    """It refuses symbolic sizes: "dynamic=True is rejected during compilation"."""
    if any(isinstance(x, torch.SymInt) for x in example_inputs):
        raise RuntimeError("dynamic shapes are not supported")
    CALLS.append(("compile", [tuple(x.shape) for x in example_inputs]))
    return gm.forward


backend_registration._setup_privateuseone_for_python_backend("neuron", _module())
register_backend(neuron, name="neuron")
