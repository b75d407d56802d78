"""README's table of backends, made of reports of test sessions.

    pytest tests/conformance/test_backends.py --portable-report tests/conformance/reports/host.json
    python -m tests.conformance.backend_matrix

A report is what ``--portable-report`` wrote, or the results of ``benchmarks/device_check.sh``, which hold one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
FOLDERS = (ROOT / "tests/conformance/reports", ROOT / "benchmarks/results")
BEGIN, END = "<!-- backends: begin -->", "<!-- backends: end -->"
PATHS = {
    "xla": "StableHLO → PJRT, on whatever platform JAX has (CPU by default)",
    "cpu": "native: Inductor (needs a C++ compiler), or eager as `cpu:eager`",
    "tpu": "StableHLO → libtpu",
    "cuda": "native",
    "rocm": "native",
    "xpu": "native",
    "trainium": "native, through torch-neuronx",
}
HOST = ("cpu", "xla")  # every change is tested on them


def reports(folders: Iterable[Path] = FOLDERS) -> Iterator[dict[str, Any]]:
    """Every report that is committed."""
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            content = content.get("conformance", content)
            if isinstance(content, dict) and "backends" in content:
                yield content


def table(found: Iterable[dict[str, Any]]) -> str:
    """The table in Markdown."""
    found = list(found)
    lines = ["| backend | path | state |", "|---|---|---|"]
    lines += [f"| `{name}` | {path} | {state(name, found)} |" for name, path in PATHS.items()]
    return "\n".join(lines) + "\n"


def state(name: str, found: Iterable[dict[str, Any]]) -> str:
    """What the reports show of a backend: the strongest evidence, with its failures."""
    verified: list[str] = []
    compiled: list[str] = []
    for report in found:
        for backend, shown in report["backends"].items():
            base, _, rest = backend.partition(":")
            if base != name:
                continue
            if shown.get("runs", {}).get("passed"):
                verified.append(_where(name, shown, report) + _but(backend, shown["runs"]))
            if shown.get("compiles", {}).get("passed"):
                compiled.append((rest or base) + _but(backend, shown["compiles"]))
    if verified:
        return "; ".join(dict.fromkeys(verified))
    return f"compiled for {', '.join(dict.fromkeys(compiled))}" if compiled else "contract only"


def _where(name: str, shown: dict[str, Any], report: dict[str, Any]) -> str:
    if name in HOST:
        return "verified here"
    device = shown.get("hardware", {}).get("device", "an unknown device")
    part = "" if report["complete"] else f"; the first {shown['runs']['passed']} tests alone"
    return f"verified on {device} ({report['date']}, torch {report['versions'].get('torch', 'unknown')}{part})"


def _but(backend: str, counts: dict[str, Any]) -> str:
    total = counts["passed"] + counts["failed"]
    return f", but for {counts['failed']} of {total} tests of `{backend}`" if counts["failed"] else ""


def written(text: str, new: str) -> str:
    """README's text with another table.

    Raises:
        ValueError: it has no place for the table.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{new}{END}{after}"


def main() -> None:
    text = written(README.read_text(encoding="utf-8"), table(reports()))
    README.write_text(text, encoding="utf-8")
    sys.stdout.write(table(reports()))


if __name__ == "__main__":
    main()
