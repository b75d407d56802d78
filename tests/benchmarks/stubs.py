"""Measurements that nobody measured."""

import torch

from benchmarks.measurement import Measurement
from benchmarks.roofline import Cost, Peak
from benchmarks.workloads.workload import Workload
from portable.slo.objective import SLO

PEAK = Peak({1 << 30: 1e10}, {torch.float32: 1e12})
SLOS = {"*": SLO("ratio", 1.25)}


def workload(name: str) -> Workload:
    return Workload(name, "aten.cumsum.default", "Mamba", lambda: (torch.abs, ()))


def measured(portable: float, eager: float, *, wrong: str = "", jitter: float = 0.01) -> Measurement:
    """A measurement with these medians, in seconds."""
    shape = [1 + jitter * x for x in (0, 1, -1, 0.5, -0.5, 0.2, -0.2)]
    samples = {"portable": [portable * x for x in shape], "eager": [eager * x for x in shape]}
    cost = Cost(1000, 10_000_000, torch.float32)
    return Measurement(samples, {"portable": 0.5, "eager": 0.01}, {"portable": 12.0}, cost, wrong)
