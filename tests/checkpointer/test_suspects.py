"""Test that checkpoints that may be torn are abandoned, even if the first attempt fails."""

from __future__ import annotations

import warnings

import pytest

from asymcheck import Checkpointer, Store
from asymcheck.config import CaptureConfig
from asymcheck.errors import AbandonedCheckpointsWarning, OutOfSpaceError
from tests.checkpointer.disks import Disk
from tests.checkpointer.loops import Loop, linear_loop


def save_suspect(checkpointer: Checkpointer, store: Store, loop: Loop) -> None:
    """Save step 0, and raise the suspicion that its checkpoint is torn."""
    loop.iterate(0)
    checkpointer.step(0)
    checkpointer.wait()
    (checkpoint,) = store.checkpoints()
    assert checkpointer._background is not None
    checkpointer._background.detector._suspects.add(checkpoint.save_id)


def test_suspects_are_abandoned_once_the_drive_has_space(store: Store, disk: Disk, config: CaptureConfig) -> None:
    """Test that a full drive delays the abandonment, and does not prevent it."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        save_suspect(checkpointer, store, loop)
        loop.iterate(1)
        disk.full = "heads"
        with pytest.raises(OutOfSpaceError):
            checkpointer.step(1)
        disk.full = None
        with pytest.warns(AbandonedCheckpointsWarning, match="steps 0 may be torn"):
            checkpointer.step(1)
    assert [(one.step, one.on_line) for one in store.checkpoints()] == [(0, False), (1, True)]


def test_checkpoints_after_suspects_are_on_the_line_if_warnings_are_errors(store: Store, config: CaptureConfig) -> None:
    """Test that later checkpoints belong to the new generation, although its warning was raised."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        save_suspect(checkpointer, store, loop)
        loop.iterate(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", AbandonedCheckpointsWarning)
            with pytest.raises(AbandonedCheckpointsWarning):
                checkpointer.step(1)
        loop.iterate(2)
        checkpointer.step(2)
    assert [(one.step, one.on_line) for one in store.checkpoints()] == [(0, False), (2, True)]
