"""One measurement: the portable path of a workload against its baselines, in one interleaved run.

Correctness comes first: what the portable path gives is compared with eager in float64 before anything is timed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from portable.slo.correctness import difference

from .memory import peak_mb
from .roofline import Cost, cost
from .threads import unbound
from .timer import interleave
from .workloads import Workload

BASELINES = ("eager", "inductor")
Call = Callable[[], Any]


@dataclass
class Measurement:
    """What was measured of one workload.

    Attributes:
        samples_s: seconds per call, one a round, by name: "portable" and the baselines.
        compile_s: seconds of the first call, by name: capture, compilation and one run.
        peak_mb: peak memory of a call in 10⁶ bytes, by name; a name is absent where it could not be measured.
        cost: what a call must compute and move at least.
        wrong: how the portable path's result differs from the reference; '' if it does not.
        notes: baselines left out, and why.
    """

    samples_s: dict[str, list[float]]
    compile_s: dict[str, float] = field(default_factory=dict)
    peak_mb: dict[str, float] = field(default_factory=dict)
    cost: Cost | None = None
    wrong: str = ""
    notes: list[str] = field(default_factory=list)


def measure(
    workload: Workload,
    backend: str,
    *,
    compare: Sequence[str] = BASELINES,
    budget_s: float = 10.0,
    min_rounds: int = 7,
    with_inductor: bool = True,
) -> Measurement:
    """Compile, check and time a workload on ``backend``.

    Args:
        compare: baselines, of BASELINES.
        budget_s: seconds for all of it; compiling is part of it and is not interrupted.
        with_inductor: False leaves out Inductor's compilation, and says so in the notes.

    Raises:
        ValueError: a baseline that does not exist.
        PortableError: the backend refuses the workload.
    """
    import portable as pt

    if unknown := set(compare) - set(BASELINES):
        raise ValueError(f"unknown baselines {sorted(unknown)}: legal are {', '.join(BASELINES)}")
    began = time.perf_counter()
    torch.compiler.reset()  # no guard, symbolic size or recompile limit of the workload before
    function, args = placed(workload, pt.device(backend))
    eager = call_of(function, args, workload.backward)
    result = Measurement({})
    calls = {
        "portable": call_of(
            pt.compile(function, backend=backend, dynamic=False, kernels="off"), args, workload.backward
        )
    }
    if "eager" in compare:
        calls["eager"] = eager
    if "inductor" in compare and with_inductor:
        calls["inductor"] = call_of(torch.compile(function, dynamic=False), args, workload.backward)
    elif "inductor" in compare:
        result.notes.append("inductor was left out: no time for its compilation")
    outputs = {}
    for name, call in calls.items():
        with unbound():
            first = time.perf_counter()
            outputs[name] = call()
            result.compile_s[name] = time.perf_counter() - first
    result.wrong = difference(
        outputs["portable"], outputs["eager"] if "eager" in outputs else eager(), _exact(workload)
    )
    outputs.clear()
    result.cost = cost(eager, (args, _state(function)))
    for name, call in calls.items():
        if (peak := peak_mb(call)) is not None:
            result.peak_mb[name] = peak
    left = budget_s - (time.perf_counter() - began)
    result.samples_s = interleave(calls, budget_s=left, min_rounds=min_rounds)
    return result


def placed(workload: Workload, device: torch.device) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The workload's function and arguments on ``device``; those that get gradients require them."""
    function, args = workload.make()
    if isinstance(function, torch.nn.Module):
        function = function.to(device)
    move = lambda x: x.to(device).requires_grad_(workload.backward and x.is_floating_point())  # noqa: E731
    return function, pytree.tree_map_only(torch.Tensor, move, args)


def call_of(function: Callable[..., Any], args: tuple[Any, ...], backward: bool) -> Call:
    """A call without arguments: the result, or with ``backward`` the results and the gradients of all that want one."""
    if not backward:

        def forward() -> Any:
            with torch.no_grad():
                return function(*args)

        return forward

    leaves = [
        t for t in (*pytree.tree_leaves(args), *_state(function)) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    ones: list[torch.Tensor] = []

    def both() -> Any:
        outs = [t for t in pytree.tree_leaves(function(*args)) if t.requires_grad]
        if not ones:
            ones.extend(torch.ones_like(t) for t in outs)
        return [t.detach() for t in outs], torch.autograd.grad(outs, leaves, ones)

    return both


def _state(function: Any) -> list[torch.Tensor]:
    return [*function.parameters(), *function.buffers()] if isinstance(function, torch.nn.Module) else []


def _exact(workload: Workload) -> Any:
    """The result in float64, computed on the host."""
    function, args = placed(workload, torch.device("cpu"))
    if isinstance(function, torch.nn.Module):
        function = copy.deepcopy(function).double()
    widen = lambda x: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x  # noqa: E731
    return call_of(function, pytree.tree_map_only(torch.Tensor, widen, args), workload.backward)()
