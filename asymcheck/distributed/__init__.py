"""The ranks of one training, and how they agree: through a key-value store, never by a collective of the training."""

from asymcheck.distributed.coordinator import Session
from asymcheck.distributed.kv_store import KeyStore
from asymcheck.distributed.ranks import Ranks

__all__ = ["KeyStore", "Ranks", "Session"]
