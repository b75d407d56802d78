"""The workloads by name: one file a family of ops, and the whole models."""

from __future__ import annotations

from . import activation, attention, convolution, linear, loss, models, normalization, ordering, routing, scan
from .workload import Workload

WORKLOADS: dict[str, Workload] = {}
for _family in (
    convolution,
    normalization,
    attention,
    activation,
    linear,
    routing,
    scan,
    ordering,
    loss,
    models,
):
    if _twice := WORKLOADS.keys() & _family.WORKLOADS.keys():
        raise ValueError(f"workloads are defined twice: {sorted(_twice)}")
    WORKLOADS.update(_family.WORKLOADS)

SUITES = ("quick", "ops", "models", "all")


def suite(name: str) -> list[Workload]:
    """The workloads of a suite: "quick" (a dozen), "ops", "models" or "all".

    Raises:
        ValueError: no such suite.
    """
    if name not in SUITES:
        raise ValueError(f"suite {name!r} is not one of {', '.join(SUITES)}")
    return [w for w in WORKLOADS.values() if name == "all" or w.group == name or (name == "quick" and w.quick)]


__all__ = ["SUITES", "WORKLOADS", "Workload", "suite"]
