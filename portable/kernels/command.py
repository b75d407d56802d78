"""`portable ledger`: show, export, import, prune, quarantine, rollback."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from portable.errors import ConfigError, LedgerError, PortableError
from portable.kernels.fingerprint import Fingerprint
from portable.kernels.ledger import Ledger, StoredDecision, Verdict, stale_reason
from portable.kernels.records import PORTABLE

if TYPE_CHECKING:
    from portable.kernels.registry import Kernel

app = typer.Typer(help="What was measured on this machine, and what is used because of it.", no_args_is_help=True)
console = Console()
VERDICT_ID = 8  # characters that are shown of it

Op = Annotated[str | None, typer.Option("--op", help="Only this op.")]
OnBackend = Annotated[str | None, typer.Option("--backend", help="Only this backend.")]


@app.command()
def show(
    op: Op = None,
    backend: OnBackend = None,
    verdicts: Annotated[bool, typer.Option("--verdicts", help="Every verdict, instead of the decisions.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Also what was superseded or rolled back.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, machine-readable.")] = False,
) -> None:
    """The decisions in force, the verdicts they rest on, whether they count here, and the kernels in quarantine."""
    ledger = Ledger(set_aside=False)
    decided = ledger.decisions(op, backend=backend, history=history)
    measured = ledger.verdicts(op, backend=backend)
    quarantines = [q for q in ledger.quarantines(history=history) if op in (None, q.op)]
    if verdicts and not as_json:
        console.print(_verdict_table(measured))
        return
    with console.status("asking the backends what they are …"):
        states = _states(decided)
    if as_json:
        document = {
            "ledger": str(ledger.path),
            "decisions": [{**asdict(d), "state": state} for d, state in zip(decided, states, strict=True)],
            "verdicts": [asdict(v) for v in measured],
            "quarantines": [asdict(q) for q in quarantines],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    console.print(_decision_table(decided, states))
    for q in quarantines:
        lifted = f", lifted {_when(q.lifted)}" if q.lifted else ""
        console.print(f"in quarantine: {q.op}/{q.provider} since {_when(q.created)}{lifted}: {q.reason}", markup=False)
    stale = sum(state.startswith("stale") for state in states)
    summary = f"{_count(len(measured), 'verdict')}, {_count(len(decided), 'decision')}, {stale} stale"
    console.print(f"{summary}: {ledger.path}", markup=False, highlight=False)


@app.command("export")
def export_(path: Annotated[Path, typer.Argument(help="JSON file.")], op: Op = None, backend: OnBackend = None) -> None:
    """Write verdicts and the decisions in force to a JSON file."""
    number = Ledger(set_aside=False).export_json(path, op=op, backend=backend)
    console.print(f"{_count(number, 'verdict')} written to {path}", markup=False)


@app.command("import")
def import_(path: Annotated[Path, typer.Argument(help="A file of `portable ledger export`.")]) -> None:
    """Take over an exported file, whole or not at all. It counts on machines of the same fingerprint alone."""
    done = Ledger().import_json(path)
    known = f", {done.known} known already" if done.known else ""
    console.print(
        f"{_count(done.added, 'verdict')} imported{known}; {_count(done.decisions, 'decision')} came into force",
        markup=False,
    )


@app.command()
def prune(
    days: Annotated[float, typer.Option("--older-than", min=0, help="Age in days; what is younger stays.")] = 90.0,
    stale: Annotated[
        bool, typer.Option("--stale", help="Also decisions of other machines, drivers and versions.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove old verdicts that no decision rests on."""
    ledger = Ledger()
    here = _fingerprints({d.backend for d in ledger.decisions()}) if stale else {}
    known = {name: found for name, found in here.items() if isinstance(found, Fingerprint)}
    gone = ledger.prune(older_than_days=days, fingerprints=known, dry_run=dry_run)
    verb = "would be removed" if dry_run else "removed"
    decisions = f"{gone.decisions} of the history of decisions"
    console.print(f"{verb}: {_count(len(gone.verdicts), 'verdict')}, {decisions}", markup=False)


@app.command()
def quarantine(
    op: Annotated[str, typer.Argument(help="E.g. rms_norm or aten.cumsum.default.")],
    provider: Annotated[str, typer.Argument(help="The kernel's provider.")],
    reason: Annotated[
        str, typer.Option("--reason", help="Why; `explain` shows it. Required, unless --lift.", show_default=False)
    ] = "",
    lift: Annotated[bool, typer.Option("--lift", help="End the quarantine.")] = False,
) -> None:
    """Make a kernel ineligible until the quarantine is lifted."""
    ledger = Ledger()
    if lift:
        ledger.lift(op, provider)
        console.print(f"{op}/{provider} is eligible again", markup=False)
        return
    _check_kernel(op, provider)
    if not reason.strip():
        raise LedgerError(f"no reason to quarantine {op}/{provider} is given", remedy='add --reason "…"')
    ledger.quarantine(op, provider, reason)
    console.print(
        f"{op}/{provider} is in quarantine; programs that are compiled from now on do not use it", markup=False
    )


@app.command()
def rollback(
    op: Annotated[str, typer.Argument(help="E.g. rms_norm or aten.cumsum.default.")],
    signature: Annotated[str | None, typer.Option("--signature", help="Only this signature.")] = None,
    backend: OnBackend = None,
) -> None:
    """Restore the decision before the last one. The history is kept."""
    for d in Ledger().rollback(op, signature=signature, backend=backend):
        now = (
            f"{_runs_as(d.provider)} (verdict {d.verdict_id[:VERDICT_ID]})"
            if d.provider
            else "portable: nothing is decided"
        )
        console.print(f"{d.op} {d.signature} on {d.backend}: {now}", markup=False, highlight=False)
    console.print(
        "a later `portable bench` may decide anew; `portable ledger quarantine` keeps a kernel out", markup=False
    )


def _check_kernel(op: str, provider: str) -> None:
    """It is registered here.

    Raises:
        ConfigError: it is not; names those that are.
    """
    known = {(k.op, k.provider) for k in _registered().values()}
    if known and (op, provider) not in known:
        providers = sorted(p for o, p in known if o == op)
        what = f"{op} has no kernel by {provider!r}" if providers else f"there is no kernel of {op!r}"
        remedy = (
            f"it has: {', '.join(providers)}" if providers else f"one of {', '.join(sorted({o for o, _ in known}))}"
        )
        raise ConfigError(what, remedy=remedy)


def _states(decisions: list[StoredDecision]) -> list[str]:
    """For each decision: in force, superseded, or why it does not count here."""
    latest = {(d.op, d.signature, d.backend, d.fingerprint): d.sequence for d in decisions}
    here = _fingerprints({d.backend for d in decisions})
    states = []
    for d in decisions:
        if latest[d.op, d.signature, d.backend, d.fingerprint] != d.sequence:
            states.append("superseded")
            continue
        if not d.provider:
            states.append("nothing is decided")
            continue
        now = here[d.backend]
        if not isinstance(now, Fingerprint):
            states.append(f"backend cannot run here: {now}")
        else:
            reason = stale_reason(d, now, _kernel_digest(d))
            states.append(f"stale: {reason}" if reason else "in force")
    return states


def _fingerprints(backends: Iterable[str]) -> dict[str, Fingerprint | str]:
    """This machine's fingerprint by backend, or why there is none; a fresh process each, which keeps devices free."""
    from portable.backends.base import ask

    found: dict[str, Fingerprint | str] = {}
    for name in sorted(backends):
        ok, text = ask(_ASK.format(name=name), timeout=120)
        found[name] = Fingerprint.parse(text) if ok else text
    return found


_ASK = """
import sys
from portable.errors import PortableError
from portable.kernels.fingerprint import fingerprint
try:
    text = fingerprint({name!r}).text
except PortableError as failure:
    sys.exit(" ".join(failure.message.split()))
sys.stdout.write(text)
"""


def _kernel_digest(decision: StoredDecision) -> str:
    """The digest of the kernel that is registered now; '' if none is."""
    if decision.provider == PORTABLE:
        return ""
    kernel = _registered().get((decision.op, decision.provider))
    return kernel.digest if kernel else ""


def _registered() -> dict[tuple[str, str], Kernel]:
    """The kernels that are registered here; what is known of them where some cannot be loaded."""
    from portable.kernels import registry

    try:
        registry.load()
    except (ImportError, PortableError) as failure:
        Console(stderr=True).print(f"kernels cannot be loaded: {failure}", markup=False)
    return registry.KERNELS


def _decision_table(decisions: list[StoredDecision], states: list[str]) -> Table:
    table = Table("op", box=None, pad_edge=False)
    table.add_column("signature", overflow="fold")
    for title in ("backend", "runs as", "why"):
        table.add_column(title)
    table.add_column("verdict", overflow="fold", min_width=VERDICT_ID)
    table.add_column("state")
    for d, state in zip(decisions, states, strict=True):
        evidence = f"{d.verdict.id[:VERDICT_ID]} {d.verdict.evidence} {_when(d.verdict.created)}" if d.verdict else "–"
        cells = (d.op, d.signature, d.backend, _runs_as(d.provider), d.why, evidence)
        table.add_row(*map(escape, cells), f"[green]{state}[/]" if state == "in force" else escape(state))
    return table


def _verdict_table(verdicts: list[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("verdict", no_wrap=True, min_width=VERDICT_ID)
    titles = ("op", "workload", "backend", "provider", "outcome", "median", "SLO", "evidence", "when", "machine")
    for title in titles:
        table.add_column(title, overflow="fold")
    for v in verdicts:
        outcome = f"{v.outcome}: {v.reason}" if v.reason else v.outcome
        cells = (
            v.id[:VERDICT_ID], v.op, v.workload, v.backend, v.provider, outcome, _interval(v),
            f"{v.metric} ≤ {v.limit:g}", v.evidence, _when(v.created),
            Fingerprint.parse(v.fingerprint).short,
        )  # fmt: skip
        table.add_row(*map(escape, cells))
    return table


def _interval(verdict: Verdict) -> str:
    if verdict.median_s is None:
        return "–"
    bounds = (verdict.low_s, verdict.high_s)
    spread = "" if None in bounds else " [{:.3g}, {:.3g}]".format(*(1000 * b for b in bounds if b is not None))
    return f"{1000 * verdict.median_s:.3g} ms{spread}"


def _runs_as(provider: str) -> str:
    return provider if provider == PORTABLE else f"kernel {provider}" if provider else "–"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
