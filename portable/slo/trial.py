"""One candidate's trial, in a process of its own: is it correct on every case, and how fast is it beside the portable
path.

The process may crash, hang or eat memory; `run` says so and nothing else is lost. It gets what to try by pickle from
its own parent alone.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from portable.errors import BackendUnavailableError
from portable.lowering.context import Spec

TIMEOUT_S = 120.0
MEMORY_MB = 8_000.0
END_S = 5.0
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Unit:
    """One op with the types of its arguments: what a decision is about.

    Attributes:
        op: a portable op's name or an overload's.
        args, kwargs: its arguments, tensors as Specs.
        signature: the same as canonical text.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    signature: str


@dataclass(frozen=True)
class Request:
    """What to try: ``unit`` by ``provider``'s kernel on ``backend``.

    Attributes:
        others: further recorded units of the same op, on which the kernel must be correct too.
        baselines: "eager", "inductor", timed in the same interleaved run.
        module: the module that registers the kernel, if it is not one of portable's own.
        budget_s: for the timing.
        alone: what counts is the latency of a call by itself, see `measured`.
    """

    unit: Unit
    provider: str
    backend: str
    others: tuple[Unit, ...] = ()
    baselines: tuple[str, ...] = ("eager",)
    module: str = ""
    budget_s: float = 5.0
    seed: int = 0
    alone: bool = False


@dataclass
class Trial:
    """What came of it.

    Attributes:
        outcome: "measured", "wrong", "crashed", "hung", or "impossible": this machine cannot run the trial, which says
            nothing about the kernel.
        reason: what was wrong, with the case.
        cases: how many cases it was correct on.
        samples_s: seconds per call by name: "portable", "candidate" and the baselines, one a round.
    """

    outcome: str
    reason: str = ""
    cases: int = 0
    samples_s: dict[str, list[float]] = field(default_factory=dict)


Case = tuple[str, list[Any], dict[str, Any]]


def run(request: Request, *, timeout_s: float = TIMEOUT_S, memory_mb: float = MEMORY_MB) -> Trial:
    """Try a candidate in a fresh process, within a memory limit.

    Args:
        timeout_s: for each case, and for the timing: a kernel hangs that gives no answer, not one that is tried on a
            slow machine.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, request), daemon=True)
    process.start()
    theirs.close()
    deadline = time.monotonic() + timeout_s
    trial, doing = None, "the first case"
    try:
        while trial is None:
            if ours.poll(0.1):
                try:
                    told = ours.recv()
                    if isinstance(told, Trial):
                        trial = told
                    else:
                        doing, deadline = told, time.monotonic() + timeout_s
                except (EOFError, OSError):
                    process.join()
                    trial = Trial("crashed", _ended(process.exitcode))
            elif time.monotonic() > deadline:
                trial = Trial("hung", f"{doing}: no answer in {timeout_s:.0f} s")
            elif (used := _resident_mb(process.pid)) > memory_mb:
                trial = Trial("crashed", f"it used {used:.0f} MB of memory, more than {memory_mb:.0f}")
    finally:
        if trial is not None and trial.outcome not in ("crashed", "hung"):
            process.join(END_S)  # it clears up behind itself
        if process.is_alive():
            process.kill()
        process.join()
        ours.close()
    return trial


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"its process ended with status {code}"


def _resident_mb(pid: int | None) -> float:
    try:
        with open(f"/proc/{pid}/statm") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, ValueError, IndexError):
        return 0.0


def _use_every_core() -> None:
    """Where OpenMP binds its threads, it binds this one too, and XLA's pool would inherit its one core."""
    if "OMP_PROC_BIND" in os.environ and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _end_with_parent() -> None:
    """A trial is of no use once the process that asked for it was killed (prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _child(connection: Any, request: Request) -> None:
    try:
        _end_with_parent()
        _use_every_core()
        trial = try_here(request, connection.send)
    except Exception as failure:  # not from a call of the kernel: a baseline, a compiler that is missing
        trial = Trial("impossible", _described(failure))
    connection.send(trial)
    connection.close()


def _described(failure: BaseException) -> str:
    text = str(failure).strip()
    return f"{type(failure).__name__}: {text.splitlines()[0][:300]}" if text else type(failure).__name__


def try_here(request: Request, doing: Callable[[str], None] = lambda _: None) -> Trial:
    """The trial itself, in this process; ``doing`` is told what comes next."""
    from portable.kernels import registry

    if request.module:
        importlib.import_module(request.module)
    registry.load()
    functions: dict[str, Callable[..., Any]] = {}
    cases, device = 0, device_of(request.backend)
    for unit in (request.unit, *request.others):
        if why := _why_not(request, unit):
            if unit is request.unit:
                return Trial("wrong", f"it does not take these arguments: {why}")
            continue
        for case in cases_of(unit, request.seed, device):
            like = unit_like(unit, *case[1:])
            if why := _why_not(request, like):
                if like.signature == unit.signature:
                    return Trial("wrong", f"{case[0]}: it took these arguments before, now {why}", cases)
                continue
            doing(case[0])
            if failed := _tried(request, unit, case, functions):
                return replace(failed, cases=cases)
            cases += 1
    doing("the timing")
    samples_s = timed(request)
    name, args, kwargs = next(cases_of(request.unit, request.seed + 2, device))
    if failed := _tried(request, request.unit, (f"{name} after the timing", args, kwargs), functions):
        return replace(failed, cases=cases)
    return Trial("measured", "", cases, samples_s)


def _tried(request: Request, unit: Unit, case: Case, functions: dict[str, Callable[..., Any]]) -> Trial | None:
    """What is wrong with the kernel's answer for one case; None if nothing is.

    Args:
        functions: what was compiled, by signature. Cases share it: a kernel that caches its answer is asked again.
    """
    name, args, kwargs = case
    like = unit_like(unit, args, kwargs)
    if like.signature not in functions:
        functions[like.signature] = compiled_call(like, request.backend, request.provider)
    try:
        problem = check(functions[like.signature], unit, args, kwargs)
        problem = problem or _check_gradients(functions[like.signature], request, args, kwargs)
    except _Raised as raised:
        if isinstance(raised.failure, BackendUnavailableError):
            return Trial("impossible", _described(raised.failure))
        problem = f"it raised {_described(raised.failure)}"
    if problem:
        return Trial("wrong", f"{name}: {problem}")
    if not _ran(functions[like.signature], request):
        return Trial("impossible", f"{name}: the program does not call the kernel")
    return None


class _Raised(Exception):
    """The call of the kernel raised ``failure``."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure


def _ran(function: Callable[..., Any], request: Request) -> bool:
    """Whether the compiled function calls the kernel, and ran in no other way."""
    import portable as pt

    found = pt.explain(function, show=False)
    ways = [way for op, ways in found.ops.items() if request.unit.op in (op, _plain(op)) for way in ways]
    return f"kernel {request.provider}" in ways and not found.fallbacks


def _plain(overload: str) -> str:
    """The name of the portable op that ``portable.<name>.default`` stands for; '' for other overloads."""
    namespace, _, rest = overload.partition(".")
    return rest.removesuffix(".default") if namespace == "portable" else ""


def _why_not(request: Request, unit: Unit) -> str:
    from portable.kernels.registry import KERNELS

    return KERNELS[request.unit.op, request.provider].why_not(unit.args, unit.kwargs)


def unit_like(unit: Unit, args: Sequence[Any], kwargs: dict[str, Any]) -> Unit:
    """The unit of a call with these tensors."""
    from portable.kernels.select import signature_of

    spec = lambda x: Spec(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x  # noqa: E731
    types = tuple(pytree.tree_map(spec, a) for a in args)
    named = pytree.tree_map(spec, kwargs)
    return Unit(unit.op, types, named, signature_of(types, named))


def function_of(op: str) -> Callable[..., Any]:
    """The callable that an op's name stands for."""
    from portable.kernels.registry import overload_named

    overload = overload_named(op)
    if overload is not None:
        return overload
    from portable import ops

    found: Callable[..., Any] = getattr(ops, op)
    return found


def device_of(backend: str) -> torch.device:
    """Where the tensors are that programs of ``backend`` take: "cuda" for cuda, the host for xla."""
    from portable import backends

    return backends.get(backend).device()


def tensors_for(
    unit: Unit, generator: torch.Generator, device: torch.device = HOST
) -> tuple[list[Any], dict[str, Any]]:
    """Fresh arguments: normal floats, small non-negative integers; drawn on the host, so that devices get the same."""

    def make(value: Any) -> Any:
        if not isinstance(value, Spec):
            return value
        if value.dtype.is_floating_point or value.dtype.is_complex:
            return torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype).to(device)
        return torch.randint(0, 2, value.shape, generator=generator).to(value.dtype).to(device)

    is_spec = lambda x: isinstance(x, Spec)  # noqa: E731
    args = [pytree.tree_map(make, a, is_leaf=is_spec) for a in unit.args]
    return args, {name: pytree.tree_map(make, value, is_leaf=is_spec) for name, value in unit.kwargs.items()}


def cases_of(unit: Unit, seed: int, device: torch.device = HOST) -> Iterator[Case]:
    """The calls on which a kernel must be right: fresh values, NaN and infinities, other layouts, other batch sizes.

    One at a time: a case may use the memory of the one before it again.
    """
    generator = torch.Generator().manual_seed(seed)
    fresh = lambda: tensors_for(unit, generator, device)  # noqa: E731
    args, kwargs = fresh()
    yield "fresh values", args, kwargs
    yield "other values", *fresh()
    for tensor, other in zip(_tensors_in((args, kwargs)), _tensors_in(fresh()), strict=True):
        tensor.copy_(other)
    yield "other values in the same memory", args, kwargs
    for name, value in (("NaN", float("nan")), ("infinity", float("inf")), ("zeros", 0.0)):
        args, kwargs = fresh()
        yield name, [_poisoned(a, value) for a in args], kwargs
    args, kwargs = fresh()
    yield "non-contiguous", pytree.tree_map_only(torch.Tensor, _strided, args), kwargs
    for n in (0, 1, 3):
        if (resized := _resized(unit, n, generator, device)) is not None:
            yield f"batch of {n}", *resized


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _poisoned(value: Any, poison: float) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    value = value.clone()
    if poison == 0.0:
        return value.zero_()
    value.view(-1)[:: max(1, value.numel() // 3)] = poison
    return value


def _strided(value: torch.Tensor) -> torch.Tensor:
    """The same values, every element followed by a gap of NaN or ones."""
    gap = torch.ones_like(value) if not value.is_floating_point() else torch.full_like(value, float("nan"))
    return torch.stack([value, gap], -1)[..., 0]


def _resized(
    unit: Unit, batch: int, generator: torch.Generator, device: torch.device
) -> tuple[list[Any], dict[str, Any]] | None:
    """The call with another leading size of its first argument, where eager takes it."""
    first = unit.args[0] if unit.args else None
    if not isinstance(first, Spec) or first.ndim < 2 or first.shape[0] == batch:
        return None
    other = replace(unit, args=(Spec((batch, *first.shape[1:]), first.dtype), *unit.args[1:]))
    args, kwargs = tensors_for(other, generator, device)
    try:
        function_of(unit.op)(*args, **kwargs)
    except Exception:  # eager refuses this size for this op: no case
        return None
    return args, kwargs


def check(function: Callable[..., Any], unit: Unit, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """How the kernel's answer for one call differs from the reference's; '' if it does not.

    Args:
        function: `compiled_call` of the kernel for these types.
    """
    from portable.slo.correctness import difference, exactly

    before = pytree.tree_map_only(torch.Tensor, torch.clone, (list(args), kwargs))
    tensors = _tensors_in((list(args), kwargs))
    with torch.no_grad():
        try:
            (result,) = function(*tensors)
        except Exception as failure:  # whatever a kernel raises is its result
            raise _Raised(failure) from failure
        for x, y in zip(pytree.tree_leaves((list(args), kwargs)), pytree.tree_leaves(before), strict=True):
            if isinstance(x, torch.Tensor) and not torch.equal(_bytes(x), _bytes(y)):
                return "it wrote to its arguments"
        reference = function_of(unit.op)
        eager = reference(*before[0], **before[1])
        exact = exactly(reference, *before)
    return difference(result, eager, exact)


def _check_gradients(
    function: Callable[..., Any], request: Request, args: Sequence[Any], kwargs: dict[str, Any]
) -> str:
    """The same for the gradients, where the kernel brings its own."""
    from portable.kernels.registry import KERNELS
    from portable.slo.gradients import wrong_gradients

    if KERNELS[request.unit.op, request.provider].backward is None:
        return ""
    try:
        problem = wrong_gradients(function, function_of(request.unit.op), args, kwargs)
    except Exception as failure:  # whatever a kernel raises is its result
        raise _Raised(failure) from failure
    return f"its gradients: {problem}" if problem else ""


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def compiled_call(unit: Unit, backend: str, provider: str) -> Callable[..., Any]:
    """One call of the op as a function of its tensors, compiled for the backend with one provider ("off": the portable
    path)."""
    return _compiled(repeated(unit, 1), unit.op, backend, provider)


def _compiled(function: Callable[..., Any], op: str, backend: str, provider: str) -> Callable[..., Any]:
    import portable as pt

    kernels = "off" if provider == "off" else f"{op}={provider}"
    compiled: Callable[..., Any] = pt.compile(function, backend=backend, dynamic=False, kernels=kernels)
    return compiled


class _Held(torch.nn.Module):
    """A call on tensors that are the model's own: handing over an argument is not what an op costs in a program."""

    def __init__(self, call: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.tensors = torch.nn.ParameterList(torch.nn.Parameter(t, requires_grad=False) for t in tensors)

    def forward(self) -> Any:
        return self.call(*self.tensors)


def repeated(unit: Unit, copies: int) -> Callable[..., Any]:
    """``copies`` calls of the op, as a function of the tensors of all of them."""
    op = function_of(unit.op)
    leaves, tree = pytree.tree_flatten((list(unit.args), dict(unit.kwargs)), is_leaf=lambda x: isinstance(x, Spec))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Spec)]
    constants = [None if isinstance(leaf, Spec) else leaf for leaf in leaves]

    def call(*tensors: torch.Tensor) -> Any:
        results = []
        for n in range(copies):
            values = list(constants)
            for place, tensor in zip(places, tensors[n * len(places) : (n + 1) * len(places)], strict=True):
                values[place] = tensor
            args, kwargs = pytree.tree_unflatten(values, tree)
            results.append(op(*args, **kwargs))
        return results

    return call


def timed(request: Request) -> dict[str, list[float]]:
    """Seconds per call of the portable path, the candidate and the baselines, interleaved."""
    names = {"portable": "off", "candidate": request.provider}
    return measured(
        request.unit, request.backend, names, request.baselines, request.budget_s, request.seed + 1, request.alone
    )


SAMPLE_S = 3e-3
COPIES = 16
MIN_ROUNDS = 15


def measured(
    unit: Unit,
    backend: str,
    providers: Mapping[str, str],
    baselines: Sequence[str],
    budget_s: float,
    seed: int = 0,
    alone: bool = False,
) -> dict[str, list[float]]:
    """Seconds per call of a unit inside a program, by name, interleaved.

    A short op is measured as several calls on different arguments in one program, divided by their number: what a call
    of the whole program costs is not the op's.

    Args:
        providers: {name: "off" for the portable path, or a kernel's provider}.
        baselines: of "eager", "inductor".
        alone: measure a call by itself, with all that it costs.
    """
    interleave = _timer().interleave

    generator = torch.Generator().manual_seed(seed)
    eager = repeated(unit, 1)
    device = device_of(backend)
    first = _tensors(unit, generator, device)
    copies = 1 if alone else min(COPIES, max(1, round(SAMPLE_S / _once(eager, first))))
    tensors = first + [t for _ in range(copies - 1) for t in _tensors(unit, generator, device)]
    program = repeated(unit, copies)
    held = functools.partial(program, *tensors) if alone else _Held(program, tensors)
    functions = {name: _compiled(held, unit.op, backend, provider) for name, provider in providers.items()}
    if "eager" in baselines:
        functions["eager"] = held
    if "inductor" in baselines:
        functions["inductor"] = torch.compile(held, dynamic=False)

    def bound(function: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return function()

        return call

    samples = interleave({name: bound(f) for name, f in functions.items()}, budget_s=budget_s, min_rounds=MIN_ROUNDS)
    return {name: [s / copies for s in values] for name, values in samples.items()}


def _timer() -> Any:
    """The one timer: of the installed package, or of the source tree that this runs in."""
    try:
        return importlib.import_module("portable.benchmarks.timer")
    except ImportError:
        return importlib.import_module("benchmarks.timer")


def _tensors(unit: Unit, generator: torch.Generator, device: torch.device) -> list[torch.Tensor]:
    return _tensors_in(tensors_for(unit, generator, device))


def _once(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> float:
    """Seconds of the fastest of a few calls."""

    def one() -> float:
        began = time.perf_counter()
        function(*tensors)
        return time.perf_counter() - began

    return max(1e-6, min(one() for _ in range(5)))
