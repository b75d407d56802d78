"""What an SLO is, and the TOML files that hold them: one row a workload or a pattern of workloads.

"depthwise_conv/*" = { metric = "ratio", limit = 1.25, baseline = "best_native" }
"model/vit-s"      = { metric = "p99_ms", limit = 40.0 }
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

from portable.errors import ConfigError

Metric = Literal["p50_ms", "p99_ms", "ratio", "roofline", "peak_mb"]
METRICS: tuple[str, ...] = get_args(Metric)
BASELINES = ("eager", "inductor", "best_native")
_KEY = re.compile(r"""^\s*(?P<key>"(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)\s*[=.]""")


@dataclass(frozen=True)
class SLO:
    """An objective for an op's workload or a whole model on one backend.

    Attributes:
        metric: "p50_ms" or "p99_ms" (latency of a call, milliseconds), "ratio" (time over the baseline's in the same
            run), "roofline" (fraction of the measured machine peak), "peak_mb" (peak memory of a call, 10⁶ bytes).
        limit: the most that is allowed; for "roofline" the least.
        baseline: for "ratio" alone: "eager", "inductor", or "best_native", the faster of those measured.

    Raises:
        ConfigError: a field is not legal; the message names it.
    """

    metric: Metric
    limit: float
    baseline: str = "best_native"

    def __post_init__(self) -> None:
        problem = _problem({f.name: getattr(self, f.name) for f in fields(self)})
        if problem:
            key, message = problem
            raise ConfigError(f"SLO: {key}: {message}", remedy=_remedy(key))

    @property
    def of_a_call(self) -> bool:
        """Whether it limits the latency of one call by itself, and not what an op costs inside a program."""
        return self.metric in ("p50_ms", "p99_ms")

    def __str__(self) -> str:
        if self.metric == "ratio":
            return f"≤ {self.limit:g}× {self.baseline.replace('_', ' ')}"
        if self.metric == "roofline":
            return f"≥ {self.limit:.0%} of roofline"
        name, unit = self.metric.rsplit("_", 1)
        return f"{name} ≤ {self.limit:g} {unit.replace('mb', 'MB')}"


def load_slos(path: str | Path) -> dict[str, SLO]:
    """The SLOs of a TOML file by workload pattern (shell wildcards), in the file's order.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or a row is not legal; names file, line and key.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode()
        rows = tomllib.loads(text)
    except OSError as failure:
        remedy = "pass --slo FILE, or see benchmarks/slo/ for examples"
        raise ConfigError(f"{path}: cannot be read: {failure.strerror or failure}", remedy=remedy) from failure
    except UnicodeDecodeError as failure:
        line = failure.object[: failure.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8: {failure.reason}", remedy="save it as UTF-8") from failure
    except tomllib.TOMLDecodeError as failure:
        raise ConfigError(_syntax(path, text, failure), remedy="mend the TOML at that line") from failure
    return {pattern: _slo(path, text, pattern, row) for pattern, row in rows.items()}


def slo_for(workload: str, slos: Mapping[str, SLO]) -> SLO | None:
    """The SLO of a workload: its own row, else that of the longest pattern which matches; None where none does."""
    if workload in slos:
        return slos[workload]
    matching = [pattern for pattern in slos if fnmatchcase(workload, pattern)]
    return slos[max(matching, key=len)] if matching else None


def line_of(text: str, pattern: str, key: str = "") -> int:
    """The line (from 1) of an SLO file where the row ``pattern``, or its ``key``, is written; 0 where it is not."""
    row, section = 0, False
    for number, line in enumerate(text.splitlines(), 1):
        section = section or line.lstrip().startswith("[")
        name = _header(line, section)
        if name is not None:
            if row and name != pattern:
                return row
            row = number if name == pattern else row
            if row == number and re.search(rf"""[{{,]\s*["']?{re.escape(key)}["']?\s*=""", line):
                return row
        elif row and key and _key(line) == key:
            return number
    return row


def _slo(path: Path, text: str, pattern: str, row: Any) -> SLO:
    if not isinstance(row, dict):
        where = f"{path}:{line_of(text, pattern)}: {pattern}"
        raise ConfigError(f"{where}: a row is a table, not {row!r}", remedy=_remedy("row"))
    problem = _problem(row)
    if problem:
        key, message = problem
        where = f"{path}:{line_of(text, pattern, key)}: {pattern}: {key}"
        raise ConfigError(f"{where}: {message}", remedy=_remedy(key))
    return SLO(**row)


def _problem(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """(key, what is wrong with it) of the first field that is not legal."""
    legal = [f.name for f in fields(SLO)]
    for key in row:
        if key not in legal:
            near = difflib.get_close_matches(key, legal, 1)
            return key, f"no such field{f'; did you mean {near[0]!r}?' if near else ''}"
    for key in ("metric", "limit"):
        if key not in row:
            return key, "is missing"
    metric, limit, baseline = row["metric"], row["limit"], row.get("baseline", "best_native")
    if metric not in METRICS:
        return "metric", f"{metric!r} is not one of {', '.join(METRICS)}"
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not math.isfinite(limit) or limit <= 0:
        return "limit", f"{limit!r} is not a positive number"
    if metric == "roofline" and limit > 1:
        return "limit", f"{limit!r} is more than the whole roofline: a fraction is in (0, 1]"
    if baseline not in BASELINES:
        return "baseline", f"{baseline!r} is not one of {', '.join(BASELINES)}"
    if baseline != "best_native" and metric != "ratio":
        return "baseline", f"has no meaning for metric {metric!r}"
    return None


def _remedy(key: str) -> str:
    return {
        "metric": f"one of {', '.join(METRICS)}",
        "baseline": f"with metric 'ratio', one of {', '.join(BASELINES)}",
        "limit": "a positive number: milliseconds, a ratio, a fraction of the roofline or megabytes",
    }.get(key, 'write "op/workload" = { metric = "ratio", limit = 1.25, baseline = "best_native" }')


def _header(line: str, section: bool) -> str | None:
    """The row that a line begins: ``[name]``, or before the first of those ``name = …``."""
    stripped = line.strip()
    if not stripped.startswith("["):
        return None if section else _key(line)
    try:
        return next(iter(tomllib.loads(stripped)), None)
    except tomllib.TOMLDecodeError:
        return None


def _key(line: str) -> str | None:
    found = _KEY.match(line)
    return next(iter(tomllib.loads(f"{found['key']} = 0"))) if found else None


def _syntax(path: Path, text: str, failure: tomllib.TOMLDecodeError) -> str:
    message = str(failure)
    place = re.search(r"\s*\(at (?:line (\d+), column \d+|end of document)\)", message)
    number = int(place[1]) if place and place[1] else text.count("\n") + 1
    lines = text.splitlines()
    written = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    key = _key(written) if written else None
    named = f"{key}: " if key else ""
    text = message[: place.start()] if place else message
    return f"{path}:{number}: {named}{text}{f' in `{written}`' if written else ''}"
