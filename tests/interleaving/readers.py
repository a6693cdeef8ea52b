"""Reads of a store that other processes change: their results must be right, and intact checkpoints intact."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from asymcheck.errors import CheckpointNotFoundError, RecoveryError
from asymcheck.fsck.verify import UNCHECKED, Severity
from asymcheck.store import Store
from tests.crash.actions import Action
from tests.crash.states import fingerprint, make_state


@dataclasses.dataclass(frozen=True)
class Expected:
    """Checkpoints that a reader may find."""

    contents: Mapping[int, int]
    """Steps that are saved at some time, with the steps of their states."""
    kept: frozenset[int]
    """Steps that exist all the time."""
    gone: frozenset[int]
    """Steps that are deleted at some time."""


def read(store: Store, action: Action, expected: Expected) -> None:
    """Run ``["load", 1]``, ``["newest"]``, ``["list"]`` or ``["verify"]``."""
    word, *numbers = action
    READS[str(word)](store, expected, *(int(str(number)) for number in numbers))


def _load(store: Store, expected: Expected, step: int) -> None:
    try:
        restored = store.restore(step)
    except (CheckpointNotFoundError, RecoveryError):
        assert step not in expected.kept, f"step {step} is intact, and the reader rejects it"
        return
    assert restored.skipped == () or step not in expected.kept
    assert fingerprint(restored.state) == fingerprint(make_state(expected.contents[step])), "other bytes"


def _newest(store: Store, expected: Expected) -> None:
    restored = store.restore()
    step = restored.checkpoint.step
    assert step >= max(expected.kept, default=0), f"step {step} is not the newest"
    assert fingerprint(restored.state) == fingerprint(make_state(expected.contents[step])), "other bytes"
    for reason in restored.skipped:
        assert any(f"step {gone} " in reason for gone in expected.gone), f"skipped: {reason}"


def _list(store: Store, expected: Expected) -> None:
    steps = {checkpoint.step for checkpoint in store.checkpoints() if checkpoint.complete}
    assert expected.kept <= steps <= expected.contents.keys()


def _verify(store: Store, expected: Expected) -> None:
    for finding in store.verify():
        # Packs may be locked for long.
        if finding.severity is not Severity.HINT and finding.kind != UNCHECKED:
            lost = [text for text in finding.checkpoints if not any(f"step {gone} " in text for gone in expected.gone)]
            assert finding.checkpoints, f"{finding}"
            assert not lost, f"{finding}"


READS = {"load": _load, "newest": _newest, "list": _list, "verify": _verify}
