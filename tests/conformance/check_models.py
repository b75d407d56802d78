"""Compile every model of transformers_score.py's list, tiny, for a device that is not here.

python -m tests.conformance.check_models SCORERS [--target tpu:v5e] [--floor 98] [--only REGEX]

One process captures, one compiles. A model passes if every graph of it compiles and fits. Exit status 0 when --floor
(percent) is met.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import torch
import typer

import portable as pt


def scorer(folder: Path) -> ModuleType:
    """The module that builds the models."""
    spec = importlib.util.spec_from_file_location("transformers_score", folder / "transformers_score.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem(build: ModuleType, kind: str, target: str) -> str:
    """Why a model does not compile for the target; '' if it does."""
    torch._dynamo.reset()
    try:
        model, config = build.build(kind)
        found = pt.check(model, (), build.example_inputs(model, config), target)
    except Exception as failure:  # whatever a model does, the next one's turn comes
        return f"{type(failure).__name__}: {failure}"
    verdict = next(iter(found.verdicts.values()))
    refused = "; ".join(map(str, verdict.refused))
    return "" if found.ok else f"{verdict.problem} {refused}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scorers", type=Path, help="folder of transformers_score.py and transformers_models.txt")
    parser.add_argument("--target", default="tpu:v5e")
    parser.add_argument("--floor", type=float, default=98.0)
    parser.add_argument("--only", default="", help="regular expression of names")
    options = parser.parse_args()
    build = scorer(options.scorers)
    lines = (options.scorers / "transformers_models.txt").read_text(encoding="utf-8").split("\n")
    names = [n for line in lines for n in line.partition("#")[0].split() if re.search(options.only, n)]
    passed, began = 0, time.perf_counter()
    for i, kind in enumerate(names, start=1):
        started = time.perf_counter()
        why = problem(build, kind, options.target)
        passed += not why
        took, total = time.perf_counter() - started, time.perf_counter() - began
        typer.echo(f"{i}/{len(names)} {total:6.0f} s {took:5.1f} s  {kind}: {why or 'ok'}"[:400])
    typer.echo(f"{passed}/{len(names)} = {100 * passed / len(names):.2f} % compile for {options.target}")
    return 0 if names and 100 * passed >= options.floor * len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
