"""The ranks of one training, and how they agree: through a key-value store, never by a collective of the training."""

from asymcheck.ranks.keys import KeyStore
from asymcheck.ranks.ranks import Ranks
from asymcheck.ranks.session import Session

__all__ = ["KeyStore", "Ranks", "Session"]
