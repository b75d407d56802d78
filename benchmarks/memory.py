"""Peak memory of a call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

_CALLS = 3
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_mb(call: Callable[[], object]) -> float | None:
    """What ``call`` needs at its peak beyond what was held before it, in 10⁶ bytes; None where it cannot be measured.

    On an accelerator: torch's own allocator. On Linux hosts: the growth of the resident set, whose high-water mark the
    kernel lets a process reset. Unused heap is given back before, but a runtime may keep some and use it again: the
    largest of a few calls counts, and never less than the results.
    """
    if torch.accelerator.is_available():
        return _accelerator(call)
    try:
        return max(_growth_mb(call) for _ in range(_CALLS))
    except OSError:
        return None


def _growth_mb(call: Callable[[], object]) -> float:
    _trim()
    _CLEAR.write_text("5")
    before = _kilobytes("VmRSS")
    results = [t for t in pytree.tree_leaves(call()) if isinstance(t, torch.Tensor)]
    growth = (_kilobytes("VmHWM") - before) * 1024
    return max(growth, sum(t.numel() * t.element_size() for t in results)) / 1e6


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
