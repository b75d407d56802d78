"""Compile a model for a backend: the public entry points."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.output_graph import graph_break_reasons
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils import _pytree as pytree

from portable import backends, config
from portable.backends.base import Backend, installed
from portable.errors import ConfigError, KernelError, PortableError, UnsupportedInputError
from portable.explain import Fallback, Note, Record, call_began, runs
from portable.lowering import refusals

if TYPE_CHECKING:
    from portable.backends.check import Check
    from portable.lowering.coverage import Coverage


_Model = TypeVar("_Model", bound=Callable[..., Any])


@overload
def compile(
    model: _Model,
    *,
    backend: str | None = ...,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    dims: Any = ...,
    slo: Any = ...,
    kernels: Any = ...,
    fallback: str | None = ...,
    graphs: str | None = ...,
) -> _Model: ...


@overload
def compile(
    model: None = ...,
    *,
    backend: str | None = ...,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    dims: Any = ...,
    slo: Any = ...,
    kernels: Any = ...,
    fallback: str | None = ...,
    graphs: str | None = ...,
) -> Callable[[_Model], _Model]: ...


def compile(
    model: Any = None,
    *,
    backend: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    dims: Any = None,
    slo: Any = None,
    kernels: Any = None,
    fallback: str | None = None,
    graphs: str | None = None,
) -> Any:
    """Compile a model or function for a backend; what is returned is called like it, and trains like it.

    Args:
        model: an ``nn.Module`` (the result is an ``nn.Module`` that shares its parameters, buffers, hooks and mode) or
            a function of tensors. Left out, a decorator is returned.
        backend: a backend's name, e.g. "xla", "cpu", "cpu:eager"; default: `use_backend`, PORTABLE_BACKEND, then the
            first that can run here. Resolved now, not at the first call.
        fullgraph: a graph break is an error.
        dynamic: as in ``torch.compile``. The default lets sizes become symbolic when they change: one capture, and on
            the stablehlo path one executable for each distinct set of sizes.
        fallback: what to do with an op that has no exact lowering: run torch's own kernel inside the program, and
            "warn" of it once an op, or "allow" it (`explain` lists it all the same), or "error", which refuses it;
            default PORTABLE_FALLBACK, read now. Where torch cannot run it there, it is refused in every mode.
        kernels: which kernels run: "auto", "off", a provider, or "op=provider,…"; default PORTABLE_KERNELS.
        graphs: whether launches are recorded once and replayed by one call (CUDA graphs): "auto" (the default) does so
            where the device can, and `explain` says why where it does not; "require" refuses instead; "off". Each
            distinct set of sizes is recorded apart, the first 8 of a graph with symbolic sizes; a recording keeps its
            memory.
        slo: an objective of the whole model, e.g. ``pt.SLO("p50_ms", 5.0)`` (p50_ms, p99_ms or ratio); for inference:
            every call is under ``torch.no_grad()``. The first call of each signature measures ``backend``, and where it
            misses the objective the other path of the same device (StableHLO or Inductor): the one that agrees with
            eager and meets it runs from then on. If none does ``backend`` stays, with a warning. `explain` shows the
            decision. That call runs the model many times; its arguments, buffers and random state are left as they
            were, other state that it keeps is not.
        dims: reserved, must be None.

    Raises:
        ConfigError: an option is not legal; with ``slo``, a call with gradients enabled; ``graphs="require"`` on a
            backend that records none.
        UnknownBackendError, BackendUnavailableError: no such backend, or not here.
        UnsupportedOpError: at the first call; names every op that has no exact lowering and does not fall back.
    """
    if model is None:
        return functools.partial(
            compile,
            backend=backend,
            fullgraph=fullgraph,
            dynamic=dynamic,
            dims=dims,
            slo=slo,
            kernels=kernels,
            fallback=fallback,
            graphs=graphs,
        )
    if dims is not None:
        raise ConfigError("dims= is not supported yet (bounded dynamic dimensions)", remedy="leave dims out")
    config.fallback_mode(fallback)
    if not callable(model):
        raise UnsupportedInputError(f"{type(model).__name__} is not callable", remedy="pass an nn.Module or a function")
    if slo is not None:
        from portable.slo.paths import check_slo

        check_slo(slo)
    policy = config.graphs_policy(graphs)
    chosen = backends.get(backends.selected(backend))
    _check_able(chosen, policy, dynamic)
    options = {"backend": backend, "fullgraph": fullgraph, "dynamic": dynamic, "fallback": fallback, "kernels": kernels}
    options |= {"slo": slo, "graphs": graphs}
    if isinstance(model, CompiledModule):
        model = model._portable_run.target
    run = (_Run if slo is None else _RunByObjective)(model, chosen, fullgraph, dynamic, options)
    return CompiledModule(model, run) if isinstance(model, torch.nn.Module) else CompiledFunction(model, run)


def _check_able(chosen: Backend, graphs: str, dynamic: bool | None) -> None:
    if graphs == "require":
        chosen.records_graphs(graphs)
    if dynamic and chosen.static_shapes:
        raise ConfigError(
            f"dynamic=True, and backend {chosen} compiles each set of sizes apart: {chosen.static_shapes}",
            remedy="leave dynamic out",
        )


def coverage(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    targets: str | Sequence[str] = "all",
    backward: bool = False,
) -> Coverage:
    """Which operators of a model run as StableHLO on which target, which fall back, and which are refused, each with
    the user's line.

    The model is captured as `compile` captures it, and lowered for each target, which need not be here; nothing is
    compiled. It is called once, in eager: a model in training mode updates its running statistics.

    Args:
        model: an ``nn.Module`` or a function of tensors.
        args, kwargs: what it is called with.
        targets: "all" (xla:cpu, xla:cuda and tpu), a name, or several; a device may follow, as in "tpu:v5e:2x2".
        backward: also the backward pass, of the sum of all outputs.

    Raises:
        ConfigError: no such target.
        LoweringError: a rule is wrong.
    """
    from portable.lowering.coverage import ALL, Coverage, Survey

    _refuse_bare(args, "coverage(model, (x,))")
    named = ALL if targets == "all" else (targets,) if isinstance(targets, str) else tuple(targets)
    if isinstance(model, CompiledModule | CompiledFunction):
        model = model._portable_run.target
    survey = Survey(named)
    run = _observed(model, survey, args, kwargs or {}, backward)
    return Coverage(run.record.name, len(run.record.graphs), survey.uses, run.record.breaks)


def check(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    target: str | Sequence[str] = "tpu:v5e:2x2",
    *,
    backward: bool = False,
    mesh: Mapping[str, int] | None = None,
    plan: Mapping[str, int] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Check:
    """Compile a model for devices that are not here, by their own compilers: whether it compiles, whether it fits into
    their memory, what it will cost, which operators and dtypes they lack.

    A copy of the model is captured as `compile` captures it, on tensors without values: weights may lie on the meta
    device, and are not materialised; nothing is run, unless what the model does between graphs depends on values: then
    the copy is called once, in eager. Results are kept by content in PORTABLE_CACHE_DIR. Programs are XLA's: the native
    backend ``cuda`` compiles with Inductor, and may need less memory. The state of an optimiser is not counted.

    Args:
        model: an ``nn.Module`` or a function of tensors; it is left as it was.
        args, kwargs: what it is called with.
        target: a device or several, as "tpu:v5e:2x2" or "cuda:h200"; a wrong name's error lists all.
        backward: also the backward pass, of the sum of all outputs: its activations and gradients count.
        mesh: for a sharded program: {"batch": n, "tensor": m} over n × m devices, which are the target's whole slice.
            Inputs are divided along their first dimension, weights along their largest that can be.
        plan: {pattern of weights' names: the dimension that is divided over "tensor"}.
        progress: called with a line of text before each compilation, which can take a minute or more.

    Raises:
        ConfigError: no such target; a mesh or plan that is not legal, or does not fit the model or the slice.
        BackendUnavailableError: the compiler for a target is not installed.
        UnsupportedInputError: a sparse or nested tensor.
        LoweringError: a rule is wrong.
    """
    from portable.backends import deviceless, targets
    from portable.backends.check import Check, Lowering, judge, mesh_for
    from portable.capture import twin, without_values

    _refuse_bare(args, "check(model, (x,), target=…)")
    if target is None:
        raise ConfigError("target is None", remedy="name a device or several, as in target='tpu:v5e:2x2'")
    named = [targets.find(name) for name in dict.fromkeys((target,) if isinstance(target, str) else target)]
    if not named:
        raise ConfigError("no target is named", remedy=f"one of {', '.join(targets.names())}")
    for each in named:
        deviceless.require(each)
    on = mesh_for(named, mesh, plan)
    if on.size > 1 and backward:
        raise ConfigError("a sharded check of the backward pass is not built", remedy="leave out mesh= or backward=")
    if isinstance(model, CompiledModule | CompiledFunction):
        model = model._portable_run.target
    lowering = Lowering(named, model, (args, kwargs))
    told = progress or (lambda line: None)
    told("capturing and lowering")
    try:
        with without_values(model, tuple(args), kwargs or {}) as (copy, fake_args, fake_kwargs):
            run = _observed(copy, lowering, fake_args, fake_kwargs, backward)
    except (DataDependentOutputException, DynamicOutputShapeException) as failure:
        _require_values(model, args, kwargs, failure)
        lowering = Lowering(named, model, (args, kwargs))
        own = twin(model, lambda x: x if isinstance(x, torch.nn.Parameter) else x.clone())
        run = _observed(own, lowering, args, kwargs or {}, backward)
    if backward and not any(program.kind == "backward" for program in lowering.programs):
        raise ConfigError(
            f"{run.record.name} has no backward pass here: nothing that it returns depends on a parameter or argument "
            "that requires a gradient",
            remedy="leave out backward=; or is everything frozen, or this in torch.inference_mode?",
        )
    outside = [f"{f.op}: {f.reason}" for f in run.record.fallbacks] + [b.reason for b in run.record.breaks]
    verdicts = {each.name: judge(each, lowering, on, told, outside) for each in named}
    return Check(run.record.name, verdicts, run.record.breaks, on)


def _require_values(model: Any, args: Any, kwargs: Any, failure: Exception) -> None:
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if isinstance(model, torch.nn.Module):
        tensors += [*model.parameters(), *model.buffers()]
    if any(x.device.type == "meta" or isinstance(x, FakeTensor) for x in tensors):
        raise UnsupportedInputError(
            f"what this model computes between its graphs depends on values, and there are none: {failure}",
            remedy="pass tensors with values, on the CPU",
        ) from failure


def _observed(model: Any, observer: Backend, args: Sequence[Any], kwargs: Mapping[str, Any], backward: bool) -> _Run:
    """Show ``observer`` every graph of one call, and of its backward pass."""
    options = {"backend": None, "fullgraph": False, "dynamic": False, "fallback": "allow", "kernels": "off"}
    run = _Run(model, observer, False, False, options)
    with torch.set_grad_enabled(backward):
        outputs = run(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        leaves = _leaves(tensors)
        if leaves:
            torch.autograd.grad([x.sum().abs() for x in tensors], leaves, allow_unused=True)
    return run


def _leaves(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What these were computed from and has a gradient: arguments, parameters, what a function closes over."""
    nodes = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                nodes.append(node)
    return [node.variable for node in seen if hasattr(node, "variable")]


def _refuse_bare(args: Any, example: str) -> None:
    if isinstance(args, torch.Tensor):
        raise ConfigError("args is a tensor, and is to be the tuple of all arguments", remedy=example)


def device(backend: str | None = None) -> torch.device:
    """The torch device on which the tensors of the selected backend live (cpu for the XLA family)."""
    return backends.get(backends.selected(backend)).device()


def dynamo_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The Dynamo backend behind ``torch.compile(model, backend="portable")``.

    ``options={"backend": "xla"}`` of torch.compile names the backend; the default is PORTABLE_BACKEND. ``graphs`` is
    as in `compile`.
    """
    options = dict(kwargs.get("options") or {})
    chosen = backends.get(backends.selected(options.pop("backend", None)))
    graphs = config.graphs_policy(options.pop("graphs", None))
    if options:
        raise ConfigError(f"unknown options {sorted(options)}", remedy='the options are "backend" and "graphs"')
    _check_able(chosen, graphs, None)
    record = Record("torch.compile", str(chosen), chosen.path, fallback=config.fallback_mode(), graphs=graphs)
    return _compile_graph(chosen, record, gm, example_inputs)


def _compile_graph(
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


class _Run:
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
            return _compile_graph(chosen, record, gm, example_inputs)  # not self: Dynamo keeps every backend for good

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


class _RunByObjective(_Run):
    """One callable compiled for the selected backend, and for the other paths of its device where the objective asks
    for them; each signature runs on the path that was decided for it at its first call."""

    def __init__(self, target: Any, chosen: Backend, fullgraph: bool, dynamic: bool | None, options: dict[str, Any]):
        super().__init__(target, chosen, fullgraph, dynamic, options)
        from portable.slo.paths import Paths

        self._runs: dict[str, _Run] = {str(chosen): self}
        self._decided: dict[str, _Run] = {}
        names = [str(chosen), *(name for name in chosen.other_paths() if name != str(chosen))]
        native = next((n for n in names if ":" not in n and backends.backend_class(n).path == "native"), None)
        paths = {name: functools.partial(self._call_on, name) for name in names}
        self._paths = Paths(target, options["slo"], paths, native, self.record.name)

    def _call_on(self, name: str) -> Callable[..., Any]:
        if name not in self._runs:
            run = _Run(
                self.target, backends.get(name), self.options["fullgraph"], self.options["dynamic"], self.options
            )
            run.record.objectives = self.record.objectives
            self._runs[name] = run
        run = self._runs[name]
        return functools.partial(_Run.__call__, run)

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
        return _Run.__call__(run, *args, **kwargs)

    def _decide(self, signature: str, args: Any, kwargs: Any) -> _Run:
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


def _raise_plainly(failure: Exception, run: _Run, args: Any, kwargs: Any) -> NoReturn:
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
    _portable_run: _Run

    def __init__(self, model: torch.nn.Module, run: _Run) -> None:
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
        return _recompiled, (self._portable_run.target, self._portable_run.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


class CompiledFunction:
    """A compiled function."""

    def __init__(self, function: Callable[..., Any], run: _Run) -> None:
        functools.update_wrapper(self, function, updated=())
        self._portable_run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._portable_run(*args, **kwargs)

    def freeze(self) -> CompiledFunction:
        """From now on a call that needs a new compilation raises RecompileError. Returns the function."""
        self._portable_run.freeze()
        return self

    def __reduce__(self) -> Any:
        return _recompiled, (self._portable_run.target, self._portable_run.options)


def _recompiled(target: Any, options: dict[str, Any]) -> Any:
    return compile(target, **options)
