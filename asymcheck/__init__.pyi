# The public names, and where they are: type checkers read this, and the package itself, when one is asked for.

from . import errors, events
from .checkpointer import Checkpointer
from .config import CaptureConfig, RemoteConfig, StoreConfig, __version__
from .errors import (
    AbandonedCheckpointsWarning,
    CaptureWarning,
    LostCheckpointWarning,
    PruneWarning,
    RemoteCopyWarning,
    SilentDivergenceWarning,
    SkippedCheckpointWarning,
    StaleStateWarning,
    StepOrderWarning,
    UnreachableRemoteWarning,
)
from .migration.background import Pushing
from .migration.transfer_stats import Moved, PushStatistics
from .partition.rng import RngState
from .partition.shards import TensorShard
from .pipeline.adopt import Adopted
from .pipeline.background import Statistics
from .pipeline.capture import CheckpointReport
from .pipeline.collect import Collected, CollectedRing
from .policies.advice import CodecFacts, DriveFacts, Facts
from .policies.interval import AutoInterval, ChosenInterval
from .policies.pushing import Push
from .policies.retention import Retention, Verdict
from .pruning import Pruned
from .ranks import Ranks
from .recovery.accounting import Accounting, CheckpointBytes, RoleBytes
from .recovery.difference import Difference, TensorChange, TensorNorms, ValueChange
from .recovery.history import History, HistoryEntry, Opening
from .recovery.inventory import StoredPartition, StoredTensor, StoredValue
from .recovery.rebuild import Rebuilt
from .recovery.repair import Repair, Repaired, Unrepaired
from .store import Store
from .tiers.dram_ring import RingCapture, RingFile
from .tracing import Trace, trace
from .types import Checkpoint, Part, Restored, Stateful, Usage
from .verify import Finding, Severity

__all__ = [
    "AbandonedCheckpointsWarning",
    "Accounting",
    "Adopted",
    "AutoInterval",
    "CaptureConfig",
    "CaptureWarning",
    "Checkpoint",
    "CheckpointBytes",
    "CheckpointReport",
    "Checkpointer",
    "ChosenInterval",
    "CodecFacts",
    "Collected",
    "CollectedRing",
    "Difference",
    "DriveFacts",
    "Facts",
    "Finding",
    "History",
    "HistoryEntry",
    "LostCheckpointWarning",
    "Moved",
    "Opening",
    "Part",
    "PruneWarning",
    "Pruned",
    "Push",
    "PushStatistics",
    "Pushing",
    "Ranks",
    "Rebuilt",
    "RemoteConfig",
    "RemoteCopyWarning",
    "Repair",
    "Repaired",
    "Restored",
    "Retention",
    "RingCapture",
    "RingFile",
    "RngState",
    "RoleBytes",
    "Severity",
    "SilentDivergenceWarning",
    "SkippedCheckpointWarning",
    "StaleStateWarning",
    "Stateful",
    "Statistics",
    "StepOrderWarning",
    "Store",
    "StoreConfig",
    "StoredPartition",
    "StoredTensor",
    "StoredValue",
    "TensorChange",
    "TensorNorms",
    "TensorShard",
    "Trace",
    "UnreachableRemoteWarning",
    "Unrepaired",
    "Usage",
    "ValueChange",
    "Verdict",
    "__version__",
    "errors",
    "events",
    "trace",
]
