"""asymcheck: a tiered, content-addressed checkpoint store for training in PyTorch."""

from asymcheck import errors, events
from asymcheck.checkpointer import Checkpointer
from asymcheck.config import StoreConfig, __version__
from asymcheck.errors import AbandonedCheckpointsWarning, SkippedCheckpointWarning, StepOrderWarning
from asymcheck.partition.rng import RngState
from asymcheck.pipeline.collect import Collected
from asymcheck.recovery.inventory import StoredPartition, StoredTensor
from asymcheck.recovery.rebuild import Rebuilt
from asymcheck.recovery.repaired import Repair, Repaired, Unrepaired
from asymcheck.store import Store
from asymcheck.types import Checkpoint, Restored, Stateful, Usage
from asymcheck.verify import Finding, Severity

__all__ = [
    "AbandonedCheckpointsWarning",
    "Checkpoint",
    "Checkpointer",
    "Collected",
    "Finding",
    "Rebuilt",
    "Repair",
    "Repaired",
    "Restored",
    "RngState",
    "Severity",
    "SkippedCheckpointWarning",
    "Stateful",
    "StepOrderWarning",
    "Store",
    "StoreConfig",
    "StoredPartition",
    "StoredTensor",
    "Unrepaired",
    "Usage",
    "__version__",
    "errors",
    "events",
]
