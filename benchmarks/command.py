"""`portable bench`: measure a backend on this machine, judge it by its SLOs, and say what to change.

Nothing heavy is imported until the command runs: OpenMP's threads are bound to cores, and that comes before torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from portable.errors import ConfigError

from .threads import bind, unbound

if TYPE_CHECKING:
    from .results import Finding
    from .runner import Row
    from .workloads import Workload

MET, UNMET, COULD_NOT_RUN = 0, 1, 2
WIDTH = 160  # columns, where the output is no terminal
SLO_FILES = Path(__file__).parent / "slo"
console = Console()
app = typer.Typer()


@app.command()
def bench(
    backend: Annotated[str, typer.Option(help="Backend; default PORTABLE_BACKEND.")] = "",
    suite: Annotated[str, typer.Option(help="quick, ops, models or all.")] = "quick",
    op: Annotated[str, typer.Option(help="Only the workloads of one op, e.g. rms_norm (of the suite all).")] = "",
    slo: Annotated[Path | None, typer.Option(help="SLO file; default: the backend's own.")] = None,
    compare: Annotated[str, typer.Option(help="Baselines, separated by commas.")] = "eager,inductor",
    out: Annotated[Path, typer.Option(help="Folder for report.html and results.json.")] = Path("bench"),
    baseline: Annotated[Path | None, typer.Option(help="An earlier results.json to compare with.")] = None,
    budget: Annotated[
        float, typer.Option(help="Seconds for the whole run; default by suite.", min=0.0, show_default=False)
    ] = 0.0,
) -> None:
    """Measure a backend here, and judge it by its SLOs.

    Exit status 0: all are met; 1: some are not, or the baseline says that something changed; 2: it could not run.
    """
    bind()
    from portable import backends

    from . import report, results, runner, text

    workloads = chosen(suite, op)
    baselines = names_of_baselines(compare)
    earlier = results.read(baseline) if baseline else None
    with unbound(), console.status("starting the backend …"):
        name = str(backends.get(backends.selected(backend or None)))
        slos = slos_of(name, slo)
        fingerprint = fingerprint_of(name)
    gate = gate_of(name, slos)
    out_folder(out)
    with console.status("measuring the machine's peak …"):
        peak = peak_of(name)
    budget_s = budget or min(runner.BUDGET_S[suite if not op else "all"], 20.0 * len(workloads))
    found = runner.run(workloads, name, slos, budget_s=budget_s, compare=baselines, gate=gate, peak=peak)
    rows = list(progress(found, workloads, budget_s))
    content = results.to_dict(
        rows,
        backend=name,
        suite=suite,
        fingerprint=fingerprint,
        op=op,
        slo_file=slo.name if slo else f"{name}.toml",
        compare=list(baselines),
        peak=peak.to_dict() if peak else None,
    )
    results.write(out / "results.json", content)
    selected = None if suite == "all" and not op else _selected(workloads, earlier)
    findings = results.compare(content, earlier, selected) if earlier else []
    report.write(out / "report.html", rows, content, findings)
    show(rows, findings)
    written = f"   {gate.said()}" if gate else ""
    console.print(f"{text.tally(rows)}        report: {out / 'report.html'}{written}", highlight=False)
    raise typer.Exit(status(rows, findings))


def chosen(suite: str, op: str) -> list[Workload]:
    """The workloads that were asked for.

    Raises:
        ConfigError: no such suite, or none of that op.
    """
    from . import workloads

    if suite not in workloads.SUITES:
        raise ConfigError(f"--suite {suite!r} does not exist", remedy=f"one of {', '.join(workloads.SUITES)}")
    if not op:
        return workloads.suite(suite)
    found = [w for w in workloads.WORKLOADS.values() if w.is_of(op)]
    if not found:
        ops = sorted({w.op for w in workloads.WORKLOADS.values()})
        raise ConfigError(f"--op {op!r}: no workload measures it", remedy=f"one of {', '.join(ops)}")
    return found


def names_of_baselines(text: str) -> tuple[str, ...]:
    """The baselines of ``--compare``.

    Raises:
        ConfigError: one that does not exist.
    """
    from .measurement import BASELINES

    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    if unknown := [name for name in names if name not in BASELINES]:
        raise ConfigError(f"--compare {unknown[0]!r} does not exist", remedy=f"of {', '.join(BASELINES)}")
    return names


def slos_of(backend: str, path: Path | None) -> dict[str, Any]:
    """The SLOs of a file, or of the backend's own; none where it has none.

    Raises:
        ConfigError: the file is not legal, or a pattern in it fits no workload.
    """
    from fnmatch import fnmatchcase

    from portable.slo.objective import line_of, load_slos

    from .workloads import WORKLOADS

    if path is None:
        path = SLO_FILES / f"{backend.partition(':')[0]}.toml"
        if not path.exists():
            console.print(f"no SLOs for {backend}: measuring only (--slo FILE gives some)", style="yellow")
            return {}
    slos = load_slos(path)
    for pattern in slos:
        if not any(fnmatchcase(name, pattern) for name in WORKLOADS):
            where = f"{path}:{line_of(path.read_text(encoding='utf-8'), pattern)}"
            remedy = "name a workload or a pattern of workloads, e.g. 'layer_norm/*'"
            raise ConfigError(f"{where}: {pattern}: fits no workload", remedy=remedy)
    return slos


def fingerprint_of(backend: str) -> dict[str, str]:
    """What the results are valid for, by name."""
    from portable.kernels.fingerprint import fingerprint

    return dict(fingerprint(backend).parts)


def peak_of(backend: str) -> Any:
    """The measured machine peak; None where torch cannot reach the device that the backend computes on."""
    from portable import backends
    from portable.backends import pjrt
    from portable.backends.xla import Xla

    from .roofline import measure_peak

    found = backends.get(backend)
    if isinstance(found, Xla) and not pjrt.client(found.platform).on_host:
        return None
    return measure_peak(found.device())


def gate_of(backend: str, slos: Any) -> Any:
    """The gate that decides about kernels for ``backend``; None where there is none: measure and report only.

    Raises:
        LedgerError: what is measured could not be stored.
    """
    from portable import backends
    from portable.kernels import registry
    from portable.slo.gate import Gate

    from .gating import Gating

    label = backends.get(backend).label()
    if not registry.ops_with_kernels(label):
        return None
    gate = Gate(backend, label)
    gate.ledger.require_writable()
    return Gating(gate, slos)


def out_folder(path: Path) -> None:
    """Make the folder for the results.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "results.json.partial").touch()
        (path / "results.json.partial").unlink()
    except OSError as failure:
        raise ConfigError(
            f"--out {path}: {failure.strerror or failure}", remedy="name a folder to write to"
        ) from failure


def progress(rows: Iterable[Row], workloads: Sequence[Workload], budget_s: float) -> Iterator[Row]:
    """Pass ``rows`` on, behind a bar with the workload's name and the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    began = time.monotonic()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(workloads[0].name, total=len(workloads), left=_left(budget_s))
        for done, row in enumerate(rows, 1):
            each = (time.monotonic() - began) / done
            following = workloads[done].name if done < len(workloads) else "writing the report"
            bar.update(task, advance=1, description=following, left=_left(each * (len(workloads) - done)))
            yield row


def _left(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def show(rows: Sequence[Row], findings: Sequence[Finding]) -> None:
    """The table, worst first, how it reads, and what changed since the baseline."""
    from . import text
    from .runner import worst_first

    table = Table(box=None, pad_edge=False)
    for column in ("workload", "portable", "SLO", "best native"):
        table.add_column(column, no_wrap=True)
    table.add_column("decision", overflow="fold")
    style = {"met": "green", "kernel": "green", "unjudged": "dim"}
    for row in worst_first(rows):
        own, native = row.latency_s.get("portable"), row.latency_s.get(row.best_native or "")
        colour = style.get(row.state, "bold red")
        cells = (text.spread(own) if own else "–", text.limit(row), text.seconds(native.median if native else None))
        table.add_row(escape(row.workload), *cells, f"[{colour}]{escape(text.decision(row))}[/]")
    wide = console if console.is_terminal else Console(width=WIDTH)
    wide.print(table, highlight=False)
    wide.print(text.LEGEND, style="dim", markup=False, highlight=False)
    for finding in findings:
        console.print(f"[bold]{finding.kind}[/] {escape(finding.workload)}: {escape(finding.text)}", highlight=False)


def status(rows: Sequence[Row], findings: Sequence[Finding]) -> int:
    """The exit status: 0 all met, 1 some unmet, wrong or changed without reason, 2 nothing could be measured."""
    if all(row.state == "failed" for row in rows):
        return COULD_NOT_RUN
    bad = any(row.state in ("unmet", "wrong", "failed") for row in rows) or any(f.fails for f in findings)
    return UNMET if bad else MET


def _selected(workloads: Sequence[Workload], earlier: Any) -> list[str]:
    """What of the baseline this run answers for: what it measured, and what no longer exists."""
    from .workloads import WORKLOADS

    gone = [row["workload"] for row in (earlier or {"rows": ()})["rows"] if row["workload"] not in WORKLOADS]
    return [*(w.name for w in workloads), *gone]
