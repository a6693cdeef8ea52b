"""Draws docs/tiers.svg: the four tiers, what each survives, and what of them exists.

``python -m tools.draw_tiers [FILE]``; the ending of FILE decides the format. Needs matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

TARGET = Path(__file__).parents[1] / "docs" / "tiers.svg"
_TIERS = (
    ("GPU staging", "copies on the device", "what the next optimizer\nstep would change", "nothing", False),
    ("DRAM ring", "a file in /dev/shm", "frames on their way down,\nand the newest checkpoint", "the process", True),
    ("NVMe", "a directory of a local drive", "packs and manifests,\nan LMDB catalog beside", "the node's reboot", True),
    ("HDFS", "the cluster's file system", "the same packs\nand manifests", "the loss of the node", False),
)
_BUILT, _INK, _PALE, _PAPER, _LATER = "#1f6f54", "#1d2733", "#6b7785", "#ffffff", "#9aa5b1"
_WIDTH, _HEIGHT, _GAP = 2.35, 2.3, 0.55


def draw(path: Path) -> None:
    """Write the picture to ``path``."""
    # Letters as outlines, for not everybody has the font. Ids and date stay the same: drawn again, so does the file.
    mpl.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "tiers", "font.family": "DejaVu Sans"})
    whole = len(_TIERS) * _WIDTH + (len(_TIERS) - 1) * _GAP
    figure = Figure(figsize=(whole + 0.4, 4.3), facecolor=_PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.2, whole + 0.2)
    axes.set_ylim(-1.25, 3.05)
    axes.axis("off")
    for number, tier in enumerate(_TIERS):
        left = number * (_WIDTH + _GAP)
        _draw_tier(axes, left, *tier)
        if number:
            built = tier[-1] and _TIERS[number - 1][-1]
            ends = (left - _GAP + 0.06, _HEIGHT / 2), (left - 0.06, _HEIGHT / 2)
            _arrow(axes, *ends, _BUILT if built else _LATER, "-" if built else "--")
    _draw_present_path(axes)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, dpi=110)


def _draw_tier(axes: Axes, left: float, name: str, where: str, what: str, survives: str, built: bool) -> None:  # noqa: FBT001 - a row of the table above
    edge = _BUILT if built else _LATER
    style = "round,pad=0,rounding_size=0.12"
    box = FancyBboxPatch((left, 0), _WIDTH, _HEIGHT, boxstyle=style, lw=2.2 if built else 1.3, ec=edge)
    box.set_facecolor("#e9f5f0" if built else "#f6f7f9")
    box.set_linestyle("-" if built else "--")
    axes.add_patch(box)
    ink, middle = (_INK if built else _PALE), left + _WIDTH / 2
    axes.text(middle, _HEIGHT - 0.33, name, ha="center", va="center", fontsize=14, fontweight="bold", color=ink)
    axes.text(middle, _HEIGHT - 0.68, where, ha="center", va="center", fontsize=9.5, color=ink)
    axes.text(middle, _HEIGHT - 1.2, what, ha="center", va="center", fontsize=9.5, color=ink, linespacing=1.4)
    axes.text(middle, 0.42, f"survives {survives}", ha="center", va="center", fontsize=9.5, style="italic", color=ink)
    label = "built (0.1.0)" if built else "not yet"
    axes.text(
        middle,
        _HEIGHT + 0.26,
        label,
        ha="center",
        va="center",
        fontsize=9.5,
        fontweight="bold" if built else "normal",
        color=edge if built else _PALE,
    )


def _draw_present_path(axes: Axes) -> None:
    """Draw what 0.1.0 does: the loop is captured into the ring, and saved from there."""
    left, bottom, width = 0.0, -1.05, 2.35
    style = "round,pad=0,rounding_size=0.12"
    box = FancyBboxPatch((left, bottom), width, 0.6, boxstyle=style, lw=1.6, ec=_INK, fc=_PAPER)
    axes.add_patch(box)
    axes.text(left + width / 2, bottom + 0.3, "the training loop's state", ha="center", va="center", fontsize=11)
    height = bottom + 0.3
    ring = _WIDTH + _GAP + _WIDTH / 2
    axes.plot([left + width + 0.08, ring], [height, height], color=_BUILT, lw=2.2, solid_capstyle="butt")
    _arrow(axes, (ring, height - 0.012), (ring, -0.06), _BUILT, "-", 2.2)
    text = (
        "0.1.0: step() captures into the ring, beside the training;\n"
        "from there to the drive. load() reads from the drive"
    )
    axes.text(ring + 0.18, height + 0.02, text, ha="left", va="center", fontsize=9.5, color=_BUILT, linespacing=1.4)


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, line: str, lw: float = 1.6
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=14, color=color, lw=lw, ls=line, shrinkA=0, shrinkB=0
        )
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
