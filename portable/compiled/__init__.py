"""A compiled module and a compiled function: all that their originals are, except in how they compute.

A compiled module has a class of its own, derived from that of its model, and the model's ``__dict__``: parameters,
buffers, submodules, hooks, mode and attributes are the same objects, methods and special methods are inherited, and
``__class__`` is the model's class.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from portable import backends, config
from portable.backends.base import Backend
from portable.compiled.objective import RunByObjective
from portable.compiled.run import Run
from portable.errors import ConfigError

__all__ = ["CompiledFunction", "CompiledModule", "check_able", "compiled"]


class CompiledModule(torch.nn.Module):
    """A compiled ``nn.Module``; its class derives from this one and from the class of its model.

    A call, of the module or of its ``forward``, is compiled; so methods that call the module, e.g. ``training_step``
    or ``generate``, compute by compiled calls.
    """

    __slots__ = ()
    _portable_base = torch.nn.Module

    def __init_subclass__(cls) -> None:
        """What the model's class does to classes that derive from it is not for this one."""

    def freeze(self) -> Any:
        """From now on a call that needs a new compilation raises RecompileError. Returns the module.

        A model that has a ``freeze`` of its own keeps it; then ``CompiledModule.freeze(compiled)`` is this one.
        """
        _run(self).freeze()
        return self

    def __copy__(self) -> Any:
        return compiled(copy.copy(_run(self).target), _run(self).options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return compiled(copy.deepcopy(_run(self).target, memo), _run(self).options)

    def __reduce__(self) -> Any:
        return compiled, (_run(self).target, _run(self).options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return CompiledModule.__reduce__(self)


def _run(module: Any) -> Run:
    return object.__getattribute__(module, "_portable_run")


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``type(compiled)(…)`` makes a model, as ``type(model)(…)`` does."""
    return cls._portable_base(*args, **kwargs)


def _class(module: Any) -> type:
    return type(_run(module).target)


def _become(module: Any, cls: type) -> None:
    _run(module).target.__class__ = getattr(cls, "_portable_base", cls)
    _follow(module)


def _follow(module: Any) -> None:
    """Give a compiled module the class for its model's class, which may have changed: parametrisations, lazy modules
    and sharding do that."""
    wanted = compiled_type(type(_run(module).target))
    if type(module) is not wanted:
        object.__dict__["__class__"].__set__(module, wanted)


_TYPES: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


def compiled_type(base: type) -> type:
    """The class of the compiled modules of a class of modules."""
    with _LOCK:
        known = _TYPES.get(base)
        found = known() if known else None
        if found is None:
            found = _derived(base)
            _TYPES[base] = weakref.ref(found)
        return found


def _derived(base: type) -> type:
    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(base, name) for name in names} | _redirected(base)
    body |= {
        "__slots__": ("_portable_run",),
        "_portable_base": base,
        "__class__": property(_class, _become),
        "__new__": _new,
        "__call__": _call_of(base),
        "__getattr__": _getattr_of(base),
    }
    if inspect.isfunction(inspect.getattr_static(base, "forward", None)):
        body["forward"] = _forward_of(base)
    if hasattr(base, "freeze"):
        body["freeze"] = inspect.getattr_static(base, "freeze")
    if hasattr(base, "__del__"):
        body["__del__"] = lambda module: None  # the model's own end is not its compiled form's
    try:
        return type(base)(base.__name__, (CompiledModule, base), body)
    except TypeError:  # a class that none can derive from: what is not found here is found in the model
        return type(base.__name__, (CompiledModule,), body)


def _redirected(base: type) -> dict[str, Any]:
    """Attributes that a class keeps in slots lie in the model alone."""

    def redirect(name: str) -> property:
        return property(
            lambda module: getattr(_run(module).target, name),
            lambda module, value: setattr(_run(module).target, name, value),
            lambda module: delattr(_run(module).target, name),
        )

    slots = [n for cls in base.__mro__ for n, x in vars(cls).items() if isinstance(x, types.MemberDescriptorType)]
    return {name: redirect(name) for name in slots}


def _call_of(base: type) -> Callable[..., Any]:
    @functools.wraps(base.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = self._portable_run
        if type(run.target) is not type(self)._portable_base:
            _follow(self)
        return run(*args, **kwargs)

    return __call__


def _getattr_of(base: Any) -> Callable[..., Any]:
    @functools.wraps(base.__getattr__)
    def __getattr__(self: Any, name: str) -> Any:
        try:
            return base.__getattr__(self, name)
        except AttributeError:
            _follow(self)
            return getattr(_run(self).target, name)  # it may have got another class

    return __getattr__


def _forward_of(base: Any) -> Callable[..., Any]:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = getattr(self, "_portable_run", None)  # another module may have been given this function
        if run is None:
            return base.forward(self, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling():  # a forward of the user's that calls the one that it replaced
            return base.forward(run.target, *args, **kwargs)
        return run.forward(*args, **kwargs)

    return forward


class CompiledFunction:
    """A compiled function; in a class, a compiled method."""

    def __init__(self, function: Callable[..., Any], run: Run) -> None:
        functools.update_wrapper(self, function, updated=())
        self._portable_run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._portable_run(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        run = self.__dict__.get("_portable_run")
        if run is None or name in ("__func__", "__self__"):  # these would lead around what was compiled
            raise AttributeError(name)
        return getattr(run.target, name)

    def freeze(self) -> CompiledFunction:
        """From now on a call that needs a new compilation raises RecompileError. Returns the function."""
        self._portable_run.freeze()
        return self

    def __reduce__(self) -> Any:
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for name in self.__qualname__.split(".") if hasattr(self, "__qualname__") else ():
            found = getattr(found, name, None)
        if found is self:
            return self.__qualname__  # as functions are: by name
        return compiled, (self._portable_run.target, self._portable_run.options)


def compiled(model: Any, options: dict[str, Any]) -> Any:
    """A module or function compiled with these options of `portable.compile`.

    Raises:
        ConfigError, UnknownBackendError, BackendUnavailableError: as there.
    """
    chosen = backends.get(backends.selected(options["backend"]))
    check_able(chosen, config.graphs_policy(options["graphs"]), options["dynamic"])
    if isinstance(model, staticmethod | classmethod):
        return type(model)(compiled(model.__func__, options))
    if isinstance(model, CompiledModule | CompiledFunction):
        model = _run(model).target
    made = Run if options["slo"] is None else RunByObjective
    run = made(model, chosen, options["fullgraph"], options["dynamic"], options)
    if not isinstance(model, torch.nn.Module):
        return CompiledFunction(model, run)
    module: Any = object.__new__(compiled_type(type(model)))
    object.__setattr__(module, "__dict__", model.__dict__)
    object.__setattr__(module, "_portable_run", run)
    return module


def check_able(chosen: Backend, graphs: str, dynamic: bool | None) -> None:
    """Refuse options that the backend cannot have."""
    if graphs == "require":
        chosen.records_graphs(graphs)
    if dynamic and chosen.static_shapes:
        raise ConfigError(
            f"dynamic=True, and backend {chosen} compiles each set of sizes apart: {chosen.static_shapes}",
            remedy="leave dynamic out",
        )
