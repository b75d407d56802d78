"""Backends by name, and which one is used: Python argument, then context manager, then PORTABLE_BACKEND, then auto."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.metadata
import json
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable import config
from portable.errors import BackendUnavailableError, RegistrationError, UnknownBackendError

if TYPE_CHECKING:
    from portable.backends.base import Backend, State

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
            _check(entry.name, backend)
            found[entry.name] = Plugin(entry.name, package, backend)
        except Exception:  # a plugin may fail in any way; it is shown by doctor and raised when asked for by name
            found.setdefault(entry.name, Plugin(entry.name, package, None, traceback.format_exc()))
    return found


def _check(name: str, backend: type[Backend]) -> None:
    """A plugin's class is whole.

    Raises:
        RegistrationError: a method or an attribute is missing, or its name is another than the entry point's.
    """
    missing = sorted(backend.__abstractmethods__) + [a for a in ("name", "path") if not hasattr(backend, a)]
    where = f"{backend.__module__}.{backend.__qualname__}"
    if missing:
        remedy = "portable.backends.base.Backend says what each is"
        raise RegistrationError(f"{where} lacks {', '.join(missing)}", remedy=remedy)
    if backend.name != name:
        raise RegistrationError(f"{where} is called {backend.name!r}, its entry point {name!r}", remedy="use one name")


_DIAGNOSE = """
import json, sys
from dataclasses import asdict
from portable import backends
state = backends.backend_class(sys.argv[1]).diagnose()
print(json.dumps(asdict(state)))
"""


def diagnosed(name: str, timeout_s: float = 60.0) -> tuple[State, str]:
    """What `portable doctor` shows of a backend, and the traceback where its own code failed.

    Another package's code runs in a process of its own: whatever it does there, raise, crash or hang, it stops nothing.
    """
    from portable.backends.base import State

    if name in BUILTIN:
        return backend_class(name).diagnose(), ""
    package = plugins()[name].package
    remedy = "portable doctor --verbose"
    if plugins()[name].backend is None:
        failure = plugins()[name].failure
        return State(False, f"plugin {package} failed: {_said(failure)}", remedy), failure
    try:
        command = [sys.executable, "-c", _DIAGNOSE, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode == 0:
            return State(**json.loads(done.stdout.strip().splitlines()[-1])), ""
        failure = done.stderr.strip() or f"it ended with status {done.returncode}"
    except subprocess.TimeoutExpired:
        failure = f"its probe gave no answer in {timeout_s:.0f} s"
    except (ValueError, TypeError, IndexError) as broken:
        failure = f"its probe gave no State: {broken}"
    return State(False, f"plugin {package} failed: {_said(failure)}", remedy), failure


def _said(failure: str) -> str:
    """The message of a traceback: its last line that begins at the margin."""
    lines = [line for line in failure.strip().splitlines() if line and not line[0].isspace()]
    return lines[-1] if lines else "unknown"


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
