"""asymcheck: a tiered, content-addressed checkpoint store for training in PyTorch."""

from asymcheck import errors, events
from asymcheck.checkpointer import Checkpointer
from asymcheck.config import StoreConfig, __version__
from asymcheck.partition.rng import RngState
from asymcheck.pipeline.collect import Collected
from asymcheck.store import Checkpoint, Restored, SkippedCheckpointWarning, StepOrderWarning, Store
from asymcheck.types import Stateful
from asymcheck.verify import Finding, Severity

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "Collected",
    "Finding",
    "Restored",
    "RngState",
    "Severity",
    "SkippedCheckpointWarning",
    "Stateful",
    "StepOrderWarning",
    "Store",
    "StoreConfig",
    "__version__",
    "errors",
    "events",
]
