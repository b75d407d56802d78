"""portable: write a PyTorch model once, run it on any accelerator.

Importing this package does nothing but define names: it touches no device, registers nothing in torch, reads no
environment variable. Every public name is loaded when it is first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "SLO": "portable.slo.objective",
    "check": "portable.api",
    "compile": "portable.api",
    "coverage": "portable.api",
    "register_kernel": "portable.kernels.registry",
    "explain": "portable.explain",
    "device": "portable.api",
    "autocast": "portable.backends.neutral",
    "manual_seed": "portable.backends.neutral",
    "memory_stats": "portable.backends.neutral",
    "synchronize": "portable.backends.neutral",
    "use_backend": "portable.backends",
    "backends": "portable.backends",
    "config": "portable.config",
    "errors": "portable.errors",
    "ops": "portable.ops",
    "testing": "portable.testing",
}
_MODULES = {"backends", "config", "errors", "explain", "ops", "testing"}
__all__ = [
    "SLO",
    "__version__",
    "autocast",
    "backends",
    "check",
    "compile",
    "config",
    "coverage",
    "device",
    "errors",
    "explain",
    "manual_seed",
    "memory_stats",
    "ops",
    "register_kernel",
    "synchronize",
    "testing",
    "use_backend",
]

if TYPE_CHECKING:
    from portable import backends, config, errors, ops, testing
    from portable.api import check, compile, coverage, device
    from portable.backends import use_backend
    from portable.backends.neutral import autocast, manual_seed, memory_stats, synchronize
    from portable.explain import explain
    from portable.kernels.registry import register_kernel
    from portable.slo.objective import SLO


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'portable' has no attribute {name!r}")
    module = importlib.import_module(home)
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
