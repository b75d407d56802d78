"""The call path of a compiled model: Dynamo with our backend, its record, and errors that its user can act on."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.modules.module as nn_module
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.output_graph import graph_break_reasons
from torch.utils import _pytree as pytree

from portable import config
from portable.backends.base import Backend, installed
from portable.compiled.frames import captured, cold
from portable.errors import ConfigError, KernelError, PortableError
from portable.explain import Fallback, Note, Record, call_began, runs
from portable.lowering import refusals


def compile_graph(
    chosen: Backend, record: Record, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    graph = record.add_graph(gm, example_inputs)
    try:
        record.forbid_when_frozen(graph.cause)
        return chosen.compile(gm, example_inputs, graph, record)
    except BaseException:  # an error of the user's or ours, or torch traces this again
        record.give_up([graph])
        raise


_WARM_KEYS = 4096


def _sizes(argument: Any) -> Any:
    return (argument.shape, argument.dtype) if isinstance(argument, torch.Tensor) else None


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


_HOOKS = [hooks for name, hooks in vars(nn_module).items() if name.startswith(("_global_forward", "_global_backward"))]
_SIZES = 256  # how many of a model Dynamo captures before it gives up and runs it in eager


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

        # compiled models share code objects: each one's recompilations are counted apart
        limits: dict[str, Any] = {"isolate_recompiles": True}
        if chosen.static_shapes:
            dynamic, limits["recompile_limit"] = False, _SIZES
            record.add_note(Note("shapes", f"one executable for each distinct set of sizes: {chosen.static_shapes}"))
        self._captured = functools.partial(
            captured, backend=portable, record=record, nopython=fullgraph, dynamic=dynamic, **limits
        )
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the target: of a module with its hooks."""
        if torch.compiler.is_dynamo_compiling() or torch._C._is_tracing():
            return self.target(*args, **kwargs)  # inside another compiled model: part of its graph
        return self._run(self._captured_now(None), args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the ``forward`` of a module's class, without hooks."""
        return self._run(self._captured_now(type(self.target).forward), args, kwargs)

    def _captured_now(self, method: Any) -> Callable[..., Any]:
        """The target, or a method of its class, as it is captured under the hooks of every module: no guard of Dynamo's
        watches these."""
        key = (method, *(hook for hooks in _HOOKS if hooks for hook in hooks.values()))
        if key not in self._compiled:
            self._compiled[key] = self._captured(self.target if method is None else method.__get__(self.target))  # type: ignore[call-arg]
        return self._compiled[key]

    def _run(self, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        training = getattr(self.target, "training", None)
        key = (compiled, torch.is_grad_enabled(), training, *[_sizes(a) for a in (*args, *kwargs.values())])
        if key in self._warm:
            return self._call(compiled, args, kwargs)
        with cold():
            self._whole = self._kept_whole()
            result = self._call(compiled, args, kwargs)
            if len(self._warm) >= _WARM_KEYS:
                self._warm.clear()
            self._warm.add(key)
        return result

    def _call(self, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call_began()
        before, breaks = runs(), len(graph_break_reasons)
        try:
            with self._capturing():
                result = compiled(*args, **kwargs)
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
