"""Draw ``batch`` and ``link``: measurements against a parameter."""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.batch import AT_BEST, DURABLE, MIB, PREDICTED, size_of
from benchmarks.link import PARTS, SCHEDULES
from benchmarks.report import Report


def draw_curve(report: Report, path: Path) -> None:
    """Write a PNG file of ``batch``: measured and predicted time against the batch size, and the optimum B*."""
    measured = sorted((size_of(row.system), row) for row in report.results if row.metric == DURABLE)
    predicted = sorted((size_of(row.system), row.median) for row in report.results if row.metric == PREDICTED)
    best = next(row.median for row in report.results if row.system == AT_BEST) * 1e6 / MIB
    sizes = [size for size, _ in measured]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    medians = [row.median for _, row in measured]
    whiskers = [[row.median - row.min for _, row in measured], [row.max - row.median for _, row in measured]]
    axis.errorbar(sizes, medians, yerr=whiskers, color="#c8502d", marker="o", capsize=3, label="measured, Store.save")
    axis.plot(*zip(*predicted, strict=True), color="#333333", linestyle="--", label="predicted")
    axis.axvline(best, color="#8fa3b3", linestyle=":", label=f"B* = {best:.0f} MiB")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("batch size (one pack) [MiB]")
    axis.set_ylabel("time to durable [s], less is better")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    facts = [report.environment.get(name, "") for name in ("processor", "file system", "state", "facts")]
    figure.suptitle("batch\n" + textwrap.fill(" · ".join(filter(None, facts)), 110), fontsize=10)
    figure.savefig(path, dpi=130)


def draw_link(report: Report, path: Path) -> None:
    """Write a PNG file of ``link``: the slowdown by each plan against the load of the link."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    for axis, part in zip(figure.subplots(1, 2, sharey=True), PARTS, strict=True):
        before = f"slowdown, {part}, load "
        for schedule, marker in zip(SCHEDULES, "os^v", strict=True):
            rows = [one for one in report.results if one.system == schedule and one.metric.startswith(before)]
            loads = [float(one.metric.removeprefix(before)) for one in rows]
            axis.plot(loads, [one.median for one in rows], marker=marker, label=schedule)
        axis.set_title(part, fontsize=10)
        axis.set_xlabel("time to copy the state ÷ iteration")
        axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.axes[0].set_ylabel("iteration with a checkpoint ÷ without, less is better")
    facts = [report.environment.get(name, "") for name in ("processor", "state")]
    figure.suptitle("link\n" + textwrap.fill(" · ".join(filter(None, facts)), 110), fontsize=10)
    figure.savefig(path, dpi=130)
