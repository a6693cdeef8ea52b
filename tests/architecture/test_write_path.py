"""Test that the write path is short: docs/architecture.md lists the modules between ``step()`` and the drive."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import asymcheck
from asymcheck import CaptureConfig, Checkpointer, Store

PACKAGE = str(Path(asymcheck.__file__).parent) + "/"
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"

MOST = 20
"""Maximum number of modules between ``step()`` and the drive."""

SYSTEM_CALLS = frozenset({"pwritev", "pwrite", "fsync", "fdatasync", "rename", "put"})
"""Functions of ``os`` that write, sync and rename, and the function that enters a value in the catalog."""
CALLS = frozenset(
    {
        ("state/leaves.py", "copy_partition"),
        ("state/leaves.py", "copy_bytes"),
        ("format/digest.py", "digest"),
    }
)
"""Functions of the package that copy and digest the bytes of partitions."""


class WritePath:
    """The modules that were on the call stack when bytes moved."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.moves: set[str] = set()

    def trace(self, train: Callable[[], object]) -> None:
        """Trace this thread and all threads that start while ``train`` runs."""
        sys.setprofile(self._saw)
        threading.setprofile(self._saw)
        try:
            train()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # as documented

    def _saw(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            name = frame.f_code.co_name
            moves = (_module(frame), name) in CALLS
        else:
            name = getattr(argument, "__name__", "")
            moves = event == "c_call" and name in SYSTEM_CALLS
        if not moves:
            return
        above: FrameType | None = frame
        modules = set()
        while above is not None:
            modules.add(_module(above))
            above = above.f_back
        # Ignore writes of other code, such as the output of the tests.
        if modules != {None}:
            self.moves.add(name)
            self.modules |= {module for module in modules if module is not None}


def _module(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else None


def _listed() -> set[str]:
    """Return the modules in the table of the last section."""
    section = PAGE.read_text("utf-8").split("## Modules from `step()` to the drive")[1]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)}


@pytest.fixture
def write_path(tmp_path: Path) -> WritePath:
    """Return the traced modules of several background checkpoints."""
    way = WritePath()
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        state: dict[str, object] = {"model": model, "optimizer": optimizer, "rng": asymcheck.RngState()}
        capture = CaptureConfig(ring_folder=str(tmp_path))
        with (
            Store.open(tmp_path / "store", create=True) as store,
            Checkpointer(store, state, capture=capture, every=1, keep=None) as checkpointer,
        ):
            for step in range(4):
                model(torch.rand(4, 256)).sum().backward()
                optimizer.step()
                # Only the last checkpoint counts, because the first creates the run, the ring and the threads.
                way.modules.clear()
                checkpointer.step(step)
                model(torch.rand(4, 256)).sum().backward()
                optimizer.step()
                checkpointer.wait()

    way.trace(train)
    return way


def test_the_write_path_has_the_modules_that_the_page_lists(write_path: WritePath) -> None:
    """Test that each module on the path is listed, because an additional module is a decision."""
    assert write_path.moves == SYSTEM_CALLS | {name for _, name in CALLS}
    assert write_path.modules - _listed() == set()
    # Threads copy partitions in any order, so a run may not use all modules.
    assert {"capture/engine.py", "commit/transaction.py", "storage/nvme/pack_writer.py"} <= write_path.modules


def test_the_page_lists_few_modules_and_none_that_is_gone() -> None:
    """Test the number on the page, and that every listed module exists."""
    listed = _listed()
    assert len(listed) <= MOST
    assert f"These {len(listed)} modules are on the call stack" in PAGE.read_text("utf-8")
    assert [name for name in sorted(listed) if not Path(PACKAGE, name).exists()] == []
