"""A compiled module and a compiled function: how they are called, and what they share with what they were made of."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.output_graph import graph_break_reasons
from torch.utils import _pytree as pytree

from portable import backends, config
from portable.backends.base import Backend, installed
from portable.errors import ConfigError, KernelError, PortableError
from portable.explain import Fallback, Note, Record, call_began, runs
from portable.lowering import refusals


def compile_graph(
    chosen: Backend, record: Record, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    graph = record.add_graph(gm, example_inputs)
    record.forbid_when_frozen(graph.cause)
    return chosen.compile(gm, example_inputs, graph, record)


# Dynamo lets threads that miss its cache together compile one after the other, each its own copy, until its recompile
# limit: calls with sizes not seen before go one at a time.
_COLD = threading.RLock()
_WARM_KEYS = 4096


def _renew_lock() -> None:
    global _COLD
    _COLD = threading.RLock()


# A fork waits for the compilation of another thread: Dynamo's own lock would be held in the child for good.
os.register_at_fork(before=lambda: _COLD.acquire(), after_in_parent=lambda: _COLD.release(), after_in_child=_renew_lock)


def _shape(argument: Any) -> Any:
    return argument.shape if isinstance(argument, torch.Tensor) else None


def _policy(kernels: str | None) -> Any:
    if kernels is None:
        return None
    from portable.kernels.select import Policy

    try:
        if not isinstance(kernels, str):
            raise ValueError("not a text")
        policy = Policy.parse(kernels)
    except ValueError as failure:
        raise ConfigError(
            f"kernels={kernels!r} is not legal: {failure}", remedy="auto, off, a provider, or op=provider,…"
        ) from failure
    if policy.default not in ("auto", "off") and installed("jax"):  # the registry of kernels needs it
        from portable.kernels.choice import check_provider

        check_provider(policy.default)
    return policy


_SIZES = 256


def _many_sizes() -> dict[str, Any]:
    """Have Dynamo capture many sizes of a model before it gives up and runs it in eager, where this torch can."""
    return {"recompile_limit": _SIZES} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}


def _isolation() -> dict[str, Any]:
    """Have Dynamo count each compiled model's recompilations apart, where this torch can: they share code objects."""
    supported = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if supported else {}


class Run:
    """The compiled form of one callable: Dynamo with our backend, its record, and the options it was made with."""

    def __init__(
        self, target: Any, chosen: Backend, fullgraph: bool, dynamic: bool | None, options: dict[str, Any]
    ) -> None:
        name = type(target).__name__ if isinstance(target, torch.nn.Module) else getattr(target, "__name__", "function")
        self.target, self.options, self._backend = target, options, chosen
        policy, mode = _policy(options["kernels"]), config.fallback_mode(options["fallback"])
        graphs = config.graphs_policy(options.get("graphs"))
        self.record = record = Record(name, str(chosen), chosen.path, policy, mode, graphs)
        self._warm: set[Any] = set()
        self._whole: frozenset[str] = frozenset()  # the ops that the captures of these calls keep whole

        def portable(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return compile_graph(chosen, record, gm, example_inputs)  # not self: Dynamo keeps every backend for good

        apart = _isolation()
        if chosen.static_shapes:
            dynamic, apart = False, {**apart, **_many_sizes()}
            record.add_note(Note("shapes", f"one executable for each distinct set of sizes: {chosen.static_shapes}"))
        self._compiled = torch.compile(target, backend=portable, fullgraph=fullgraph, dynamic=dynamic, **apart)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.target(*args, **kwargs)  # inside another compiled model: part of its graph
        training = getattr(self.target, "training", None)
        key = (torch.is_grad_enabled(), training, *[_shape(a) for a in (*args, *kwargs.values())])
        if key in self._warm:
            return self._call(args, kwargs)
        with _COLD, refusals.said_once(), self._with_recurrent_layers():
            self._whole = self._kept_whole()
            result = self._call(args, kwargs)
            if len(self._warm) >= _WARM_KEYS:
                self._warm.clear()
            self._warm.add(key)
        return result

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call_began()
        before, breaks = runs(), len(graph_break_reasons)
        try:
            with self._capturing():
                result = self._compiled(*args, **kwargs)
        except Exception as failure:
            _raise_plainly(failure, self, args, kwargs)
        if len(graph_break_reasons) != breaks:
            self.record.add_breaks(graph_break_reasons[breaks:])
        if runs() == before:
            self._ran_outside(args, kwargs)
        return result

    def _kept_whole(self) -> frozenset[str]:
        if not installed("jax"):  # the registry of kernels needs it
            return frozenset()
        from portable.kernels.choice import whole_ops

        return whole_ops(self._backend.label(), self._backend.path, self.record.kernels)

    def _capturing(self) -> contextlib.AbstractContextManager[None]:
        if not self._whole:
            return contextlib.nullcontext()
        from portable.ops._op import choosing

        return choosing(self._whole)

    @contextlib.contextmanager
    def _with_recurrent_layers(self) -> Iterator[None]:
        """Have Dynamo capture LSTM, GRU and RNN, which our lowering does not unroll; other compilers do."""
        if self._backend.path != "stablehlo":
            yield
            return
        from portable.lowering.kept_whole import kept_whole

        with torch._dynamo.config.patch(allow_rnn=True), kept_whole():
            yield

    def _ran_outside(self, args: Any, kwargs: Any) -> None:
        """No compiled graph ran in a call: refuse inputs that none could take, else count it and warn once."""
        self.check_inputs(args, kwargs)
        reason = "torch.compile skipped the call (TORCH_LOGS=dynamo says why, e.g. its recompile limit)"
        if self.record.add_fallback(Fallback(self.record.name, reason)):
            warnings.warn(f"{self.record.name} ran in eager, not on {self.record.backend}: {reason}", stacklevel=5)

    def freeze(self) -> None:
        """From now on a new compilation raises RecompileError."""
        self.record.frozen = True

    def explained(self) -> Record:
        """The record that `explain` shows."""
        return self.record

    def check_inputs(self, args: Any, kwargs: Any) -> None:
        """Refuse, by name, an argument, parameter or buffer that the backend cannot take."""
        named = [(f"argument {_argument(path)}", x) for path, x in pytree.tree_flatten_with_path((args, kwargs))[0]]
        if isinstance(self.target, torch.nn.Module):
            named += [*self.target.named_parameters(), *self.target.named_buffers()]
        for name, x in named:
            if isinstance(x, torch.Tensor):
                self._backend.check_input(x, name)


class RunByObjective(Run):
    """One callable compiled for the selected backend, and for the other paths of its device where the objective asks
    for them; each signature runs on the path that was decided for it at its first call."""

    def __init__(self, target: Any, chosen: Backend, fullgraph: bool, dynamic: bool | None, options: dict[str, Any]):
        super().__init__(target, chosen, fullgraph, dynamic, options)
        from portable.slo.paths import Paths

        self._runs: dict[str, Run] = {str(chosen): self}
        self._decided: dict[str, Run] = {}
        names = [str(chosen), *(name for name in chosen.other_paths() if name != str(chosen))]
        native = next((n for n in names if ":" not in n and backends.backend_class(n).path == "native"), None)
        paths = {name: functools.partial(self._call_on, name) for name in names}
        self._paths = Paths(target, options["slo"], paths, native, self.record.name)

    def _call_on(self, name: str) -> Callable[..., Any]:
        if name not in self._runs:
            run = Run(self.target, backends.get(name), self.options["fullgraph"], self.options["dynamic"], self.options)
            run.record.objectives = self.record.objectives
            self._runs[name] = run
        run = self._runs[name]
        return functools.partial(Run.__call__, run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.target(*args, **kwargs)
        if torch.is_grad_enabled():
            raise ConfigError(
                f"{self.record.name} was compiled with slo=, which is for inference, and gradients are enabled",
                remedy="call it under torch.no_grad(), or compile without slo for training",
            )
        from portable.slo.paths import signature_of_call

        signature = signature_of_call(self.target, args, kwargs)
        run = self._decided.get(signature)
        if run is None:
            run = self._decide(signature, args, kwargs)
        return Run.__call__(run, *args, **kwargs)

    def _decide(self, signature: str, args: Any, kwargs: Any) -> Run:
        with _COLD:
            if signature not in self._decided:
                self.record.forbid_when_frozen(f"no path has been decided for {signature}")
                decision = self._paths.decide(signature, args, kwargs)
                self.record.objectives.append(decision)
                self._decided[signature] = self._runs[decision.backend]
            return self._decided[signature]

    def freeze(self) -> None:
        for run in self._runs.values():
            run.record.frozen = True

    def explained(self) -> Record:
        """That of the path which every signature runs on; the selected backend's where they differ."""
        used = {id(run): run for run in self._decided.values()}
        return next(iter(used.values())).record if len(used) == 1 else self.record


def _argument(path: tuple[Any, ...]) -> str:
    """The place of a leaf of (args, kwargs) as the user would write it: ``0``, ``mask``, ``0['ids']``."""
    first = path[1]
    return f"{first.idx if hasattr(first, 'idx') else first.key}{pytree.keystr(path[2:])}"


def _raise_plainly(failure: Exception, run: Run, args: Any, kwargs: Any) -> NoReturn:
    """Raise what went wrong as the user can act on it: our own error without Dynamo's wrapping, or a bad input by
    name."""
    inner = failure.inner_exception if isinstance(failure, BackendCompilerFailed) else failure
    if isinstance(inner, PortableError):
        inner.args = (inner.text,)  # torch appends to it
        raise inner from (inner.__cause__ if isinstance(inner, KernelError) else None)  # the line of a kernel's author
    run.check_inputs(args, kwargs)
    refused = refusals.in_capture(inner, (args, kwargs))
    if refused is not None:
        raise refused from None
    raise failure


class CompiledModule(torch.nn.Module):
    """A compiled ``nn.Module``: the same parameters, buffers, submodules, hooks and mode as the original; only calls
    differ.

    Methods other than the call, e.g. ``generate``, are the original's own and run uncompiled.
    """

    __slots__ = ("_portable_run",)
    _portable_run: Run

    def __init__(self, model: torch.nn.Module, run: Run) -> None:
        object.__setattr__(self, "__dict__", model.__dict__)
        object.__setattr__(self, "_portable_run", run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._portable_run(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._portable_run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_portable_run").target, name)

    def freeze(self) -> CompiledModule:
        """From now on a call that needs a new compilation raises RecompileError. Returns the module."""
        self._portable_run.freeze()
        return self

    def __repr__(self) -> str:
        return f"portable.compile({self._portable_run.target!r}, backend={self._portable_run.record.backend!r})"

    def __reduce__(self) -> Any:
        return compiled, (self._portable_run.target, self._portable_run.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


class CompiledFunction:
    """A compiled function."""

    def __init__(self, function: Callable[..., Any], run: Run) -> None:
        functools.update_wrapper(self, function, updated=())
        self._portable_run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._portable_run(*args, **kwargs)

    def freeze(self) -> CompiledFunction:
        """From now on a call that needs a new compilation raises RecompileError. Returns the function."""
        self._portable_run.freeze()
        return self

    def __reduce__(self) -> Any:
        return compiled, (self._portable_run.target, self._portable_run.options)


def compiled(model: Any, options: dict[str, Any]) -> Any:
    """A module or function compiled with these options of `portable.compile`.

    Raises:
        ConfigError, UnknownBackendError, BackendUnavailableError: as there.
    """
    chosen = backends.get(backends.selected(options["backend"]))
    check_able(chosen, config.graphs_policy(options["graphs"]), options["dynamic"])
    if isinstance(model, CompiledModule):
        model = model._portable_run.target
    made = Run if options["slo"] is None else RunByObjective
    run = made(model, chosen, options["fullgraph"], options["dynamic"], options)
    return CompiledModule(model, run) if isinstance(model, torch.nn.Module) else CompiledFunction(model, run)


def check_able(chosen: Backend, graphs: str, dynamic: bool | None) -> None:
    """Refuse options that the backend cannot have."""
    if graphs == "require":
        chosen.records_graphs(graphs)
    if dynamic and chosen.static_shapes:
        raise ConfigError(
            f"dynamic=True, and backend {chosen} compiles each set of sizes apart: {chosen.static_shapes}",
            remedy="leave dynamic out",
        )
