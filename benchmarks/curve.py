"""``batch`` as a picture: the measured time against the size of batches, the predicted one, and B*."""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.batch import AT_BEST, DURABLE, MIB, PREDICTED, size_of
from benchmarks.report import Report


def draw_curve(report: Report, path: Path) -> None:
    """Write the picture as a PNG file."""
    measured = sorted((size_of(one.system), one) for one in report.results if one.metric == DURABLE)
    predicted = sorted((size_of(one.system), one.median) for one in report.results if one.metric == PREDICTED)
    best = next(one.median for one in report.results if one.system == AT_BEST) * 1e6 / MIB
    sizes = [size for size, _ in measured]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    medians = [one.median for _, one in measured]
    whiskers = [[one.median - one.min for _, one in measured], [one.max - one.median for _, one in measured]]
    axis.errorbar(sizes, medians, yerr=whiskers, color="#c8502d", marker="o", capsize=3, label="measured, Store.save")
    axis.plot(*zip(*predicted, strict=True), color="#333333", linestyle="--", label="predicted from facts")
    axis.axvline(best, color="#8fa3b3", linestyle=":", label=f"B* = {best:.0f} MiB")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("size of a batch, which is a pack [MiB]")
    axis.set_ylabel("time to durable [s], less is better")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    told = [report.environment.get(name, "") for name in ("processor", "file system", "state", "facts")]
    figure.suptitle("batch\n" + textwrap.fill(" · ".join(filter(None, told)), 110), fontsize=10)
    figure.savefig(path, dpi=130)
