"""`cpu`: the host, by Inductor (`cpu`) or eager (`cpu:eager`). Always there; the reference of every comparison."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from portable.backends.base import TOLERANCES, Capabilities, MemoryStats, State
from portable.backends.native import NativeBackend
from portable.kernels.fingerprint import ABSENT


class Cpu(NativeBackend):
    name = "cpu"
    device_type = "cpu"
    no_graphs = "its ops run in this process as they come: there are no launches"

    @classmethod
    def probe(cls) -> State:
        return State(True, "ready", evidence="verified here")

    def capabilities(self) -> Capabilities:
        integers = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        dtypes = frozenset({*TOLERANCES, *integers, torch.complex64, torch.complex128})
        return Capabilities(dtypes, emulated=_emulated(), collectives="gloo")

    def hardware(self) -> dict[str, str]:
        return host()

    def synchronize(self) -> None:
        """Nothing: what it asked for is done when the call returns."""

    def memory_stats(self) -> MemoryStats:
        return process_memory()


def _emulated() -> dict[torch.dtype, str]:
    """Half precision without instructions of its own is computed in float32."""
    flags = _cpuinfo().get("flags", "").split()
    needed = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
    if platform.machine() not in ("x86_64", "AMD64") or not flags:
        return {}
    return {
        dtype: f"computed in float32: this processor has none of {', '.join(names)}"
        for dtype, names in needed.items()
        if not set(names) & set(flags)
    }


def host() -> dict[str, str]:
    """The host's part of a fingerprint."""
    about = _cpuinfo()
    model = about.get("model name") or about.get("CPU part") or platform.processor() or platform.machine()
    revision = " ".join(f"{key} {about[key]}" for key in ("cpu family", "model", "stepping") if key in about)
    return {
        "device": f"{model}, {os.cpu_count()} cores",
        "architecture": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {revision}",
        "driver": ABSENT,
        "runtime": "host",
    }


def process_memory() -> MemoryStats:
    """Resident memory of this process, and the machine's memory."""
    status = _fields(Path("/proc/self/status"))
    used, peak = (_kilobytes(status.get(name, "")) for name in ("VmRSS", "VmHWM"))
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        total = None
    return MemoryStats(used, peak, total)


def _kilobytes(text: str) -> int | None:
    number = text.removesuffix("kB").strip()
    return int(number) * 1024 if number.isdigit() else None


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    return _fields(Path("/proc/cpuinfo"))


def _fields(path: Path) -> dict[str, str]:
    """The first paragraph of a file of ``name: value`` lines; empty where there is no such file."""
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


BACKEND = Cpu
