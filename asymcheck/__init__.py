"""asymcheck: a tiered, content-addressed checkpoint store for training in PyTorch."""

from asymcheck import errors, events
from asymcheck.checkpointer import Checkpointer
from asymcheck.config import CaptureConfig, RemoteConfig, StoreConfig, __version__
from asymcheck.errors import (
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
from asymcheck.migration.pushing import Pushing
from asymcheck.migration.statistics import PushStatistics
from asymcheck.migration.tally import Moved
from asymcheck.partition.rng import RngState
from asymcheck.partition.shards import TensorShard
from asymcheck.pipeline.adopt import Adopted
from asymcheck.pipeline.background import Statistics
from asymcheck.pipeline.collect import Collected
from asymcheck.pipeline.collect_rings import CollectedRing
from asymcheck.pipeline.report import CheckpointReport
from asymcheck.policies.facts import CodecFacts, DriveFacts, Facts
from asymcheck.policies.interval import AutoInterval, ChosenInterval
from asymcheck.policies.pushing import Push
from asymcheck.policies.retention import Retention, Verdict
from asymcheck.pruning import Pruned
from asymcheck.ranks import Ranks
from asymcheck.recovery.accounting import Accounting, CheckpointBytes, RoleBytes
from asymcheck.recovery.difference import Difference, TensorChange, ValueChange
from asymcheck.recovery.history import History, HistoryEntry, Opening
from asymcheck.recovery.inventory import StoredPartition, StoredTensor, StoredValue
from asymcheck.recovery.norms import TensorNorms
from asymcheck.recovery.rebuild import Rebuilt
from asymcheck.recovery.repaired import Repair, Repaired, Unrepaired
from asymcheck.store import Store
from asymcheck.tiers.dram_ring import RingCapture, RingFile
from asymcheck.tracing import Trace, trace
from asymcheck.types import Checkpoint, Part, Restored, Stateful, Usage
from asymcheck.verify import Finding, Severity

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
