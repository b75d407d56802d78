"""What became of a model: graphs, breaks, compilations and fallbacks, each with its reason.

``portable.explain`` is both this module and the public function: the module can be called.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from portable import config
from portable.errors import RecompileError, UnsupportedInputError


@dataclass(frozen=True)
class Compilation:
    """One executable that was built.

    Attributes:
        graph: index of the captured graph.
        kind: "inference", "forward", "backward" or "eager".
        cause: "first call", or the argument whose change made it necessary.
        capture_s, lowering_s, compile_s: seconds in Dynamo and AOTAutograd, in our lowering, in the backend's compiler.
    """

    graph: int
    kind: str
    cause: str
    capture_s: float
    lowering_s: float
    compile_s: float


@dataclass(frozen=True)
class GraphBreak:
    """Why Dynamo ended a graph before the function's end, and the user's line."""

    reason: str
    where: str


FELL_BACK = "aten fallback"  # how an op ran that fell back to torch's own kernel


@dataclass(frozen=True)
class Fallback:
    """Something that ran outside its path: an op within a program, or a whole model.

    Attributes:
        count: how many calls in the graphs; of a whole model, how many times it was called so.
    """

    op: str
    reason: str
    where: str = ""
    count: int = 1


@dataclass(frozen=True)
class Note:
    """How a model runs, beyond its ops, and why: launches that are not recorded, sizes that are compiled apart.

    Attributes:
        topic: "graphs" or "shapes".
        where: the user's line, if known.
    """

    topic: str
    reason: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.topic}: {self.reason}{f' at {self.where}' if self.where else ''}"


@dataclass(frozen=True)
class Chosen:
    """How some calls of an op run.

    Attributes:
        n: how many calls in the graphs.
        runs_as: "portable", "native", "kernel <provider>" or "aten fallback".
        why: the reason, with its numbers where there is evidence.
        verdict: id of the verdict in the ledger that it rests on; '' if none.
        rejected: (kernel, why not) for each candidate that does not run.
    """

    n: int
    runs_as: str
    why: str
    verdict: str = ""
    rejected: tuple[tuple[str, str], ...] = ()


@dataclass
class GraphRecord:
    """One graph that Dynamo captured.

    Attributes:
        ops: number of nodes by (overload, how it runs).
        arguments: the user's name of each input.
        cause: why it was captured.
        decisions: {(op, signature): (Decision, calls)} for the ops that have kernels.
        arguments_of: {(op, signature): (args, kwargs)} of the same, tensors as Specs.
        told: the record's own, see `Record.told`.
    """

    index: int
    arguments: tuple[str, ...]
    signature: tuple[str, ...]
    cause: str
    began: float
    ops: Counter[tuple[str, str]] = field(default_factory=Counter)
    decisions: dict[tuple[str, str], Any] = field(default_factory=dict)
    arguments_of: dict[tuple[str, str], Any] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    def since_call(self) -> float:
        """Seconds since the call that led to this graph, or since the graph before it was done."""
        return time.perf_counter() - self.began


_thread = threading.local()


def ran() -> None:
    """Note that a compiled graph ran in this thread."""
    _thread.runs = getattr(_thread, "runs", 0) + 1


def runs() -> int:
    """How many compiled graphs have run in this thread."""
    return getattr(_thread, "runs", 0)


def call_began() -> None:
    """Note that a call of a compiled model begins in this thread: captures are timed from here."""
    _thread.began = time.perf_counter()


_collecting: list[Record] | None = None


@contextlib.contextmanager
def collecting() -> Iterator[list[Record]]:
    """Within it every model that is compiled leaves its record in the list."""
    global _collecting
    before, _collecting = _collecting, []
    try:
        yield _collecting
    finally:
        _collecting = before


class Record:
    """Everything that is known of one compiled model; filled while it compiles, read by `Explanation`. Thread-safe."""

    def __init__(
        self, name: str, backend: str, path: str, kernels: Any = None, fallback: str = "warn", graphs: str = "auto"
    ) -> None:
        self.name, self.backend, self.path, self.fallback = name, backend, path, fallback
        self.graphs_policy = graphs
        self.graphs: list[GraphRecord] = []
        self.compiles: list[Compilation] = []
        self.breaks: list[GraphBreak] = []
        self.fallbacks: dict[Fallback, int] = {}
        self.notes: dict[Note, None] = {}  # a set that keeps its order
        self.told: set[str] = set()  # what was warned of: ops that fell back, kernels that were named and do not run
        self.frozen = False
        self.kernels = kernels
        self.objectives: list[Any] = []  # `PathDecision`s, of all paths of the model together
        self._by_frame: dict[Any, GraphRecord] = {}
        self._captures = 0
        self._lock = threading.Lock()
        if _collecting is not None:
            _collecting.append(self)

    def add(self, compilation: Compilation) -> None:
        """Note an executable that was built."""
        config.logger().info(
            "%s on %s: compiled graph %d (%s) in %.2f s: %s",
            self.name,
            self.backend,
            compilation.graph,
            compilation.kind,
            compilation.compile_s,
            compilation.cause,
        )
        with self._lock:
            self.compiles.append(compilation)
            _thread.began = time.perf_counter()

    def add_fallback(self, fallback: Fallback, count: int = 1) -> bool:
        """Count a fallback; whether it is the first of its kind."""
        with self._lock:
            self.fallbacks[fallback] = self.fallbacks.get(fallback, 0) + count
            return self.fallbacks[fallback] == count

    def add_note(self, note: Note) -> None:
        """Note how the model runs, once."""
        with self._lock:
            self.notes.setdefault(note)

    def add_graph(self, gm: Any, example_inputs: Sequence[Any]) -> GraphRecord:
        """Note a graph that Dynamo captured, with its cause."""
        import torch

        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        arguments = tuple(plain_name(_source(n)) for n in placeholders)
        signature = tuple(_signature(x) for x in example_inputs)
        compile_id = torch._guards.CompileContext.current_compile_id()
        frame = compile_id.frame_id if compile_id else None
        with self._lock:
            cause = _difference(self._by_frame.get(frame), arguments, signature)
            began = getattr(_thread, "began", time.perf_counter())
            graph = GraphRecord(self._captures, arguments, signature, cause, began, told=self.told)
            self._captures += 1
            self.graphs.append(graph)
            self._by_frame[frame] = graph
        return graph

    def give_up(self, graphs: Sequence[GraphRecord]) -> None:
        """Forget captures that no call will run: torch traced the frame again, or left it to eager after all."""
        with self._lock:
            indices = {graph.index for graph in graphs}
            self.graphs = [graph for graph in self.graphs if graph.index not in indices]
            self.compiles = [each for each in self.compiles if each.graph not in indices]
            self._by_frame = {f: graph for f, graph in self._by_frame.items() if graph.index not in indices}

    def add_breaks(self, reasons: Sequence[Any]) -> None:
        """Note why graphs ended early: Dynamo's reasons (text and the user's stack)."""
        with self._lock:
            for reason in reasons:
                stack = [f for f in reason.user_stack if f.name not in ("_call_impl", "_wrapped_call_impl")]
                where = (
                    f"{stack[-1].filename.rsplit('/', 1)[-1]}:{stack[-1].lineno}, in {stack[-1].name}" if stack else ""
                )
                found = GraphBreak(_first_line(reason.reason), where)
                if found not in self.breaks:
                    self.breaks.append(found)

    def forbid_when_frozen(self, cause: str) -> None:
        """Refuse a new compilation of a frozen model.

        Raises:
            RecompileError: names what changed.
        """
        if self.frozen:
            raise RecompileError(
                f"{self.name} is frozen, and this call needs a new compilation: {cause}",
                remedy="call the model with every shape before freeze(), or pad to a shape that it has seen",
            )


def plain_name(source: str) -> str:
    """A Dynamo source as the user would write it: ``L['self']._parameters['w']`` → ``self.w``."""
    name = re.sub(r"\._(?:parameters|buffers|modules)\['([^']+)'\]", r".\1", source)
    name = re.sub(r"[LG]\['([^']+)'\]", r"\1", name)
    name = re.sub(r"\.size\(\)\[(\d+)\]", r".shape[\1]", name)
    return re.sub(r"\['(\w+)'\]", r".\1", name) if name.startswith("self") else name


def _source(node: Any) -> str:
    source = getattr(node, "_dynamo_source", None)
    return source.name if source is not None else node.name


def _signature(x: Any) -> str:
    import torch

    if isinstance(x, torch.Tensor):
        grad = ", grad" if x.requires_grad else ""
        return f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, x.shape))}]{grad}"
    return repr(x)


def _difference(before: GraphRecord | None, arguments: Sequence[str], signature: Sequence[str]) -> str:
    if before is None:
        return "first call"
    old = dict(zip(before.arguments, before.signature, strict=False))
    changed = [
        f"{name}: {old[name]} → {new}"
        for name, new in zip(arguments, signature, strict=False)
        if old.get(name, new) != new
    ]
    return ", ".join(changed[:4]) or _recompile_reason()


def _recompile_reason() -> str:
    """Why Dynamo compiles the frame it is compiling again, in its own words: the guard that failed."""
    from torch._dynamo.utils import get_metrics_context

    reason = get_metrics_context()._metrics.get("recompile_reason")
    return (
        plain_name(_first_line(str(reason)))
        if reason
        else "a guard of torch.compile failed (TORCH_LOGS=recompiles names it)"
    )


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "unknown"


class Explanation:
    """What `pt.explain` gives: printable, and machine-readable through ``to_dict``.

    Attributes:
        ops: {overload: {how it runs: count}}.
        decisions: {overload: how its calls run and why, one entry a way}.
        units: {(op, signature): (args, kwargs)} of the ops that have kernels here, tensors as Specs.
        objectives: which path runs each signature of a model that has an objective (`portable.slo.paths.PathDecision`).
        fallbacks, graph_breaks, compiles, notes: lists; empty means none.
    """

    def __init__(self, record: Record) -> None:
        self.name, self.backend, self.path = record.name, record.backend, record.path
        self.graphs = len(record.graphs)
        self.frozen = record.frozen
        self.objectives: list[Any] = list(record.objectives)
        self.compiles: list[Compilation] = list(record.compiles)
        self.graph_breaks: list[GraphBreak] = list(record.breaks)
        self.fallbacks: list[Fallback] = [replace(f, count=n) for f, n in record.fallbacks.items()]
        self.notes: list[Note] = list(record.notes)
        self.ops: dict[str, dict[str, int]] = {}
        for graph in record.graphs:
            for (op, how), count in graph.ops.items():
                counts = self.ops.setdefault(op, {})
                counts[how] = counts.get(how, 0) + count
        self.decisions = _decisions(record.graphs, self.ops, record.path)
        self.units: dict[tuple[str, str], Any] = {k: v for g in record.graphs for k, v in g.arguments_of.items()}

    def to_dict(self) -> dict[str, Any]:
        """The whole explanation as plain data."""
        return {
            "name": self.name,
            "backend": self.backend,
            "path": self.path,
            "graphs": self.graphs,
            "frozen": self.frozen,
            "objectives": [asdict(o) for o in self.objectives],
            "ops": self.ops,
            "decisions": {op: [asdict(c) for c in chosen] for op, chosen in self.decisions.items()},
            "compiles": [asdict(c) for c in self.compiles],
            "graph_breaks": [asdict(b) for b in self.graph_breaks],
            "fallbacks": [asdict(f) for f in self.fallbacks],
            "notes": [asdict(n) for n in self.notes],
        }

    def headline(self) -> str:
        """One line: path, graphs, breaks, compilations and their time."""
        seconds = [sum(getattr(c, part) for c in self.compiles) for part in ("capture_s", "lowering_s", "compile_s")]
        plural = lambda n, word: f"{n} {word}{'' if n == 1 else 's'}"  # noqa: E731
        return (
            f"{self.name} on {self.backend} ({self.path}): {plural(self.graphs, 'graph')}, "
            f"{plural(len(self.graph_breaks), 'break')}, {plural(len(self.compiles), 'compilation')} "
            f"(capture {seconds[0]:.1f} s, lowering {seconds[1]:.2f} s, {self.backend} {seconds[2]:.1f} s)"
        )

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.markup import escape
        from rich.table import Table

        if not (self.graphs or self.graph_breaks or self.fallbacks or self.objectives):
            yield escape(f"{self.name} on {self.backend} ({self.path}): not called yet: its first call compiles it")
            return
        yield escape(self.headline())
        for objective in self.objectives:
            yield escape(f"{'' if objective.met else 'UNMET '}{objective}")
        yield _ops_table(self.decisions)
        if len(self.compiles) > 1:
            table = Table(
                "graph",
                "kind",
                "cause",
                "capture",
                "lowering",
                "compile",
                title="compilations",
                title_justify="left",
                box=None,
            )
            for c in self.compiles:
                table.add_row(
                    str(c.graph),
                    c.kind,
                    escape(c.cause),
                    f"{c.capture_s:.2f} s",
                    f"{c.lowering_s:.3f} s",
                    f"{c.compile_s:.2f} s",
                )
            yield table
        for b in self.graph_breaks:
            yield escape(f"graph break at {b.where or 'an unknown line'}: {b.reason} (it ran in eager)")
        for note in self.notes:
            yield escape(str(note))
        if self.fallbacks:
            for f in self.fallbacks:
                times = f" ({f.count} times)" if f.count > 1 else ""
                yield escape(f"fallback: {f.op}{f' at {f.where}' if f.where else ''}{times}: {f.reason}")
        else:
            yield "fallbacks: none"

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__


def as_text(printable: Any) -> str:
    """What rich prints of an object, as plain text."""
    from io import StringIO

    from rich.console import Console

    console = Console(file=StringIO(), width=120)
    console.print(printable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.rstrip()


_UNMEASURED = "unmeasured on this machine"
_WHY = {
    "lowered": _UNMEASURED,
    "decomposed": "by torch's decomposition; unmeasured on this machine",
    "inductor": "compiled by Inductor",
    "vendor": "compiled by the vendor's Dynamo backend",
    "eager": "as asked",
    FELL_BACK: "no exact lowering; torch's own kernel, see below",
}
_RUNS_AS = {
    "lowered": "portable",
    "decomposed": "portable",
    "inductor": "native",
    "vendor": "native",
    "eager": "native",
    FELL_BACK: FELL_BACK,
}
_SHOWN = 12


def _ops_table(decisions: dict[str, list[Chosen]]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table("op", "n", "runs as", "why", box=None)
    ranked = sorted(
        decisions, key=lambda op: (all(c.why == _UNMEASURED for c in decisions[op]), -_calls(decisions[op]))
    )
    for op in ranked[:_SHOWN]:
        for chosen in decisions[op]:
            verdict = f"  (verdict {chosen.verdict})" if chosen.verdict else ""
            table.add_row(op.removesuffix(".default"), str(chosen.n), chosen.runs_as, escape(chosen.why + verdict))
            for kernel, why_not in chosen.rejected:
                table.add_row("", "", "", escape(f"not {kernel}: {why_not}"))
    if len(ranked) > _SHOWN:
        rest = [c for op in ranked[_SHOWN:] for c in decisions[op]]
        table.add_row("everything else", str(_calls(rest)), ", ".join(dict.fromkeys(c.runs_as for c in rest)), "")
    return table


def _calls(chosen: Sequence[Chosen]) -> int:
    return sum(c.n for c in chosen)


def _decisions(graphs: Sequence[GraphRecord], ops: dict[str, dict[str, int]], path: str) -> dict[str, list[Chosen]]:
    found: dict[str, list[Chosen]] = {}
    for op, counts in ops.items():
        plain = {how: n for how, n in counts.items() if how in _WHY}
        found[op] = [Chosen(n, _RUNS_AS[how], _WHY[how]) for how, n in plain.items()]
    undecided = "native" if path == "native" else "portable"
    decided: dict[str, Counter[tuple[str, str, str, tuple]]] = {}
    for graph in graphs:
        for (op, _), (decision, n) in graph.decisions.items():
            key = (decision.provider, decision.why, decision.verdict, decision.rejected)
            decided.setdefault(op, Counter())[key] += n
    for op, ways in decided.items():
        found[op] = [
            Chosen(n, undecided if provider == "portable" else f"kernel {provider}", why, verdict, rejected)
            for (provider, why, verdict, rejected), n in ways.items()
        ]
    return {op: chosen for op, chosen in found.items() if chosen}


def explain(compiled: Any, *, show: bool = True) -> Explanation:
    """What became of a compiled model: how each op runs and why, graph breaks, compilations, fallbacks.

    Args:
        compiled: what `compile` returned; call it first, compilation happens at the first call.
        show: also print the table.
    """
    run = getattr(compiled, "_portable_run", None)
    if run is None:
        raise UnsupportedInputError(
            f"{type(compiled).__name__} was not made by portable.compile", remedy="pass what portable.compile returned"
        )
    explanation = Explanation(run.explained())
    if show:
        from rich.console import Console

        Console().print(explanation)
    return explanation


class _CallableModule(types.ModuleType):
    def __call__(self, compiled: Any, *, show: bool = True) -> Explanation:
        return explain(compiled, show=show)


_CallableModule.__call__.__doc__ = explain.__doc__
sys.modules[__name__].__class__ = _CallableModule
