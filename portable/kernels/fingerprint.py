"""The fingerprint of a machine: everything whose change makes a measurement there worthless.

Device, architecture, driver, runtime, and the versions of torch, jax, jaxlib, triton and portable. (The kernel's own
digest is the registry's; the ledger compares it beside the fingerprint.)
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

ABSENT = "absent"


@dataclass(frozen=True)
class Fingerprint:
    """What a verdict was measured on.

    Attributes:
        text: canonical: equal texts are equal machines. This is what a verdict stores.
        parts: the same by name: device, architecture, driver, runtime, torch, jax, jaxlib, triton, portable.
    """

    text: str
    parts: dict[str, str] = field(hash=False)

    @classmethod
    def of(cls, parts: Mapping[str, str]) -> Fingerprint:
        """The fingerprint with these parts; white space within them is collapsed."""
        clean = {name: " ".join(str(parts[name]).split()) or ABSENT for name in sorted(parts)}
        return cls(json.dumps(clean, separators=(",", ":")), clean)

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """From the text that a verdict stores; a text of another form becomes one part, ``fingerprint``."""
        try:
            parts = json.loads(text)
        except ValueError:
            parts = None
        if not isinstance(parts, dict):
            parts = {"fingerprint": text}
        return cls(text, {str(name): str(value) for name, value in parts.items()})

    @property
    def short(self) -> str:
        """Eight hexadecimal digits, for tables."""
        return sha256(self.text.encode()).hexdigest()[:8]

    def __str__(self) -> str:
        return self.text


def changes(then: str, now: str) -> list[str]:
    """The parts in which two fingerprints differ, as ``name old → new``; empty if they are the same."""
    if then == now:
        return []
    old, new = Fingerprint.parse(then).parts, Fingerprint.parse(now).parts
    differing = [name for name in sorted({*old, *new}) if old.get(name, ABSENT) != new.get(name, ABSENT)]
    return [f"{name} {old.get(name, ABSENT)} → {new.get(name, ABSENT)}" for name in differing]


@functools.cache
def fingerprint(backend: str) -> Fingerprint:
    """The fingerprint of this machine as ``backend`` sees it. Initialises the backend's device in this process.

    Args:
        backend: a name, with or without variant: "xla", "cpu:eager", "cuda".

    Raises:
        UnknownBackendError, BackendUnavailableError: there is no such backend, or it cannot run here.
    """
    import torch

    import portable

    versions = {name: _version(name) for name in ("jax", "jaxlib", "triton")}
    versions |= {"torch": torch.__version__, "portable": portable.__version__}
    return Fingerprint.of({**_hardware(backend), **versions})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def _hardware(name: str) -> dict[str, str]:
    """Device, architecture, driver and runtime."""
    from portable import backends
    from portable.backends.native import NativeBackend
    from portable.backends.xla import Xla

    backend = backends.get(name)
    if isinstance(backend, Xla):
        return _pjrt(backend.platform)
    kind = backend.device_type if isinstance(backend, NativeBackend) else ""
    by_kind = {"cpu": _host, "cuda": _cuda, "xpu": _xpu}
    if kind in by_kind:
        return by_kind[kind]()
    runtime = next((f"{p} {_version(p)}" for p in ("torch-neuronx", "torch-xla") if _version(p) != ABSENT), ABSENT)
    return {"device": str(backend.device()), "architecture": platform.machine(), "driver": ABSENT, "runtime": runtime}


def _pjrt(name: str) -> dict[str, str]:
    from portable.backends import pjrt

    client = pjrt.client(name)
    runtime = f"PJRT {client.platform} {getattr(client.raw, 'platform_version', '')}"
    if client.on_host:
        return {**_host(), "runtime": runtime}
    capability = getattr(client.device, "compute_capability", "")
    return {
        "device": str(client.device.device_kind),
        "architecture": str(capability) or client.platform,
        "driver": _driver(),
        "runtime": f"{runtime} libtpu {_version('libtpu')}" if client.platform == "tpu" else runtime,
    }


def _host() -> dict[str, str]:
    import torch

    about = _cpuinfo()
    model = about.get("model name") or about.get("CPU part") or platform.processor() or platform.machine()
    revision = " ".join(f"{key} {about[key]}" for key in ("cpu family", "model", "stepping") if key in about)
    return {
        "device": f"{model}, {os.cpu_count()} cores",
        "architecture": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {revision}",
        "driver": ABSENT,
        "runtime": "host",
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cuda() -> dict[str, str]:
    """NVIDIA and AMD devices: torch.cuda answers for both."""
    import torch

    about = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        architecture, runtime = getattr(about, "gcnArchName", ABSENT), f"HIP {torch.version.hip}"
    else:
        architecture = f"sm_{about.major}{about.minor}"
        runtime = f"CUDA {torch.version.cuda} cuDNN {torch.backends.cudnn.version()}"
    return {"device": about.name, "architecture": architecture, "driver": _driver(), "runtime": runtime}


def _xpu() -> dict[str, str]:
    import torch

    about = torch.xpu.get_device_properties(0)
    return {
        "device": about.name,
        "architecture": str(getattr(about, "architecture", ABSENT)),
        "driver": str(getattr(about, "driver_version", ABSENT)),
        "runtime": f"XPU {getattr(torch.version, 'xpu', ABSENT)}",
    }


def _driver() -> str:
    """The version of the GPU's kernel module, as the kernel says."""
    for path in ("/sys/module/nvidia/version", "/sys/module/amdgpu/version", "/proc/driver/nvidia/version"):
        try:
            return Path(path).read_text(encoding="utf-8").partition("\n")[0]
        except OSError:
            continue
    return f"with kernel {platform.release()}" if Path("/dev/kfd").exists() else ABSENT
