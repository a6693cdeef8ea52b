"""A report as a picture: medians as bars with whiskers from least to greatest, the limit as a dashed line."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.curve import draw_curve
from benchmarks.panels import draw_goodput, draw_models
from benchmarks.report import Report, Row

_OURS, _OTHERS, _LIMIT = "#c8502d", "#8fa3b3", "#333333"
_STYLES = ("--", ":", "-.", (0, (7, 2, 1, 2, 1, 2)))
"""Line styles of limits, so that four limits in a panel differ."""
_CHOSEN = {
    "durable": ("throughput",),
    "restore": ("throughput",),
    "memory": ("peak memory", "peak memory without files"),
    "codec": ("ratio, mixed", "encode, 1 thread, mixed"),
}
"""Beginnings of the metrics drawn where the others say the same once more; of other workloads, all."""
_NAME = "asymcheck"


def draw(report: Report, path: Path) -> None:
    """Write the picture as a PNG file: a panel for each metric."""
    own = {"batch": draw_curve, "models": draw_models, "goodput": draw_goodput}.get(report.workload)
    if own is not None:
        own(report, path)
        return
    chosen = _CHOSEN.get(report.workload)
    panels: dict[tuple[str, str], list[Row]] = {}
    for one in report.results:
        if report.workload == "catalog":
            shown = _in_ms(one)
            panels.setdefault(("time" if shown.unit == "ms" else "size", shown.unit), []).append(shown)
        elif chosen is None or one.metric in chosen or one.metric.startswith(tuple(f"{name} " for name in chosen)):
            panels.setdefault((one.metric, one.unit), []).append(one)
    limits = {one.unit: one.median for one in report.results if one.system == "state"}
    # Where there are none, all of it is asymcheck.
    has_peers = any(one.system.startswith(_NAME) for one in report.results)
    lines = [len([one for one in rows if not _is_limit(one)]) for rows in panels.values()]
    figure = Figure(figsize=(9, 1.6 + sum(0.36 * count + 0.95 for count in lines)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 1.2 for count in lines])[:, 0]
    for axis, ((metric, unit), rows) in zip(axes, panels.items(), strict=True):
        size = limits.get(unit) if report.workload == "memory" else None
        _draw_panel(axis, metric, unit, rows, size, has_peers=has_peers)
    told = [report.environment.get(name, "") for name in ("processor", "memory", "file system", "state", "store")]
    figure.suptitle(
        f"{report.workload}\n" + textwrap.fill(" · ".join(filter(None, told)), 110),
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _draw_panel(axis: Axes, metric: str, unit: str, rows: list[Row], size: float | None, *, has_peers: bool) -> None:
    bars = _grouped([one for one in rows if not _is_limit(one)])
    medians = [one.median for one in bars]
    whiskers = [[one.median - one.min for one in bars], [one.max - one.median for one in bars]]
    colors = [_OURS if one.system.startswith(_NAME) or not has_peers else _OTHERS for one in bars]
    places = range(len(bars))
    error_style = {"elinewidth": 1.1, "capsize": 3, "ecolor": "#222222"}
    axis.barh(places, medians, xerr=whiskers, color=colors, height=0.7, error_kw=error_style)
    axis.set_yticks(places, [one.system for one in bars])
    axis.invert_yaxis()
    end = max([one.max for one in rows] + ([size] if size else []))
    if metric in ("time", "size"):
        # From the opening of a store to its collection it is four powers of ten.
        axis.set_xscale("log")
        axis.set_xlim(min(one.min for one in rows) / 3, end * 4)
    else:
        axis.set_xlim(0, end * 1.14 or 1)
    for place, one in zip(places, bars, strict=True):
        axis.annotate(
            _number(one.median), (one.max, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8
        )
    lines = [(one.system, one.median) for one in rows if _is_limit(one)] + (
        [("size of the state", size)] if size else []
    )
    for (name, value), style in zip(lines, itertools.cycle(_STYLES), strict=False):
        axis.axvline(value, color=_LIMIT, linestyle=style, linewidth=1.3, label=f"{name}: {_number(value)} {unit}")
    if lines:
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=8, frameon=False, borderaxespad=0.2)
    axis.set_xlabel(", ".join(filter(None, (f"{metric} [{unit}]", _better(metric, unit)))), fontsize=9)
    axis.tick_params(labelsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def _in_ms(one: Row) -> Row:
    """Return a row of ``catalog`` as a bar that names the metric, seconds as milliseconds."""
    scale = 1e3 if one.unit == "s" else 1
    unit = "ms" if one.unit == "s" else one.unit
    name = f"{one.metric}, {one.system}"
    return Row(name, one.metric, unit, one.median * scale, one.min * scale, one.max * scale, one.n)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _grouped(rows: list[Row]) -> list[Row]:
    """Put what one system does in several modes together, ours first."""
    order = {one.system.split()[0]: number for number, one in reversed(list(enumerate(rows)))}
    return sorted(rows, key=lambda one: (not one.system.startswith(_NAME), order[one.system.split()[0]], one.system))


def _better(metric: str, unit: str) -> str:
    return "more is better" if unit == "GB/s" or metric.startswith("ratio, ") else "less is better"


def _is_limit(one: Row) -> bool:
    return one.system.startswith("raw ")
