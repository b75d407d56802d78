"""What a backend computes, against eager on the CPU: the work behind the tests of `conformance`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import portable as pt
from portable import backends
from portable.backends.base import Backend
from portable.slo.correctness import difference, exactly
from portable.testing import networks
from portable.testing.programs import FAMILIES, Draw, Program

OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 3e-3, eps=1e-3),
}


def dtypes_of(backend: str, family: str) -> list[torch.dtype]:
    """The dtypes that a family is tested in on a backend: those of its capabilities."""
    name, _, variant = backend.partition(":")
    legal = backends.backend_class(name)(variant).capabilities().dtypes
    return [dtype for dtype in FAMILIES[family][0] if dtype in legal]


def moved(values: Any, device: torch.device) -> Any:
    """A copy of every tensor on ``device``, with the same strides and offset."""

    def move(x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x.to(device, copy=True)
        length = x.untyped_storage().nbytes() // x.element_size()
        whole = x.as_strided((length,), (1,), 0).to(device, copy=True)
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())

    return pytree.tree_map_only(torch.Tensor, move, values)


@functools.cache
def results(backend: str, family: str, dtype: torch.dtype) -> dict[str, str]:
    """By name, how each program of a family differs from eager; '' where it does not.

    All are compiled as one function, which is quicker; where that fails, one by one.
    """
    found = backends.get(backend)
    programs = FAMILIES[family][1]

    def together(groups: list[tuple[Any, ...]]) -> list[Any]:
        return [program.function(*args) for program, args in zip(programs, groups, strict=True)]

    groups = [moved(program.inputs(Draw(dtype)), found.device()) for program in programs]
    try:
        outputs = _compiled(together, backend)(groups)
    except Exception:  # whatever stops one program must not hide the others
        return {program.name: _alone(backend, found, program, dtype) for program in programs}
    return {
        program.name: _compared(program, dtype, (output, args), found)
        for program, output, args in zip(programs, outputs, groups, strict=True)
    }


def _alone(backend: str, found: Backend, program: Program, dtype: torch.dtype) -> str:
    args = moved(program.inputs(Draw(dtype)), found.device())
    try:
        output = _compiled(program.function, backend)(*args)
    except Exception as failure:  # it is the test's result
        return f"{type(failure).__name__}: {failure}"
    return _compared(program, dtype, (output, args), found)


def _compared(program: Program, dtype: torch.dtype, result: Any, found: Backend) -> str:
    def observed(*args: Any) -> Any:
        return program.function(*args), args

    host = torch.device("cpu")
    inputs = program.inputs(Draw(dtype))
    eager = observed(*moved(inputs, host))
    exact = exactly(observed, moved(inputs, host), {})
    return difference(result, eager, exact, found.tolerances())


@functools.cache
def gradients(backend: str, family: str, dtype: torch.dtype) -> dict[str, str]:
    """By name, how the gradients of each differentiable program differ from eager's; '' where they do not."""
    found = backends.get(backend)
    programs = [p for p in FAMILIES[family][1] if p.gradients]

    def together(groups: list[tuple[Any, ...]]) -> list[torch.Tensor]:
        return [_loss(program, args) for program, args in zip(programs, groups, strict=True)]

    groups = [_leaves(program, dtype, found.device()) for program in programs]
    try:
        flat = iter(_taken(sum(_compiled(together, backend)(groups)), [x for args in groups for x in args]))
        taken = [tuple(next(flat) for x in args if x.is_floating_point()) for args in groups]
    except Exception:  # as in `results`
        return {p.name: _gradient_alone(backend, found, p, dtype) for p in programs}
    return {p.name: _gradient_compared(p, dtype, got, found) for p, got in zip(programs, taken, strict=True)}


def _gradient_alone(backend: str, found: Backend, program: Program, dtype: torch.dtype) -> str:
    args = _leaves(program, dtype, found.device())
    try:
        got = _taken(_compiled(lambda *a: _loss(program, a), backend)(*args), args)
    except Exception as failure:  # it is the test's result
        return f"{type(failure).__name__}: {failure}"
    return _gradient_compared(program, dtype, got, found)


def _gradient_compared(program: Program, dtype: torch.dtype, got: Any, found: Backend) -> str:
    host = torch.device("cpu")
    args = _leaves(program, dtype, host)
    wide = _leaves(program, dtype, host, torch.float64)
    return difference(got, _taken(_loss(program, args), args), _taken(_loss(program, wide), wide), found.tolerances())


def _leaves(
    program: Program, dtype: torch.dtype, device: torch.device, wide: torch.dtype | None = None
) -> tuple[Any, ...]:
    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.to(wide or x.dtype).requires_grad_() if x.is_floating_point() else x

    made: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, leaf, moved(program.inputs(Draw(dtype)), device))
    return made


def _loss(program: Program, args: Sequence[Any]) -> torch.Tensor:
    outputs = [x for x in pytree.tree_leaves(program.function(*args)) if x.is_floating_point()]
    return torch.stack(
        [(x * x).sum().to(torch.float32 if x.dtype != torch.float64 else x.dtype) for x in outputs]
    ).sum()


def _taken(loss: Any, args: Sequence[Any]) -> Any:
    return torch.autograd.grad(loss, [x for x in args if x.is_floating_point()], allow_unused=True)


def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = pt.compile(function, backend=backend, fullgraph=True, dynamic=False)
    return compiled


def trained(name: str, backend: str | None, optimiser: str, dtype: torch.dtype = torch.float32, steps: int = 3) -> Any:
    """(losses, parameters and buffers) of a model after some steps on a backend; None: in eager on the CPU."""
    device = backends.get(backend).device() if backend else torch.device("cpu")
    model = copy.deepcopy(networks.build(name)).to(device)
    if dtype is torch.float64:
        model = model.double()
    run = pt.compile(model, backend=backend) if backend else model
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, 3e-3, eps=1e-3),
    }
    step = kinds[optimiser](model.parameters())
    x = networks.example(name, 4)
    x = (x.to(dtype) if x.is_floating_point() else x).to(device)
    losses = []
    for _ in range(steps):
        step.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        step.step()
        losses.append(loss.detach())
    return losses, dict(model.state_dict())
