"""Stand-ins for torch.cuda and torch.xpu where no GPU is: what `cuda`, `rocm` and `xpu` may call.

Source: torch 2.13.0, whose CPU wheel has the whole Python surface. Each stand-in must have the signature of what it
stands for; the properties must be fields of the classes in torch/_C/__init__.pyi. What has no stand-in is torch's own,
which fails on a machine without the device.
"""

import inspect
import re
from pathlib import Path

import torch

CALLS = []


class Properties:
    """A device's properties: a name that torch's class does not declare cannot be set."""

    def __init__(self, declared: str, **values):
        stub = Path(torch._C.__file__).with_name("_C") / "__init__.pyi"
        body = re.search(rf"class {declared}:\n((?:    .*\n)+)", stub.read_text()).group(1)
        fields = set(re.findall(r"^    (\w+):", body, re.M))
        if unknown := set(values) - fields:
            raise TypeError(f"torch {torch.__version__} declares no {sorted(unknown)} in {declared}")
        vars(self).update(values)


class Event:
    """Of torch.cuda and torch.xpu: created with enable_timing, recorded, waited for, and asked for milliseconds."""

    def __init__(self, enable_timing):
        self.timed = enable_timing

    def record(self, stream=None):
        CALLS.append("record")

    def synchronize(self):
        CALLS.append("event.synchronize")

    def elapsed_time(self, end_event):
        if not (self.timed and end_event.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return 4.0


def cuda_event(enable_timing=False, blocking=False, interprocess=False, external=False):
    return Event(enable_timing)


def xpu_event(enable_timing=False):
    return Event(enable_timing)


def functions(properties: Properties, capability=None) -> dict:
    def init():
        CALLS.append("init")

    def synchronize(device=None):
        CALLS.append("synchronize")

    def get_device_properties(device=None):
        return properties

    def get_device_name(device=None):
        return properties.name

    def get_device_capability(device=None):
        return capability

    def memory_allocated(device=None):
        return 1 << 20

    def max_memory_allocated(device=None):
        return 3 << 20

    def manual_seed_all(seed):
        CALLS.append(("manual_seed_all", seed))

    return {f.__name__: f for f in list(locals().values()) if inspect.isfunction(f)}


def install(monkeypatch, module, properties: Properties, event, capability=None) -> None:
    """Put the stand-ins into torch.cuda or torch.xpu, each with the signature of what it replaces."""
    CALLS.clear()
    for name, stand_in in functions(properties, capability).items():
        same_signature(getattr(module, name), stand_in)
        monkeypatch.setattr(module, name, stand_in)
    for method in ("record", "synchronize", "elapsed_time"):
        same_signature(getattr(module.Event, method), getattr(Event, method))
    same_signature(module.Event.__new__, event, drop=1)
    monkeypatch.setattr(module, "Event", event)


def same_signature(real, stand_in, drop: int = 0) -> None:
    """Refuse a stand-in whose parameters are not those of what it stands for."""
    parameters = [(p.name, p.kind, p.default) for p in inspect.signature(real).parameters.values()][drop:]
    mine = [(p.name, p.kind, p.default) for p in inspect.signature(stand_in).parameters.values()]
    if parameters != mine:
        raise TypeError(f"{real.__qualname__} takes {parameters}, its stand-in {mine}")


def h200() -> Properties:
    """As torch prints it on the device."""
    return Properties("_CudaDeviceProperties", name="NVIDIA H200", major=9, minor=0, total_memory=150_109_880_320)


def mi300x() -> Properties:
    return Properties(
        "_CudaDeviceProperties", name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-",
        major=9, minor=4, total_memory=206_141_652_992,
    )  # fmt: skip


def max1550() -> Properties:
    return Properties(
        "_XpuDeviceProperties", name="Intel(R) Data Center GPU Max 1550", driver_version="1.6.33578",
        architecture=13136561920, has_fp64=True, total_memory=68_719_476_736,
    )  # fmt: skip
