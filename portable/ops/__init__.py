"""Portable operators: ``pt.ops.<name>``, one a file, the file name is the op's.

An op is its reference, a plain-torch function: semantics, fallback and oracle in one. Each file holds the reference
(named like the file), ``SCHEMA`` (the signature of its custom-op form), ``samples()`` (arguments that cover its
boundary cases) and, where recomputing through the reference would be wasteful, ``backward``. Adding a file adds an op;
nothing is imported or registered before an op is first asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portable.ops._op import PortableOp


def names() -> tuple[str, ...]:
    """The names of all ops."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


class _Ops(ModuleType):
    """This module. The import system binds a submodule to its name here; what is bound for an op is the op."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and not name.startswith("_"):
            from portable.ops._op import PortableOp

            value = PortableOp.of(name, value)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Ops


def __getattr__(name: str) -> PortableOp:
    if name.startswith("_") or name not in names():
        raise AttributeError(f"module 'portable.ops' has no attribute {name!r}; the ops are {', '.join(names())}")
    importlib.import_module(f"portable.ops.{name}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *names()})
