"""How a `Check` is shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from portable.backends.check import Check, Verdict

_SHOWN = 4


def lines(check: Check) -> Iterator[Any]:
    """A table with a row a target, then what did not go well, with the user's lines."""
    on = f" on a mesh of {' × '.join(f'{n} ({axis})' for axis, n in check.mesh.items())}" if check.mesh else ""
    yield escape(f"{check.name}: compiled{on}, run nowhere; memory is that of one device")
    columns = ("target", "compiles", "weights + inputs", "outputs", "temporary", "of memory", "predicted")
    table = Table(*columns, box=None, pad_edge=False)
    for verdict in check.verdicts.values():
        table.add_row(*_row(verdict))
    yield table
    for verdict in check.verdicts.values():
        yield from (escape(f"{verdict.target}: ") + text for text in _details(verdict))
    for b in check.graph_breaks:
        yield escape(f"graph break at {b.where or 'an unknown line'}: {b.reason} (it runs in eager, on the host)")


def _row(verdict: Verdict) -> tuple[str, ...]:
    seconds = sum(p.seconds for p in verdict.programs)
    if not verdict.compiles:
        return verdict.target, "[red]no[/]", "–", "–", "–", "–", "–"
    largest = max(verdict.programs, key=lambda p: p.bytes)
    room = f"{decimal(verdict.needed_bytes)} / {decimal(verdict.memory_bytes)}"
    return (
        verdict.target,
        f"yes {seconds:.0f} s" if not verdict.problem else "[red]too large[/]",
        decimal(largest.argument_bytes),
        decimal(largest.output_bytes),
        decimal(largest.temporary_bytes),
        f"{room} [green]✓[/]" if verdict.fits else f"[red]{room} ✗[/]",
        f"≥ {_time(verdict.seconds)}/step",
    )


def _details(verdict: Verdict) -> Iterator[str]:
    if not verdict.compiles:
        yield f"[red]{escape(verdict.problem)}[/]"
    for op in verdict.refused:
        yield f"[red]refused: {escape(str(op))}[/]"
    if verdict.compiles and not verdict.fits:
        over = decimal(verdict.needed_bytes - verdict.memory_bytes)
        yield f"[red]does not fit, by {over}[/]{_remedy(verdict.batch)}"
    for kind, (n, size) in verdict.collectives.items():
        yield f"{n} {kind}, {decimal(size)} on each device"
    notes = sorted(verdict.notes, key=lambda note: -note.count if note.count else -(10**9))
    for note in notes[:_SHOWN]:
        yield f"[yellow]{escape(str(note))}[/]" + (f", {note.count} times" if note.count > 1 else "")
    if len(notes) > _SHOWN:
        yield f"{len(notes) - _SHOWN} more notes: --json, or .verdicts[…].notes"


def _remedy(batch: int | None) -> str:
    if batch is None:
        return ""
    return f"; predicted to fit: a batch of {batch}" if batch else "; not even a batch of 1 is predicted to fit"


def _time(seconds: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e3, "ms")) if seconds * s >= 1), (1e6, "µs"))
    return f"{seconds * scale:.3g} {unit}"
