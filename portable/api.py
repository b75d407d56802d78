"""Compile a model for a backend: the public entry points."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils import _pytree as pytree

from portable import backends, config
from portable.backends.base import Backend
from portable.compiled import CompiledFunction, CompiledModule, check_able, compiled
from portable.compiled.run import Run, compile_graph
from portable.errors import ConfigError, UnsupportedInputError
from portable.explain import Record

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
    if not (callable(model) or isinstance(model, classmethod)):
        raise UnsupportedInputError(f"{type(model).__name__} is not callable", remedy="pass an nn.Module or a function")
    if slo is not None:
        from portable.slo.paths import check_slo

        check_slo(slo)
    options = {"backend": backend, "fullgraph": fullgraph, "dynamic": dynamic, "fallback": fallback, "kernels": kernels}
    options |= {"slo": slo, "graphs": graphs}
    return compiled(model, options)


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
        model = object.__getattribute__(model, "_portable_run").target
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
        model = object.__getattribute__(model, "_portable_run").target
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


def _observed(model: Any, observer: Backend, args: Sequence[Any], kwargs: Mapping[str, Any], backward: bool) -> Run:
    """Show ``observer`` every graph of one call, and of its backward pass."""
    options = {"backend": None, "fullgraph": False, "dynamic": False, "fallback": "allow", "kernels": "off"}
    run = Run(model, observer, False, False, options)
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
    check_able(chosen, graphs, None)
    record = Record("torch.compile", str(chosen), chosen.path, fallback=config.fallback_mode(), graphs=graphs)
    return compile_graph(chosen, record, gm, example_inputs)
