"""Draw ``models`` and ``goodput``, readable in black and white."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.report import Report, Row

_OURS, _UPSTREAM, _REIMPLEMENTED = "#c8502d", "#8fa3b3", "#ffffff"
_SHOWN = (
    ("slowdown", "x"),
    ("visible stall p95", "ms"),
    ("time to durable", "ms"),
    ("recovery", "ms"),
)
_MARKERS = "os^vD*PX<>hp"


def draw_models(report: Report, path: Path, every: int = 10) -> None:
    """Write a PNG file with a panel per measure (rows) and model (columns), for one interval.

    Leave out the schemes that were measured with some of the models only, and say so.
    """
    lost = [(row.system, row.metric.partition(", ")[2]) for row in _of(report, "steps lost")]
    models = list(dict.fromkeys(model for _, model in lost))
    schemes = [name for name, count in Counter(name for name, _ in lost).items() if count == len(models)]
    figure = Figure(figsize=(2.4 * len(models) + 2.6, 2.2 + 0.75 * len(schemes)), layout="constrained")
    grid = figure.subplots(len(_SHOWN), len(models), squeeze=False, sharey=True)
    for axes, (metric, unit) in zip(grid, _SHOWN, strict=True):
        after = "" if metric == "recovery" else f", every {every}"
        rows = {
            model: {row.system: row for row in report.results if row.metric == f"{metric}, {model}{after}"}
            for model in models
        }
        scale = "log" if any(map(_is_wide, rows.values())) else "linear"
        for axis, model in zip(axes, models, strict=True):
            _bars(axis, schemes, rows[model], scale)
            axis.set_title(f"{model}: {metric} [{unit}]", fontsize=8)
    facts = [report.environment.get(name, "") for name in ("processor", "file system", "state")]
    others = len({name for name, _ in lost}) - len(schemes)
    left_out = f" · left out: {others} schemes that were measured with some of the models" if others else ""
    figure.suptitle(
        f"models, a checkpoint every {every} steps; less is better{left_out}\n"
        + textwrap.fill(" · ".join(filter(None, facts)), 130),
        fontsize=9,
    )
    figure.savefig(path, dpi=110)


def _of(report: Report, metric: str) -> list[Row]:
    return [row for row in report.results if row.metric.startswith(f"{metric}, ")]


def _is_wide(rows: dict[str, Row]) -> bool:
    """Return whether one value would make the other bars hard to see."""
    medians = sorted(row.median for row in rows.values())
    return bool(medians) and max(row.max for row in rows.values()) > 10 * max(medians[len(medians) // 2], 1e-9)


def _bars(axis: Axes, schemes: list[str], rows: dict[str, Row], scale: str) -> None:
    for position, scheme in enumerate(schemes):
        row = rows.get(scheme)
        if row is None:
            continue
        reimplemented = scheme.endswith("(reimplemented)")
        color = _OURS if scheme.startswith("asymcheck") else (_REIMPLEMENTED if reimplemented else _UPSTREAM)
        whiskers = [[row.median - row.min], [row.max - row.median]]
        axis.barh(
            [position],
            [row.median],
            xerr=whiskers,
            color=color,
            edgecolor="#333333",
            hatch="///" if reimplemented else None,
            linewidth=0.6,
            error_kw={"elinewidth": 0.8, "capsize": 2},
        )
    axis.set_yticks(range(len(schemes)), schemes, fontsize=7)
    if not axis.yaxis_inverted():
        axis.invert_yaxis()
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xscale(scale)
    # Labels between powers of ten would overlap.
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlim(left=0 if scale == "linear" else min((row.min for row in rows.values()), default=1) / 2)


def draw_goodput(report: Report, path: Path) -> None:
    """Write a PNG file with goodput against the number of GPUs, one line per scheme."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axis = figure.subplots()
    for number, scheme in enumerate(dict.fromkeys(row.system for row in report.results)):
        points = sorted(
            (int(row.metric.split()[1]), row)
            for row in report.results
            if row.system == scheme and row.metric.startswith("goodput, ") and row.metric.endswith(" GPUs")
        )
        ours = scheme.startswith("asymcheck")
        axis.errorbar(
            [gpus for gpus, _ in points],
            [row.median for _, row in points],
            yerr=[[row.median - row.min for _, row in points], [row.max - row.median for _, row in points]],
            label=scheme,
            marker=_MARKERS[number % len(_MARKERS)],
            color=_OURS if ours else "#555555",
            linestyle="-" if ours else ("--" if scheme.endswith("(reimplemented)") else ":"),
            linewidth=1.6 if ours else 1.0,
            capsize=2,
        )
    axis.set_xscale("log")
    axis.set_xlabel("GPUs of the job; failures as in the Llama 3 405B run")
    axis.set_ylabel("goodput [%], more is better")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=7, ncols=2)
    figure.suptitle("goodput\n" + textwrap.fill(report.environment.get("state", ""), 120), fontsize=9)
    figure.savefig(path, dpi=130)
