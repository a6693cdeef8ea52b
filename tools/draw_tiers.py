"""Draw docs/tiers.svg: the four tiers, the failures that each survives, and the path of a state.

``python -m tools.draw_tiers [FILE]``. The suffix of FILE selects the format. Needs matplotlib.
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
    ("GPU staging", "copies on the device", "what the next optimizer\nstep would change", "nothing"),
    ("DRAM ring", "a file in /dev/shm", "frames on their way down,\nand the newest checkpoint", "the process"),
    ("NVMe", "a directory of a local drive", "packs and manifests,\nan LMDB catalog beside", "the node's reboot"),
    ("HDFS", "the cluster's file system", "the same packs\nand manifests", "the loss of the node"),
)
_GREEN, _INK, _PAPER = "#1f6f54", "#1d2733", "#ffffff"
_WIDTH, _HEIGHT, _GAP = 2.35, 2.3, 0.55


def draw(path: Path) -> None:
    """Write the figure to ``path``."""
    # Draw letters as outlines, because fonts differ between machines. Fixed ids and dates keep the file reproducible.
    mpl.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "tiers", "font.family": "DejaVu Sans"})
    total_width = len(_TIERS) * _WIDTH + (len(_TIERS) - 1) * _GAP
    figure = Figure(figsize=(total_width + 0.4, 3.75), facecolor=_PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.2, total_width + 0.2)
    axes.set_ylim(-1.25, 2.5)
    axes.axis("off")
    for number, tier in enumerate(_TIERS):
        left = number * (_WIDTH + _GAP)
        _draw_tier(axes, left, *tier)
        if number:
            _arrow(axes, (left - _GAP + 0.06, _HEIGHT / 2), (left - 0.06, _HEIGHT / 2))
    _draw_capture(axes)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, dpi=110)


def _draw_tier(axes: Axes, left: float, name: str, where: str, content: str, survives: str) -> None:
    style = "round,pad=0,rounding_size=0.12"
    box = FancyBboxPatch((left, 0), _WIDTH, _HEIGHT, boxstyle=style, lw=2.2, ec=_GREEN, fc="#e9f5f0")
    axes.add_patch(box)
    middle = left + _WIDTH / 2
    axes.text(middle, _HEIGHT - 0.33, name, ha="center", va="center", fontsize=14, fontweight="bold", color=_INK)
    axes.text(middle, _HEIGHT - 0.68, where, ha="center", va="center", fontsize=9.5, color=_INK)
    axes.text(middle, _HEIGHT - 1.2, content, ha="center", va="center", fontsize=9.5, color=_INK, linespacing=1.4)
    axes.text(middle, 0.42, f"survives {survives}", ha="center", va="center", fontsize=9.5, style="italic", color=_INK)


def _draw_capture(axes: Axes) -> None:
    """Draw the capture of a state: from the device through the staging buffer, and from host memory into the ring."""
    left, bottom, width = 0.0, -1.05, 2.35
    style = "round,pad=0,rounding_size=0.12"
    box = FancyBboxPatch((left, bottom), width, 0.6, boxstyle=style, lw=1.6, ec=_INK, fc=_PAPER)
    axes.add_patch(box)
    axes.text(left + width / 2, bottom + 0.3, "the training loop's state", ha="center", va="center", fontsize=11)
    height = bottom + 0.3
    ring = _WIDTH + _GAP + _WIDTH / 2
    _arrow(axes, (left + width / 2, bottom + 0.66), (left + width / 2, -0.06), 2.2)
    axes.plot([left + width + 0.08, ring], [height, height], color=_GREEN, lw=2.2, solid_capstyle="butt")
    _arrow(axes, (ring, height - 0.012), (ring, -0.06), 2.2)
    text = "step() captures beside the training: from a GPU by\nway of staging, from host memory into the ring"
    axes.text(ring + 0.18, height + 0.02, text, ha="left", va="center", fontsize=9.5, color=_GREEN, linespacing=1.4)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], lw: float = 1.6) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=_GREEN, lw=lw, shrinkA=0, shrinkB=0)
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
