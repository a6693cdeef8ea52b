"""Draw the three pictures of the summary: stall, time on the drive, and bytes. Each is one axis of medians as bars."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import Report, Row, rounded

_OURS, _PEERS, _LIMIT = "#c8502d", "#8fa3b3", "#333333"
_HEIGHT = 0.72

Reports = Mapping[str, Report]


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar: a label, and the measured row."""

    label: str
    row: Row


def draw_summary(reports: Reports, folder: Path) -> list[str]:
    """Write ``summary.png`` with all pictures whose workloads were measured; return a caption for each of them."""
    drawn = [(draw, caption) for needed, draw, caption in _PICTURES if needed <= reports.keys()]
    if not drawn:
        return []
    figure = Figure(figsize=(3.7 * len(drawn), 3.5), layout="constrained")
    for axis, (draw, _) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        draw(axis, reports)
    figure.savefig(folder / "summary.png", dpi=150)
    return [caption for _, caption in drawn]


def _found(report: Report, metric: str, labels: Mapping[str, str]) -> list[Bar]:
    """Return the rows of ``metric`` for the systems in ``labels``, in this order."""
    rows = {one.system: one for one in report.results if one.metric == metric}
    return [Bar(label, rows[system]) for system, label in labels.items() if system in rows]


def _stall(axis: Axes, reports: Reports) -> None:
    labels = {
        "asymcheck immediate": "asymcheck",
        "torch DCP async staged": "DCP async, staged",
        "torch DCP async thread": "DCP async, thread",
        "torch DCP async process": "DCP async, process",
        "torchsnapshot async": "torchsnapshot async",
        "torch DCP sync": "DCP sync",
        "torch.save sync": "torch.save",
    }
    _bars(axis, _found(reports["stall"], "visible stall, every 10", labels), 1, "ms")
    axis.set_title("The training waits for a checkpoint", fontsize=10)


def _drive(axis: Axes, reports: Reports) -> None:
    saved = {
        "asymcheck new": "asymcheck",
        "safetensors new": "safetensors",
        "torch DCP new": "torch DCP",
        "torch.save new": "torch.save",
        "torchsnapshot new": "torchsnapshot",
    }
    restored = {
        "asymcheck load into": "asymcheck",
        "torch.load mmap into": "torch.load",
        "torch DCP into": "torch DCP",
        "safetensors into": "safetensors",
        "torchsnapshot into": "torchsnapshot",
    }
    limits = [
        next(one for one in reports["durable"].results if (one.system, one.unit) == ("raw new", "s")),
        next(one for one in reports["restore"].results if (one.system, one.unit) == ("raw read", "s")),
    ]
    saves = _found(reports["durable"], "time to durable", saved)
    restores = _found(reports["restore"], "time to restore", restored)
    _bars(axis, [*saves, *restores], 1, "s", gap=len(saves))
    ends = [-0.6, len(saves) - 0.4, len(saves) + 0.4, len(saves) + len(restores) + 0.6]
    for limit, top, bottom in zip(limits, ends[::2], ends[1::2], strict=True):
        axis.plot([limit.median] * 2, [top, bottom], color=_LIMIT, linestyle="--", linewidth=1.2)
    axis.annotate("raw write, raw read", (limits[0].median, len(saves)), fontsize=7.5, va="center", ha="left")
    for name, end in (("save", -0.4), ("restore", len(saves) + 0.6)):
        axis.annotate(
            name, (1, end), xycoords=("axes fraction", "data"), fontsize=9, style="italic", ha="right", va="top"
        )
    axis.set_title("Durable save, and restore", fontsize=10)


def _bytes(axis: Axes, reports: Reports) -> None:
    kinds = {"lora": "LoRA", "fp32": "float32", "mixed": "mixed", "fine-tune": "fine-tuning"}
    bars = [
        Bar(f"{kind}, {system}", bar.row)
        for key, kind in kinds.items()
        for system in ("asymcheck", "torch.save")
        for bar in _found(reports["bytes"], f"checkpoints, 100 of {key}", {system: system})
    ]
    _bars(axis, bars, 1e-3, "GB")
    axis.set_title("100 checkpoints of a small GPT-2", fontsize=10)


_PICTURES: Sequence[tuple[set[str], Callable[[Axes, Reports], None], str]] = (
    (
        {"stall"},
        _stall,
        "Left: time for which a checkpoint of GPT-2 with AdamW (1.5 GB) stops the training, every 10 steps.",
    ),
    (
        {"durable", "restore"},
        _drive,
        (
            "Middle: time until it is durable (above) or restored into the model (below). Dashed: a raw write or read "
            "with 4 requests of 8 MiB in flight, for comparison. asymcheck has up to 8 requests of 4 MiB in flight, so "
            "it can be faster."
        ),
    ),
    (
        {"bytes"},
        _bytes,
        "Right: bytes of 100 checkpoints. Deduplication saves bytes where tensors do not change.",
    ),
)


def _bars(axis: Axes, bars: Sequence[Bar], scale: float, unit: str, gap: int = 0) -> None:
    """Draw bars from above to below, with whiskers from minimum to maximum, and space after ``gap`` bars."""
    positions = [number + (1 if gap and number >= gap else 0) for number in range(len(bars))]
    rows = [bar.row for bar in bars]
    values = [row.median * scale for row in rows]
    whiskers = [[(row.median - row.min) * scale for row in rows], [(row.max - row.median) * scale for row in rows]]
    colors = [_OURS if row.system.startswith("asymcheck") else _PEERS for row in rows]
    error_style = {"elinewidth": 0.9, "capsize": 2, "ecolor": "#222222"}
    axis.barh(positions, values, xerr=whiskers, color=colors, height=_HEIGHT, error_kw=error_style)
    axis.set_yticks(positions, [bar.label for bar in bars], fontsize=8.5)
    axis.invert_yaxis()
    axis.set_xlim(0, max(row.max * scale for row in rows) * 1.2)
    for position, row in zip(positions, rows, strict=True):
        text = rounded(row.median * scale)
        axis.annotate(text, (row.max * scale, position), (5, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_xlabel(f"{unit}, less is better", fontsize=8.5)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
