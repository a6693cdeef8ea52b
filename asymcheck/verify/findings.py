"""Findings: what a check found, as values."""

from __future__ import annotations

import dataclasses
import enum


class Severity(str, enum.Enum):
    """How much a finding matters."""

    ERROR = "error"
    """A checkpoint cannot be restored, or the newest cannot be known."""
    WARNING = "warning"
    """Something is damaged, or could not be checked, but no checkpoint is known to be lost."""
    HINT = "hint"
    """Something that collection will clear away, or that only who trains can judge."""


UNCHECKED = "unchecked-partitions"
"""Kind of the finding that names checkpoints whose partitions may be stored in packs that were locked."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is not as SPEC.md §9 says."""

    kind: str
    """Stable code, for instance ``damaged-frame``."""
    severity: Severity
    """How much it matters."""
    invariant: str
    """Number of the broken invariant in SPEC.md §9; empty when none is broken."""
    where: str
    """The file, and the place in it."""
    message: str
    """What is wrong."""
    checkpoints: tuple[str, ...] = ()
    """Checkpoints that cannot be restored because of it, or could not be checked, as ``<run> <checkpoint>``."""
    tensors: tuple[str, ...] = ()
    """Some of the tensors concerned."""
