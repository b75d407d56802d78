"""The handful of calls on a device that every script makes, for whichever backend is selected."""

from __future__ import annotations

import torch

from portable import backends
from portable.backends.base import MemoryStats


def synchronize(backend: str | None = None) -> None:
    """Wait until the selected backend's device has done all that this process asked of it."""
    backends.get(backends.selected(backend)).synchronize()


def memory_stats(backend: str | None = None) -> MemoryStats:
    """Memory of the selected backend's device, in bytes: ``used`` and ``peak`` by this process, and ``total``; None
    where it does not say."""
    return backends.get(backends.selected(backend)).memory_stats()


def manual_seed(seed: int, backend: str | None = None) -> None:
    """Seed every random generator that programs of the selected backend read, torch's own among them."""
    backends.get(backends.selected(backend)).manual_seed(seed)


def autocast(
    dtype: torch.dtype | None = None, *, enabled: bool = True, cache_enabled: bool = True, backend: str | None = None
) -> torch.autocast:
    """``torch.autocast`` for the device on which the selected backend's tensors live (`portable.device`).

    Args:
        dtype: what the ops that gain by it compute in; default bfloat16 on every device, which needs no gradient
            scaler. (torch's own default is float16 on GPUs.)
        enabled, cache_enabled: as in ``torch.autocast``.
    """
    kind = backends.get(backends.selected(backend)).device().type
    return torch.autocast(kind, dtype or torch.bfloat16, enabled, cache_enabled)
