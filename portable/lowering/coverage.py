"""Which ops of a model run as StableHLO, on which target: what `pt.coverage` and the support matrix are made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import fx

from portable.backends import targets as absent
from portable.backends.observing import Observing
from portable.errors import ConfigError
from portable.explain import FELL_BACK, GraphBreak, GraphRecord
from portable.lowering.module import REFUSED, Use, survey

ALL = ("xla:cpu", "xla:cuda", "tpu")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_SHOWN = 12


def platform_of(target: str) -> str:
    """The XLA platform that programs for ``target`` are lowered for: ``xla``, ``xla:cuda``, ``tpu:v5e:2x2``,
    ``cuda:h200``.

    Raises:
        ConfigError: there is no such target, or its backend runs torch's own kernels.
    """
    kind, _, rest = target.partition(":")
    if rest and absent.devices(kind):
        return absent.find(target).platform
    platform = (rest or "cpu") if kind == "xla" else kind
    if platform not in PLATFORMS or target == "cpu":
        raise ConfigError(
            f"{target!r} is no target that programs are lowered for",
            remedy=f"name some of xla, {', '.join(f'xla:{p}' for p in PLATFORMS)}, tpu, tpu:v5e:2x2, cuda:h200, … "
            "(the backends cpu, xpu and trainium run torch's own kernels: there is nothing to lower)",
        )
    return platform


class Survey(Observing):
    """Asks for each graph how it would run on each target."""

    name = "coverage"

    def __init__(self, targets: Sequence[str]) -> None:
        super().__init__()
        self.platforms = {target: platform_of(target) for target in targets}
        self.uses: dict[str, Counter[Use]] = {target: Counter() for target in targets}

    def observe(self, aten: fx.GraphModule, specs: Sequence[Any], kind: str, graph: GraphRecord) -> None:
        for target, platform in self.platforms.items():
            found = survey(aten, specs, platform=platform, backend=target, inference=kind == "inference")
            self.uses[target].update(found)


class Coverage:
    """What `pt.coverage` gives: printable, and machine-readable through ``to_dict``.

    Attributes:
        uses: {target: {Use: how often}}; a `Use` is an op, how it runs ("lowered", "decomposed", "aten fallback",
            "refused"), the user's line and, of the last two, the reason.
        graph_breaks: what runs in eager on every target, with its reason and line.
    """

    def __init__(self, name: str, graphs: int, uses: dict[str, Counter[Use]], breaks: Sequence[GraphBreak]) -> None:
        self.name, self.graphs = name, graphs
        self.uses = {target: dict(counts) for target, counts in uses.items()}
        self.graph_breaks = list(breaks)

    def refused(self, target: str) -> list[Use]:
        """The ops that cannot run on ``target``."""
        return [use for use in self.uses[target] if use.how == REFUSED]

    @property
    def complete(self) -> bool:
        """Whether every op runs on every target, in the program or as torch's own kernel within it."""
        return not any(self.refused(target) for target in self.uses)

    def ways(self) -> dict[str, dict[str, Counter[str]]]:
        """{op: {target: {how: how often}}}."""
        found: dict[str, dict[str, Counter[str]]] = {}
        for target, uses in self.uses.items():
            for use, n in uses.items():
                found.setdefault(use.op, {}).setdefault(target, Counter())[use.how] += n
        return found

    def to_dict(self) -> dict[str, Any]:
        """The whole of it as plain data."""
        return {
            "name": self.name,
            "graphs": self.graphs,
            "complete": self.complete,
            "targets": {
                target: [{**use._asdict(), "count": n} for use, n in sorted(uses.items())]
                for target, uses in self.uses.items()
            },
            "graph_breaks": [{"reason": b.reason, "where": b.where} for b in self.graph_breaks],
        }

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.markup import escape
        from rich.table import Table

        ways = self.ways()
        graphs = f"{self.graphs} graph{'' if self.graphs == 1 else 's'}"
        yield escape(f"{self.name}: {len(ways)} operators in {graphs}; lowered here, compiled nowhere")
        table = Table("op", *map(escape, self.uses), box=None)
        plain = {target: Counter({"lowered": 1}) for target in self.uses}
        ranked = sorted(ways, key=lambda op: ({t: Counter(w.keys()) for t, w in ways[op].items()} == plain, op))
        for op in ranked[:_SHOWN]:
            table.add_row(op.removesuffix(".default"), *(_shown(ways[op].get(t, Counter())) for t in self.uses))
        if rest := ranked[_SHOWN:]:
            sums = [sum((ways[op].get(t, Counter()) for op in rest), Counter()) for t in self.uses]
            table.add_row(f"{len(rest)} others", *map(_shown, sums))
        yield table
        for target in self.uses:
            for how in (REFUSED, FELL_BACK):
                for use, n in self.uses[target].items():
                    if use.how == how:
                        place, times = f" at {use.where}" if use.where else "", f" ({n} times)" if n > 1 else ""
                        yield escape(f"{how} on {target}: {use.op}{place}{times}: {use.reason}")
        for b in self.graph_breaks:
            yield escape(f"graph break at {b.where or 'an unknown line'}: {b.reason} (it runs in eager)")

    def __str__(self) -> str:
        from portable.explain import as_text

        return as_text(self)

    __repr__ = __str__


def _shown(ways: Counter[str]) -> str:
    colours = {REFUSED: "red", FELL_BACK: "yellow"}
    parts = [f"{n} {how}" for how, n in ways.most_common()]
    return ", ".join(f"[{colours[h]}]{p}[/]" if (h := p.split(" ", 1)[1]) in colours else p for p in parts) or "–"
