"""results.json: the whole of one run, and its comparison with an earlier one.

Two runs differ by more than noise where their intervals do not overlap and their medians are further apart than MARGIN;
and, where both measured a native baseline, where the ratio to it moved too: what slows the whole machine is no
regression.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from portable.errors import ConfigError

from .runner import Row

SCHEMA = 1
MARGIN = 1.10
HARDWARE = ("device", "architecture")
Kind = Literal["regressed", "missing", "unexplained win", "new"]


@dataclass(frozen=True)
class Finding:
    """A difference between two runs. ``fails``: it makes the exit status 1."""

    kind: Kind
    workload: str
    text: str

    @property
    def fails(self) -> bool:
        return self.kind != "new"


def to_dict(
    rows: Sequence[Row], *, backend: str, suite: str, fingerprint: Mapping[str, str], **about: Any
) -> dict[str, Any]:
    """The content of results.json. Numbers that are not finite become null."""
    content = {
        "schema": SCHEMA,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "backend": backend,
        "suite": suite,
        "fingerprint": dict(fingerprint),
        **about,
        "rows": [row.to_dict() for row in rows],
    }
    return _finite(content)


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write results.json; a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def read(path: Path) -> dict[str, Any]:
    """An earlier results.json.

    Raises:
        ConfigError: it cannot be read, is not one, or is of another schema.
    """
    remedy = "pass the results.json of an earlier `portable bench`"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise ConfigError(f"{path}: cannot be read: {failure.strerror or failure}", remedy=remedy) from failure
    except ValueError as failure:
        raise ConfigError(f"{path}: not JSON: {failure}", remedy=remedy) from failure
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ConfigError(f"{path}: not a results.json: it has no rows", remedy=remedy)
    if content.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path}: schema {content.get('schema')}, this version reads {SCHEMA}", remedy="measure it again"
        )
    for row in content["rows"]:
        if not isinstance(row, dict) or not {"workload", "state", "provider", "latency_s", "ratios"} <= row.keys():
            raise ConfigError(f"{path}: a row lacks workload, state, provider, latency_s or ratios", remedy=remedy)
    return content


def compare(now: Mapping[str, Any], before: Mapping[str, Any], selected: Sequence[str] | None = None) -> list[Finding]:
    """What changed since ``before`` beyond the noise.

    Args:
        selected: the workloads that this run was asked for, where that is less than what ``before`` holds; None: all.

    Raises:
        ConfigError: the runs are of different backends or hardware.
    """
    _comparable(now, before)
    rows = {row["workload"]: row for row in now["rows"]}
    old = {row["workload"]: row for row in before["rows"]}
    found = []
    for name, was in old.items():
        if selected is None or name in selected:
            finding = _missing(name) if name not in rows else _changed(rows[name], was, _software(now, before))
            found += [finding] if finding else []
    found += [Finding("new", name, "not in the baseline") for name in rows if name not in old]
    return found


def _comparable(now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    pairs = [("backend", now.get("backend"), before.get("backend"))]
    parts, earlier = now.get("fingerprint", {}), before.get("fingerprint", {})
    pairs += [(part, parts.get(part), earlier.get(part)) for part in HARDWARE]
    for part, new, old in pairs:
        if new != old:
            raise ConfigError(
                f"the baseline was measured on another {part}: {old}, not {new}",
                remedy="compare runs of one backend on one machine",
            )


def _software(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    new, old = now.get("fingerprint", {}), before.get("fingerprint", {})
    return ", ".join(f"{k} {old.get(k)} → {new.get(k)}" for k in sorted({*new, *old}) if new.get(k) != old.get(k))


def _missing(name: str) -> Finding:
    return Finding("missing", name, "in the baseline, but not in this run")


def _changed(row: Mapping[str, Any], was: Mapping[str, Any], software: str) -> Finding | None:
    name = row["workload"]
    if row["state"] in ("failed", "wrong") and was["state"] not in ("failed", "wrong"):
        return Finding("regressed", name, f"{row['state']}: {row['reason']}")
    new, old = _in_force(row), _in_force(was)
    if new is None or old is None:
        return None
    factor = new["median"] / old["median"]
    text = f"{1e3 * old['median']:.3g} → {1e3 * new['median']:.3g} ms ({factor:.2f}×)"
    causes = [f"{was['provider']} → {row['provider']}"] if row["provider"] != was["provider"] else []
    causes += [software] if software else []
    explained = f"; changed: {'; '.join(causes)}" if causes else ""
    if _moved(old, new) and _relative(was, row):
        return Finding("regressed", name, text + explained)
    if _moved(new, old) and _relative(row, was) and not causes:
        return Finding(
            "unexplained win", name, f"{text}: nothing that is recorded changed; is it still doing the work?"
        )
    return None


def _in_force(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The latency of what is used: the kernel that won, or the portable path."""
    return row.get("kernel_s") or row["latency_s"].get("portable")


def _moved(low: Mapping[str, Any], high: Mapping[str, Any]) -> bool:
    """Whether ``high`` is above ``low`` beyond the noise: intervals apart, and medians by more than the margin."""
    top = math.inf if low["high"] is None else low["high"]
    return high["low"] > top and high["median"] > MARGIN * low["median"]


def _relative(low: Mapping[str, Any], high: Mapping[str, Any]) -> bool:
    """Whether the ratio to a baseline that both runs measured moved as well; True where there is none to ask."""
    if low.get("kernel_s") or high.get("kernel_s"):
        return True
    shared = [name for name in low["ratios"] if name in high["ratios"]]
    return not shared or any(_moved(low["ratios"][name], high["ratios"][name]) for name in shared)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
