"""Fixtures: a store on a disk that can be slow, failing or full, and a folder for rings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asymcheck import Store
from asymcheck.config import CaptureConfig
from tests.checkpointer.disks import Disk, open_on
from tests.checkpointer.loops import (
    folder_for_rings,
)


@pytest.fixture
def disk() -> Disk:
    """Return a disk with settings for faults."""
    return Disk()


@pytest.fixture
def store(disk: Disk, store_path: Path) -> Iterator[Store]:
    """Return a new store on this disk."""
    with open_on(disk, store_path) as opened:
        yield opened
        disk.full = None
        disk.opened.set()


@pytest.fixture
def config(tmp_path: Path) -> CaptureConfig:
    """Return a configuration with rings in a temporary folder."""
    return CaptureConfig(proof="full", ring_folder=str(folder_for_rings(tmp_path)))
