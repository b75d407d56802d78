"""Peak memory of a call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_mb(call: Callable[[], object]) -> float | None:
    """What ``call`` needs at its peak beyond what was held before it, in 10⁶ bytes; None where it cannot be measured.

    On an accelerator: torch's own allocator. On Linux hosts: the growth of the resident set, whose high-water mark the
    kernel lets a process reset; unused heap is given back first, so that memory which is used again counts too.
    """
    if torch.accelerator.is_available():
        return _accelerator(call)
    try:
        _trim()
        _CLEAR.write_text("5")
        before = _kilobytes("VmRSS")
        call()
        return max(_kilobytes("VmHWM") - before, 0) * 1024 / 1e6
    except OSError:
        return None


def _accelerator(call: Callable[[], object]) -> float | None:
    kind = torch.accelerator.current_accelerator()
    module = getattr(torch, kind.type, None) if kind else None
    if module is None or not hasattr(module, "max_memory_allocated"):
        return None
    module.synchronize()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    call()
    module.synchronize()
    return (module.max_memory_allocated() - before) / 1e6


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _kilobytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise OSError(f"{_STATUS} has no {field}")
