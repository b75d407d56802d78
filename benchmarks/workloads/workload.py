"""What a workload is: a named computation with the shapes and dtypes of the model that it comes from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Made = tuple[Callable[..., Any], tuple[Any, ...]]
GROUPS = ("ops", "models")


@dataclass(frozen=True)
class Workload:
    """One row of the suite.

    Attributes:
        name: "<op>/<model>-<sizes>", unique.
        op: what it measures: a portable op ("rms_norm"), an overload ("aten.cumsum.default"), or "model".
        model: where its shapes come from.
        make: builds (function or module, arguments) on the host, the same ones each time.
        backward: the gradients of every float argument and parameter are part of a call.
        group: "ops" or "models".
        quick: it is part of the suite `quick`.
    """

    name: str
    op: str
    model: str
    make: Callable[[], Made] = field(repr=False)
    backward: bool = False
    group: str = "ops"
    quick: bool = False

    def is_of(self, op: str) -> bool:
        """Whether ``op`` names this workload: its op, also without "aten." or overload, or its name or family."""
        parts = self.op.split(".")
        short = parts[1] if parts[0] == "aten" and len(parts) > 1 else self.op
        return op in (self.op, self.op.rpartition(".")[0], short, self.name, self.name.split("/")[0])


Table = dict[str, Workload]


def workload(
    table: Table, name: str, op: str, model: str, *, backward: bool = False, group: str = "ops", quick: bool = False
) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Decorator: add a function that makes (function, arguments) to ``table`` as the workload ``name``.

    Raises:
        ValueError: the name is taken.
    """

    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        if name in table:
            raise ValueError(f"workload {name!r} is defined twice")
        table[name] = Workload(name, op, model, _seeded(make), backward, group, quick)
        return make

    return add


def _seeded(make: Callable[[], Made]) -> Callable[[], Made]:
    @functools.wraps(make)
    def seeded() -> Made:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return seeded
