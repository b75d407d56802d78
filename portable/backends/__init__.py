"""Backends by name, and which one is used: Python argument, then context manager, then PORTABLE_BACKEND, then auto."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.metadata
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable import config
from portable.errors import BackendUnavailableError, RegistrationError, UnknownBackendError

if TYPE_CHECKING:
    from portable.backends.base import Backend

BUILTIN = ("tpu", "cuda", "rocm", "xpu", "trainium", "cpu", "xla")
AUTO_ORDER = ("tpu", "cuda", "rocm", "xpu", "trainium", "cpu")

_chosen: contextvars.ContextVar[str | None] = contextvars.ContextVar("portable_backend", default=None)


@dataclass(frozen=True)
class Plugin:
    """A backend of another package: its class, or the traceback of the failure to load it."""

    name: str
    package: str
    backend: type[Backend] | None
    failure: str = ""


@functools.cache
def plugins() -> dict[str, Plugin]:
    """Backends of other packages (entry-point group ``portable.backends``). A broken one is kept with its traceback."""
    from portable.backends.base import Backend

    found: dict[str, Plugin] = {}
    for entry in importlib.metadata.entry_points(group="portable.backends"):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        try:
            if entry.name in BUILTIN or entry.name in found:
                taken = "portable" if entry.name in BUILTIN else found[entry.name].package
                raise RegistrationError(f"the name {entry.name!r} is taken by {taken}", remedy="rename the entry point")
            backend = entry.load()
            if not (isinstance(backend, type) and issubclass(backend, Backend)):
                raise RegistrationError(f"{entry.value} is not a subclass of portable.backends.base.Backend")
            found[entry.name] = Plugin(entry.name, package, backend)
        except Exception:  # a plugin may fail in any way; it is shown by doctor and raised when asked for by name
            found.setdefault(entry.name, Plugin(entry.name, package, None, traceback.format_exc()))
    return found


def names() -> tuple[str, ...]:
    """All legal backend names: built in, then plugins."""
    return (*BUILTIN, *(n for n in plugins() if n not in BUILTIN))


def backend_class(name: str) -> type[Backend]:
    """The class of the backend ``name`` (without variant).

    Raises:
        UnknownBackendError: no such backend.
        BackendUnavailableError: a plugin by this name does not load.
    """
    if name in BUILTIN:
        module = importlib.import_module(f"portable.backends.{name}")
        found: type[Backend] = module.BACKEND
        return found
    plugin = plugins().get(name)
    if plugin is None:
        raise UnknownBackendError(
            f"unknown backend {name!r}",
            remedy=f"choose one of: auto, {', '.join(names())}; `portable doctor` shows what can run here",
        )
    if plugin.backend is None:
        raise BackendUnavailableError(
            f"backend {name!r} of {plugin.package} does not load:\n{plugin.failure}",
            remedy="reinstall or remove the package",
        )
    return plugin.backend


def get(name: str) -> Backend:
    """The backend ``name``, e.g. ``xla``, ``cpu:eager`` or ``auto``, if it can run here.

    Raises:
        UnknownBackendError, BackendUnavailableError.
    """
    base, _, variant = name.strip().lower().partition(":")
    if base == "auto" and not variant:
        return _auto()
    return backend_class(base).of(variant).require()


_auto_lock = threading.Lock()


def _auto() -> Backend:
    with _auto_lock:
        return backend_class(autodetected())().require()


@functools.cache
def autodetected() -> str:
    """The first backend of AUTO_ORDER that can run here; found once a process, no device is initialised in it."""
    return next(name for name in AUTO_ORDER if backend_class(name).probe().ready)


def selected(explicit: str | None = None) -> str:
    """The name in force: the argument, else the innermost `use_backend`, else PORTABLE_BACKEND, else ``auto``."""
    name: str = explicit or _chosen.get() or config.get("PORTABLE_BACKEND")
    return name


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[Backend]:
    """Within it, ``pt.compile`` uses the backend ``name`` unless it is given another. Nests; applies to this thread or
    task.

    Raises:
        UnknownBackendError, BackendUnavailableError: at entry.
    """
    backend = get(name)
    token = _chosen.set(name)
    try:
        yield backend
    finally:
        _chosen.reset(token)
