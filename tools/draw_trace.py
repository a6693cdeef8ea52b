"""Draw docs/trace.svg: one iteration of a real training, from its trace.

``python -m tools.draw_trace [FILE]``. The suffix of FILE selects the format. Needs matplotlib. The training runs on one
core, so that another core is free for the copies. Other load on the machine shows in the figure.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import asymcheck
from asymcheck.config import MIB
from asymcheck.events import timed

TARGET = Path(__file__).parents[1] / "docs" / "trace.svg"
_STEPS, _EVERY, _SETTLED = 33, 2, 6
_CONFIG = asymcheck.StoreConfig(deferred_bytes_max=4 * MIB)
"""Smaller partitions than usual, as the model is small."""
_WORDS, _WIDTH, _BLOCKS, _BATCH = 16384, 512, 10, 1024
_INK, _PAPER = "#1d2733", "#ffffff"
_COLORS = {
    "forward": "#cfe8dd",
    "backward": "#cddcf2",
    "optimizer": "#f3e3c3",
    "copy": "#1f6f54",
    "digest": "#b9a04a",
    "write": "#7a5ea8",
    "step": "#c0392b",
    "fence": "#c0392b",
}
_PHASES = ("forward", "backward", "optimizer")
_LANE_OF = {"step": 0, "fence": 0, "copy": 1, "digest": 2, "write": 3}
_LANES = ("training waits", "copies, by size", "digests", "writes")


def train(path: Path) -> None:
    """Train a small model with a checkpoint at every other step, and trace it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks = (torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU()) for _ in range(_BLOCKS))
    model = torch.nn.Sequential(torch.nn.Embedding(_WORDS, _WIDTH), *blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    with (
        tempfile.TemporaryDirectory() as scratch,
        asymcheck.Store.open(Path(scratch) / "store", config=_CONFIG, create=True) as store,
        asymcheck.trace(path),
        asymcheck.Checkpointer(store, state, every=_EVERY, keep=None) as checkpointer,
    ):
        for step in range(_STEPS):
            named: partial[dict[str, int]] = partial(dict, step=step - 1)
            with timed("forward", detail=named):
                loss = model(torch.randint(_WORDS, (_BATCH,))).square().mean()
            optimizer.zero_grad()
            with timed("backward", detail=named):
                loss.backward()
            with timed("optimizer", detail=named):
                optimizer.step()
            # Wait for each checkpoint, so that the figure shows only one.
            checkpointer.wait()
            checkpointer.step(step)


def check(records: list[dict[str, Any]]) -> None:
    """Raise an error unless every deferred partition was copied between ``step()`` and the optimizer step."""
    ends = {record["args"]["step"]: _end(record) for record in records if record.get("cat") == "fence"}
    begins = {record["args"]["step"]: record["ts"] for record in records if record.get("cat") == "step"}
    copies = [record for record in records if record.get("cat") == "copy"]
    assert len(copies) > _BLOCKS * _STEPS // _EVERY
    for copy in copies:
        assert begins[copy["args"]["step"]] <= copy["ts"] < _end(copy) <= ends[copy["args"]["step"]] + 0.01


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Write the figure of one iteration to ``path``."""
    mpl.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "trace", "font.family": "DejaVu Sans"})
    iteration = _least_disturbed(records)
    phases = [record for record in iteration if record["cat"] in _PHASES]
    start = next(record["ts"] for record in iteration if record["cat"] == "step")
    end = max(_end(record) for record in iteration if record["cat"] == "optimizer")
    figure = Figure(figsize=(12, 4.2), facecolor=_PAPER)
    axes = figure.add_axes((0.11, 0.14, 0.87, 0.68))
    for phase in phases:
        left, width = (phase["ts"] - start) / 1e3, phase["dur"] / 1e3
        axes.axvspan(left, left + width, color=_COLORS[phase["cat"]], lw=0)
        axes.text(left + width / 2, len(_LANES) + 0.12, phase["cat"], ha="center", fontsize=12, color=_INK)
    lines = sorted({record["tid"] for record in iteration if record["cat"] == "write"})
    largest = max(record["args"]["bytes"] for record in iteration if record["cat"] == "copy")
    for record in iteration:
        if record["cat"] in _LANE_OF:
            _bar(axes, record, start, largest, lines)
    margin = (end - start) / 1e3 * 0.01
    axes.set_xlim(-margin, (end - start) / 1e3 + margin)
    axes.set_ylim(0, len(_LANES))
    axes.set_yticks([len(_LANES) - 0.5 - lane for lane in range(len(_LANES))], _LANES, color=_INK)
    axes.set_xlabel("milliseconds since step()", color=_INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    names = {"step": "step() and fence", "copy": "copy of a partition", "digest": "digest", "write": "write"}
    patches = [Patch(color=_COLORS[kind], label=label) for kind, label in names.items()]
    figure.legend(handles=patches, loc="upper right", ncols=4, frameon=False, fontsize=9.5, labelcolor=_INK)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


def _least_disturbed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of the shortest iteration with a checkpoint."""
    spans: dict[int, float] = {}
    begun = {record["args"]["step"] for record in records if record.get("cat") == "step"}
    for phase in records:
        if phase.get("cat") in _PHASES and phase["args"]["step"] in begun and phase["args"]["step"] >= _SETTLED:
            spans[phase["args"]["step"]] = spans.get(phase["args"]["step"], 0.0) + phase["dur"]
    shown = min(spans, key=lambda step: spans[step])
    return [record for record in records if record["ph"] == "X" and record["args"].get("step") == shown]


def _bar(axes: Axes, record: dict[str, Any], start: float, largest: int, lines: list[int]) -> None:
    """Draw one interval in its lane. The height of a copy is its size, and each writer thread has its own line."""
    bottom, height = len(_LANES) - 1 - _LANE_OF[record["cat"]] + 0.25, 0.5
    if record["cat"] == "copy":
        bottom, height = bottom - 0.21, 0.9 * record["args"]["bytes"] / largest
    elif record["cat"] == "write":
        height /= len(lines)
        bottom += lines.index(record["tid"]) * height
    left, width = (record["ts"] - start) / 1e3, record["dur"] / 1e3
    axes.bar(left, height, width, bottom, align="edge", color=_COLORS[record["cat"]], lw=0)


def _end(record: dict[str, Any]) -> float:
    return float(record["ts"] + record["dur"])


def main(path: Path) -> None:
    """Train, check, draw."""
    with tempfile.TemporaryDirectory() as scratch:
        train(Path(scratch) / "trace.json")
        records = json.loads((Path(scratch) / "trace.json").read_text("utf-8"))
    check(records)
    draw(records, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
