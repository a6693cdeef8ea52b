"""Draw a report: medians as bars with whiskers from minimum to maximum, limits as lines."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.curve import draw_curve, draw_link
from benchmarks.panels import draw_goodput, draw_models
from benchmarks.report import Report, Row, rounded

_OURS, _PEERS, _LIMIT = "#c8502d", "#8fa3b3", "#333333"
_STYLES = ("--", ":", "-.", (0, (7, 2, 1, 2, 1, 2)))
"""Line styles that distinguish up to four limits in a panel."""
_CHOSEN = {
    "durable": ("throughput",),
    "restore": ("throughput",),
    "stall": (
        *("visible stall, every 1", "visible stall, every 10", "visible stall of the first two, every 10"),
        *("time to durable, every 10", "slowdown, every 10"),
    ),
    "memory": ("peak memory", "peak memory without files"),
    "codec": ("ratio, mixed", "encode, 1 thread, mixed"),
}
"""Prefixes of the metrics to draw, for workloads with redundant metrics. Other workloads draw all."""
_NAME = "asymcheck"


def draw(report: Report, path: Path) -> None:
    """Write a PNG file with a panel for each metric."""
    special = {"batch": draw_curve, "link": draw_link, "models": draw_models, "goodput": draw_goodput}.get(
        report.workload
    )
    if special is not None:
        special(report, path)
        return
    chosen = _CHOSEN.get(report.workload)
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in report.results:
        if report.workload == "catalog":
            shown = _in_ms(row)
            panels.setdefault(("time" if shown.unit == "ms" else "size", shown.unit), []).append(shown)
        elif chosen is None or row.metric in chosen or row.metric.startswith(tuple(f"{name} " for name in chosen)):
            panels.setdefault((row.metric, row.unit), []).append(row)
    limits = {row.unit: row.median for row in report.results if row.system == "state"}
    # Without peers, all bars are asymcheck.
    has_peers = any(row.system.startswith(_NAME) for row in report.results)
    lines = [len([row for row in rows if not _is_limit(row)]) for rows in panels.values()]
    figure = Figure(figsize=(9, 1.6 + sum(0.36 * count + 0.95 for count in lines)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 1.2 for count in lines])[:, 0]
    for axis, ((metric, unit), rows) in zip(axes, panels.items(), strict=True):
        size = limits.get(unit) if report.workload == "memory" else None
        _draw_panel(axis, metric, unit, rows, size, has_peers=has_peers)
    facts = [report.environment.get(name, "") for name in ("processor", "memory", "file system", "state", "store")]
    figure.suptitle(
        f"{report.workload}\n" + textwrap.fill(" · ".join(filter(None, facts)), 110),
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _draw_panel(axis: Axes, metric: str, unit: str, rows: list[Row], size: float | None, *, has_peers: bool) -> None:
    bars = _grouped([row for row in rows if not _is_limit(row)])
    medians = [row.median for row in bars]
    whiskers = [[row.median - row.min for row in bars], [row.max - row.median for row in bars]]
    colors = [_OURS if row.system.startswith(_NAME) or not has_peers else _PEERS for row in bars]
    positions = range(len(bars))
    error_style = {"elinewidth": 1.1, "capsize": 3, "ecolor": "#222222"}
    axis.barh(positions, medians, xerr=whiskers, color=colors, height=0.7, error_kw=error_style)
    axis.set_yticks(positions, [row.system for row in bars])
    axis.invert_yaxis()
    end = max([row.max for row in rows] + ([size] if size else []))
    if metric in ("time", "size"):
        # Times range over four orders of magnitude.
        axis.set_xscale("log")
        axis.set_xlim(min(row.min for row in rows) / 3, end * 4)
    else:
        axis.set_xlim(0, end * 1.14 or 1)
    for position, row in zip(positions, bars, strict=True):
        axis.annotate(
            rounded(row.median), (row.max, position), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8
        )
    lines = [(row.system, row.median) for row in rows if _is_limit(row)] + (
        [("size of the state", size)] if size else []
    )
    for (name, value), style in zip(lines, itertools.cycle(_STYLES), strict=False):
        axis.axvline(value, color=_LIMIT, linestyle=style, linewidth=1.3, label=f"{name}: {rounded(value)} {unit}")
    if lines:
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=8, frameon=False, borderaxespad=0.2)
    axis.set_xlabel(", ".join(filter(None, (f"{metric} [{unit}]", _better(metric, unit)))), fontsize=9)
    axis.tick_params(labelsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def _in_ms(row: Row) -> Row:
    """Return a row of ``catalog`` as a bar named by its metric, in milliseconds instead of seconds."""
    scale = 1e3 if row.unit == "s" else 1
    unit = "ms" if row.unit == "s" else row.unit
    name = f"{row.metric}, {row.system}"
    return Row(name, row.metric, unit, row.median * scale, row.min * scale, row.max * scale, row.n)


def _grouped(rows: list[Row]) -> list[Row]:
    """Sort rows by system, ours first, so that the modes of a system are adjacent."""
    order = {row.system.split()[0]: number for number, row in reversed(list(enumerate(rows)))}
    return sorted(rows, key=lambda row: (not row.system.startswith(_NAME), order[row.system.split()[0]], row.system))


def _better(metric: str, unit: str) -> str:
    return "more is better" if unit == "GB/s" or metric.startswith("ratio, ") else "less is better"


def _is_limit(row: Row) -> bool:
    return row.system.startswith("raw ")
