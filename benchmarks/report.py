"""report.html: one file that opens without a network, light or dark as the reader's system is.

The plots are SVG drawn by matplotlib in placeholder colours, which become the page's CSS variables.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import text
from .results import Finding
from .runner import Row, worst_first

# placeholder in the SVG → (CSS variable, light, dark)
COLOURS = {
    "#010101": ("ink", "#1c1e21", "#e8e8e6"),
    "#020202": ("faint", "#d5d7da", "#3a3d41"),
    "#030303": ("portable", "#1f6fd0", "#6aaefc"),
    "#040404": ("eager", "#8a8f98", "#9aa0a8"),
    "#050505": ("inductor", "#c2631d", "#f0a35e"),
    "#060606": ("kernel", "#178a5b", "#4fcf97"),
    "#070707": ("limit", "#c02a3c", "#ff7b87"),
}
PAGE = {"page": ("#ffffff", "#15171a"), "panel": ("#f6f7f8", "#1e2124"), "muted": ("#5c636b", "#a3a9b0")}
_OF = {name: placeholder for placeholder, (name, _, _) in COLOURS.items()}
_MARKS = {"portable": "o", "eager": "s", "inductor": "D", "kernel": "^"}


def write(path: Path, rows: Sequence[Row], content: Mapping[str, Any], findings: Sequence[Finding] = ()) -> None:
    """Write the report of ``rows`` to ``path``.

    Args:
        content: of results.json: backend, suite, created, fingerprint, peak.
        findings: of the comparison with a baseline.
    """
    path.write_text(render(rows, content, findings), encoding="utf-8")


def render(rows: Sequence[Row], content: Mapping[str, Any], findings: Sequence[Finding] = ()) -> str:
    """The report as HTML."""
    rows = worst_first(rows)
    measured = [row for row in rows if row.latency_s]
    escaped = html.escape
    title = f"portable bench: {content['backend']}, suite {content['suite']}"
    parts = [
        f"<h1>{escaped(title)}</h1>",
        f"<p class=tally>{escaped(text.tally(rows))}</p>",
        f"<p class=muted>{escaped(str(content.get('created', '')))} · worst first</p>",
        _findings(findings),
    ]
    for heading, note, draw in _PLOTS if measured else ():
        svg = _svg(measured, draw)
        parts.append(f"<h2>{heading}</h2><p class=muted>{note}</p><figure>{svg}</figure>" if svg else "")
    parts += ["<h2>Every workload</h2>", _table(rows), "<h2>Measured on</h2>", _about(content)]
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escaped(title)}</title>"
    head += f"<style>{_css()}</style>"
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _css() -> str:
    schemes = []
    for dark in (0, 1):
        colours = {name: pair[dark] for name, *pair in COLOURS.values()} | {
            name: pair[dark] for name, pair in PAGE.items()
        }
        schemes.append("".join(f"--{name}:{value};" for name, value in colours.items()))
    return (
        f":root{{color-scheme:light dark;{schemes[0]}}}@media(prefers-color-scheme:dark){{:root{{{schemes[1]}}}}}"
        "body{background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:76rem;"
        "margin:2rem auto;padding:0 1rem}h1{font-size:1.5rem;margin-bottom:.2rem}"
        "h2{font-size:1.15rem;margin:2.2rem 0 .2rem}"
        ".tally{font-size:1.1rem;margin:.2rem 0}.muted{color:var(--muted);margin:.1rem 0}"
        "figure{margin:.5rem 0;overflow-x:auto}figure svg{max-width:100%;height:auto}"
        ".scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.87rem}"
        "th,td{text-align:right;padding:.3rem .6rem;border-bottom:1px solid var(--faint);vertical-align:top;"
        "white-space:nowrap}"
        "th{color:var(--muted);font-weight:600}th:first-child,td:first-child,td.text,th.text{text-align:left}"
        "td.text{white-space:normal;min-width:17rem}.good{color:var(--kernel)}.bad{color:var(--limit);font-weight:600}"
        "small{color:var(--muted)}"
        "ul.findings{background:var(--panel);padding:.6rem 2rem;border-left:4px solid var(--limit)}"
    )


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    items = "".join(
        f"<li><b>{html.escape(f.kind)}</b> {html.escape(f.workload)}: {html.escape(f.text)}</li>" for f in findings
    )
    return f"<h2>Against the baseline</h2><ul class=findings>{items}</ul>"


def _table(rows: Sequence[Row]) -> str:
    heads = [
        "portable p50",
        "p99",
        "SLO",
        "eager",
        "inductor",
        "kernel",
        "× best native",
        "roofline",
        "compile",
        "peak",
    ]
    cells = "<th>workload</th><th class=text>decision and reason</th>" + "".join(f"<th>{head}</th>" for head in heads)
    body = "".join(map(_row, rows))
    return f"<div class=scroll><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>"


def _row(row: Row) -> str:
    p99, best = row.p99_s.get("portable"), row.ratios.get(row.best_native or "")
    cells = [
        _interval(row, "portable"),
        text.seconds(p99),
        html.escape(text.limit(row)),
        _interval(row, "eager"),
        _interval(row, "inductor"),
        text.seconds(row.kernel_s.median) if row.kernel_s else "–",
        f"{best.median:.2f}<br><small>[{best.low:.2f}, {best.high:.2f}]</small>" if best else "–",
        f"{row.roofline:.0%}" if row.roofline is not None else "–",
        f"{row.compile_s['portable']:.2f} s" if "portable" in row.compile_s else "–",
        f"{row.peak_mb['portable']:.1f} MB" if "portable" in row.peak_mb else "–",
    ]
    name = f"{html.escape(row.workload)}<br><small>{html.escape(row.op)} · {html.escape(row.model)}</small>"
    figures = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr><td>{name}</td><td class=text>{_decision(row)}</td>{figures}</tr>"


def _decision(row: Row) -> str:
    look = {"met": "good", "kernel": "good", "unjudged": "muted"}.get(row.state, "bad")
    head, _, why = text.decision(row).partition(": ")
    if row.state in ("met", "kernel"):
        why = row.reason
    lines = [why, *row.notes] if why else row.notes
    return f"<span class={look}>{html.escape(head)}</span>" + "".join(f"<br>{html.escape(line)}" for line in lines)


def _interval(row: Row, name: str) -> str:
    found = row.latency_s.get(name)
    if found is None:
        return "–"
    return f"{text.seconds(found.median)}<br><small>[{text.seconds(found.low)}, {text.seconds(found.high)}]</small>"


def _about(content: Mapping[str, Any]) -> str:
    pairs = {**content.get("fingerprint", {})}
    peak = content.get("peak")
    if peak:
        pairs["peak bandwidth"] = ", ".join(
            f"{value / 1e9:.0f} GB/s at {int(size) / 2**20:.3g} MiB" for size, value in peak["bandwidth"].items()
        )
        pairs["peak arithmetic"] = ", ".join(
            f"{value / 1e9:.0f} GFLOP/s {dtype}" for dtype, value in peak["flops"].items()
        )
    cells = "".join(
        f"<tr><td>{html.escape(str(key))}</td><td class=text>{html.escape(str(value))}</td></tr>"
        for key, value in pairs.items()
    )
    return f"<table>{cells}</table>"


def _svg(rows: Sequence[Row], draw: Callable[[Any, Sequence[Row]], bool]) -> str:
    """One plot, a line for each row, worst at the top; '' where there is nothing to draw."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": "portable", "font.family": "sans-serif", "font.size": 9}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _OF["ink"])
    style |= {"axes.edgecolor": _OF["faint"], "grid.color": _OF["faint"]}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10.5, 1.1 + 0.3 * len(rows)), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        if not draw(axes, rows):
            return ""
        axes.set_yticks(range(len(rows)), [row.workload for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="x", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.xaxis.set_major_formatter("{x:g}")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, borderaxespad=0.2)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for placeholder, (name, _, _) in COLOURS.items():
        svg = svg.replace(placeholder, f"var(--{name})")
    return svg


def _latency(axes: Any, rows: Sequence[Row]) -> bool:
    for name in ("eager", "inductor", "portable"):
        _intervals(
            axes, name, [(i, row.latency_s[name].scaled(1e3)) for i, row in enumerate(rows) if name in row.latency_s]
        )
    _intervals(axes, "kernel", [(i, row.kernel_s.scaled(1e3)) for i, row in enumerate(rows) if row.kernel_s])
    limits = [(i, 1e3 * r.judgement.limit_s) for i, r in enumerate(rows) if r.judgement and r.judgement.limit_s]
    _limits(axes, limits)
    axes.set_xscale("log")
    axes.set_xlabel("ms per call, median with 95 % interval")
    return True


def _ratios(axes: Any, rows: Sequence[Row]) -> bool:
    drawn = False
    for name in ("eager", "inductor"):
        points = [(i, row.ratios[name]) for i, row in enumerate(rows) if name in row.ratios]
        _intervals(axes, name, points)
        drawn = drawn or bool(points)
    _limits(axes, [(i, row.slo.limit) for i, row in enumerate(rows) if row.slo and row.slo.metric == "ratio"])
    axes.axvline(1, color=_OF["ink"], linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("time of the portable path over the baseline's, within each round")
    return drawn


def _roofline(axes: Any, rows: Sequence[Row]) -> bool:
    points = [(i, row.roofline) for i, row in enumerate(rows) if row.roofline is not None]
    if not points:
        return False
    axes.barh(
        [i for i, _ in points], [100 * v for _, v in points], height=0.55, color=_OF["portable"], label="portable"
    )
    _limits(axes, [(i, 100 * row.slo.limit) for i, row in enumerate(rows) if row.slo and row.slo.metric == "roofline"])
    axes.axvline(100, color=_OF["ink"], linewidth=0.8)
    axes.set_xlabel("% of what the measured machine peak allows")
    return True


def _intervals(axes: Any, name: str, points: Sequence[tuple[int, Any]]) -> None:
    if not points:
        return
    middle = [p.median for _, p in points]
    low = [p.median - max(p.low, 1e-9 * p.median) for _, p in points]
    high = [min(p.high, 1e3 * p.median) - p.median for _, p in points]
    # names differ by their mark too, and are set apart a little: not by colour alone
    offset = {"eager": 0.18, "inductor": 0.06, "portable": -0.06, "kernel": -0.18}[name]
    axes.errorbar(
        middle,
        [i + offset for i, _ in points],
        xerr=[low, high],
        fmt=_MARKS[name],
        color=_OF[name],
        markersize=4.5,
        elinewidth=1.4,
        label=name,
    )


def _limits(axes: Any, points: Sequence[tuple[int, float]]) -> None:
    if points:
        x, y = [v for _, v in points], [i for i, _ in points]
        axes.scatter(x, y, marker="|", s=170, linewidths=2, color=_OF["limit"], label="SLO", zorder=3)


_PLOTS: tuple[tuple[str, str, Callable[[Any, Sequence[Row]], bool]], ...] = (
    ("Latency against the SLO", "The red bar is the SLO; a ratio is shown as the latency that it allows.", _latency),
    ("Ratio to the baselines", "Below 1 the portable path is faster.", _ratios),
    (
        "Roofline",
        "Above 100 %: done with fewer operations (Winograd), or data in a nearer cache than a copy of that size.",
        _roofline,
    ),
)
