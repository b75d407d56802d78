"""Writes docs/support.md: how every operator of torch's database runs on each target, from the data of `pt.coverage`.

python -m tests.conformance.support_matrix
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from rich.progress import track

from portable import backends
from portable.errors import PortableError
from portable.explain import FELL_BACK
from portable.lowering.coverage import ALL, platform_of
from portable.lowering.module import REFUSED, survey
from portable.lowering.once import Call
from portable.lowering.specialise import Specialisation
from tests.conformance.operators import OPERATORS, copied, eager, first_dtype, samples

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
LOWERED = "lowered"
WAYS = (LOWERED, FELL_BACK, REFUSED)


def taken(name: str, sample: Any) -> bool:
    """Whether eager takes it here."""
    try:
        eager(name, sample, 0)
    except Exception:  # of any kind
        return False
    return True


def ways_of(name: str) -> dict[str, tuple[str, str]]:
    """{target: (how the operator's first sample runs there, why not as StableHLO)}; empty where it has no sample."""
    sample = next(filter(functools.partial(taken, name), samples(name, first_dtype(name))), None)
    if sample is None:
        return {}
    args = (copied(sample.input), *copied(sample.args))
    try:
        call = Call(OPERATORS[name], args, copied(sample.kwargs), backends.get("xla"))
        gm = call.trace(Specialisation(call.tensors, {}, "xla"))
    except PortableError as refusal:
        reason = refusal.ops[0].reason if hasattr(refusal, "ops") else refusal.message
        return dict.fromkeys(ALL, (REFUSED, reason))
    found = {}
    for target in ALL:
        uses = survey(gm, call.specs, platform=platform_of(target), backend=target, inference=True)
        worst = max(uses, key=lambda use: WAYS.index(use.how) if use.how in WAYS else 0, default=None)
        odd = worst is not None and worst.how in (FELL_BACK, REFUSED)
        found[target] = (worst.how, f"`{worst.op}`: {worst.reason}") if odd and worst else (LOWERED, "")
    return found


def page() -> str:
    """The text of docs/support.md."""
    ways = {name: ways_of(name) for name in track(sorted(OPERATORS), description="operators")}
    ways = {name: found for name, found in ways.items() if found}
    counts = {target: Counter(found[target][0] for found in ways.values()) for target in ALL}
    lines = [
        "# What runs where",
        "",
        f"How the {len(ways)} operators of torch's operator database run on each target: the database's first sample",
        "of each, in float32 where the operator takes that. *Lowered*: as StableHLO, whole. *Fallback*: as torch's own",
        "kernel within the program. *Refused*: by name. The column xla:cpu is verified by the tests; the others are",
        "what lowers for the platform, run by no device here. `pt.coverage(model, args)` says the same of a model.",
        "",
        "Written by `python -m tests.conformance.support_matrix`.",
        "",
        f"| | {' | '.join(ALL)} |",
        f"|---|{'---|' * len(ALL)}",
    ]
    lines += [f"| {how} | {' | '.join(str(counts[target][how]) for target in ALL)} |" for how in WAYS]
    lines += [
        "",
        "## Not lowered everywhere",
        "",
        f"| operator | {' | '.join(ALL)} | why |",
        f"|---|{'---|' * len(ALL)}---|",
    ]
    families: dict[str, list[str]] = defaultdict(list)
    for name, found in ways.items():
        if all(how == LOWERED for how, _ in found.values()):
            families[name.partition(".")[0] if "." in name else ""].append(name)
            continue
        why = next(reason for how, reason in found.values() if how != LOWERED)
        lines.append(
            f"| {name} | {' | '.join(found[target][0] for target in ALL)} | {why.replace('|', chr(92) + '|')} |"
        )
    lines += ["", "## Lowered everywhere", ""]
    for family in sorted(families):
        lines += [f"**{family or 'torch'}**: {', '.join(families[family])}", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
