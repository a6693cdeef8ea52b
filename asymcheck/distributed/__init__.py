"""Agreement between the ranks of a training, through a key-value store instead of collectives."""

from asymcheck.distributed.coordinator import Session
from asymcheck.distributed.kv_store import KeyStore
from asymcheck.distributed.ranks import Ranks

__all__ = ["KeyStore", "Ranks", "Session"]
