"""An objective in a test: one measurement with the one timer, judged as the gate judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

BUDGET_S = 3.0


def figures(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    function: Callable[[], object],
    baseline: Callable[[], object] | None = None,
) -> tuple[bool, str]:
    """(met, figures) of a function that is called without arguments.

    Args:
        args, kwargs: of `portable.SLO`. For metric "ratio" the baseline's default is "eager".
        baseline: what metric "ratio" compares with.

    Raises:
        ConfigError: the objective is not legal, or cannot be measured in a test.
    """
    from portable.errors import ConfigError
    from portable.slo.judgement import judge
    from portable.slo.objective import SLO
    from portable.slo.trial import _timer

    objective = SLO(*args, **kwargs)
    if objective.metric not in ("p50_ms", "p99_ms", "ratio"):
        raise ConfigError(f"metric {objective.metric!r} cannot be measured in a test", remedy="p50_ms, p99_ms or ratio")
    if (baseline is None) == (objective.metric == "ratio"):
        raise ConfigError(
            f"metric {objective.metric!r} {'needs' if baseline is None else 'has no use for'} a baseline",
            remedy="slo(function, baseline=other) with metric 'ratio', slo(function) with another",
        )
    functions = {"portable": function}
    if baseline is not None:
        functions["eager" if objective.baseline == "best_native" else objective.baseline] = baseline
    judged = judge(objective, _timer().interleave(functions, budget_s=BUDGET_S))
    return bool(judged.met), judged.reason
