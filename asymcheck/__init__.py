"""asymcheck: a tiered, content-addressed checkpoint store for training in PyTorch."""

from asymcheck import errors, events
from asymcheck.checkpointer import Checkpointer
from asymcheck.config import CaptureConfig, StoreConfig, __version__
from asymcheck.errors import (
    AbandonedCheckpointsWarning,
    CaptureWarning,
    LostCheckpointWarning,
    SkippedCheckpointWarning,
    StaleStateWarning,
    StepOrderWarning,
)
from asymcheck.partition.rng import RngState
from asymcheck.pipeline.adopt import Adopted
from asymcheck.pipeline.background import Statistics
from asymcheck.pipeline.collect import Collected
from asymcheck.recovery.accounting import Accounting, CheckpointBytes, RoleBytes
from asymcheck.recovery.difference import Difference, TensorChange, ValueChange
from asymcheck.recovery.history import History, HistoryEntry, Opening
from asymcheck.recovery.inventory import StoredPartition, StoredTensor
from asymcheck.recovery.norms import TensorNorms
from asymcheck.recovery.rebuild import Rebuilt
from asymcheck.recovery.repaired import Repair, Repaired, Unrepaired
from asymcheck.store import Store
from asymcheck.types import Checkpoint, Restored, Stateful, Usage
from asymcheck.verify import Finding, Severity

__all__ = [
    "AbandonedCheckpointsWarning",
    "Accounting",
    "Adopted",
    "CaptureConfig",
    "CaptureWarning",
    "Checkpoint",
    "CheckpointBytes",
    "Checkpointer",
    "Collected",
    "Difference",
    "Finding",
    "History",
    "HistoryEntry",
    "LostCheckpointWarning",
    "Opening",
    "Rebuilt",
    "Repair",
    "Repaired",
    "Restored",
    "RngState",
    "RoleBytes",
    "Severity",
    "SkippedCheckpointWarning",
    "StaleStateWarning",
    "Stateful",
    "Statistics",
    "StepOrderWarning",
    "Store",
    "StoreConfig",
    "StoredPartition",
    "StoredTensor",
    "TensorChange",
    "TensorNorms",
    "Unrepaired",
    "Usage",
    "ValueChange",
    "__version__",
    "errors",
    "events",
]
