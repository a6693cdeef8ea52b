"""Ranks that save one checkpoint together."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch.distributed as dist

from asymcheck.distributed.kv_store import KeyReader, KeyStore
from asymcheck.errors import InvalidInputError
from asymcheck.format.registry import WORLD_SIZE_MAX

_TIMEOUT_S = 600.0
_PREFIX = "asymcheck"


class Ranks:
    """Ranks that save one checkpoint together, and the key-value store through which they coordinate.

    The store carries a few short values per save. No process group of the training is used, so saves never wait for
    collectives of the training, and collectives never wait for saves.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: KeyStore,
        *,
        timeout_s: float = _TIMEOUT_S,
        local_size: int | None = None,
        node: str | None = None,
    ) -> None:
        """Describe this rank. All arguments except ``rank``, ``local_size`` and ``node`` are equal on all ranks.

        Args:
            rank: rank of this process, from 0.
            world_size: number of ranks.
            store: a ``torch.distributed.TCPStore``, ``FileStore`` or ``HashStore`` that all ranks share.
            timeout_s: seconds that a rank waits for the others. A rank must be able to write or read its shard within
                this time.
            local_size: number of ranks that share the memory of this machine; by default, all ranks that save into
                the same checkpoint store.
            node: name of this machine, whose ranks save into one store; by default, the host name.

        Raises:
            InvalidInputError: an argument is invalid.
        """
        numbers = [rank, world_size, *(() if local_size is None else (local_size,))]
        if any(type(number) is not int for number in numbers) or not 0 <= rank < world_size <= WORLD_SIZE_MAX:
            raise InvalidInputError(
                f"rank {rank!r} of {world_size!r}: give integers, with a rank from 0 to the world size minus 1"
            )
        if not isinstance(store, KeyStore):
            raise InvalidInputError(f"store {store!r:.100}: give a torch.distributed.Store, such as a TCPStore")
        try:
            is_time = timeout_s > 0
        except TypeError:
            is_time = False
        if not is_time:
            raise InvalidInputError(f"timeout_s={timeout_s!r}: give a positive number of seconds")
        self.rank = rank
        """Number of this rank, from 0."""
        self.world_size = world_size
        """Number of ranks."""
        self.timeout_s = float(timeout_s)
        """Seconds that a rank waits for the others."""
        self.local_size = max(1, min(world_size if local_size is None else local_size, world_size))
        """Number of ranks on this machine."""
        if node is not None and (type(node) is not str or not node):
            raise InvalidInputError(f"node={node!r:.100}: give a non-empty string")
        self.node = node or socket.gethostname()
        """Name of this machine."""
        self._store = store

    def __repr__(self) -> str:
        return f"<asymcheck.Ranks {self.rank} of {self.world_size}>"

    @classmethod
    def from_torch(cls, *, timeout_s: float = _TIMEOUT_S, node: str | None = None) -> Ranks:
        """Return the ranks of ``torch.distributed``, with its default key-value store.

        Raises:
            InvalidInputError: ``torch.distributed`` is not initialised.
        """
        if not is_initialised():
            raise InvalidInputError("torch.distributed is not initialised: call init_process_group() first")
        from torch.distributed.distributed_c10d import (  # noqa: PLC0415 - missing if torch was built without it
            PrefixStore,
            _get_default_store,
        )

        store = PrefixStore(_PREFIX, _get_default_store())
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        local_size = int(local) if local.isdecimal() else None
        return cls(dist.get_rank(), dist.get_world_size(), store, timeout_s=timeout_s, local_size=local_size, node=node)

    def connect(self) -> KeyReader:
        """Return a connection to the store, for one thread."""
        return KeyReader(self._store, self.timeout_s)


def is_initialised() -> bool:
    """Tell whether ``torch.distributed`` is initialised."""
    return bool(dist.is_available() and dist.is_initialized())


RanksGiven: TypeAlias = Ranks | Callable[[], Ranks] | Literal["auto"] | None
"""Values of the ``ranks`` argument. A function is called after ``torch.distributed`` is set up."""


def find_ranks(given: object) -> Ranks | None:
    """Return the ranks that save together; None if this process saves alone.

    ``"auto"`` means the ranks of ``torch.distributed``, if it is initialised.

    Raises:
        InvalidInputError: ``given`` is none of :data:`RanksGiven`.
    """
    ranks = given() if callable(given) else given
    if isinstance(ranks, str) and ranks == "auto":
        ranks = Ranks.from_torch() if is_initialised() else None
    if ranks is not None and not isinstance(ranks, Ranks):
        raise InvalidInputError(
            f"ranks={given!r:.100}: give 'auto', asymcheck.Ranks, a function that returns one, or None"
        )
    return None if ranks is None or ranks.world_size == 1 else ranks
