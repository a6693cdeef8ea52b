# The public names, and the modules that define them. Type checkers read this file, and `asymcheck/__init__.py` imports
# each name from it at first use.

from . import errors, events
from .checkpointer import Checkpointer
from .config import CaptureConfig, Grace, RemoteConfig, StoreConfig, __version__
from .distributed import Ranks
from .merging.merge import merge
from .policies.interval import AutoInterval
from .policies.push_selection import Push
from .policies.retention import Retention
from .publish.release import Publish, Publisher
from .publish.subscriber import Subscriber
from .state.rng import RngState
from .state.shards import TensorShard
from .store import Store
from .tracing import trace
from .types import Checkpoint

__all__ = [
    "AutoInterval",
    "CaptureConfig",
    "Checkpoint",
    "Checkpointer",
    "Grace",
    "Publish",
    "Publisher",
    "Push",
    "Ranks",
    "RemoteConfig",
    "Retention",
    "RngState",
    "Store",
    "StoreConfig",
    "Subscriber",
    "TensorShard",
    "__version__",
    "errors",
    "events",
    "merge",
    "trace",
]
