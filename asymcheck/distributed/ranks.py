"""The ranks of one training."""

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
    """The ranks that save one state together, and the key-value store through which they agree.

    It carries a few short values a save. Nothing of the training's process groups is used, so saving never waits for a
    collective of the training, and no collective ever waits for saving.
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
        """Say who this process is, the same way on each rank.

        Args:
            rank: of this process, from 0.
            world_size: how many ranks save together.
            store: a ``torch.distributed.TCPStore``, ``FileStore`` or ``HashStore`` that all of them have.
            timeout_s: how long a rank that is ready waits for the others, in seconds: longer than one of them may take
                to write its part of a checkpoint, or to read it.
            local_size: how many of the ranks share the memory of this machine; all with its store when that
                is not known.
            node: the name of this machine, whose ranks save into one store; the host name by default.

        Raises:
            InvalidInputError
        """
        numbers = [number for number in (rank, world_size, local_size) if number is not None]
        if any(type(number) is not int for number in numbers) or not 0 <= rank < world_size <= WORLD_SIZE_MAX:
            raise InvalidInputError(
                f"rank {rank!r} of {world_size!r}: give integers, the rank from 0 to the world size less 1"
            )
        if not isinstance(store, KeyStore):
            raise InvalidInputError(f"store {store!r:.100}: give a torch.distributed.Store, such as a TCPStore")
        try:
            is_time = timeout_s > 0
        except TypeError:
            is_time = False
        if not is_time:
            raise InvalidInputError(f"timeout_s={timeout_s!r}: give seconds, more than 0")
        self.rank = rank
        """The number of this rank, from 0."""
        self.world_size = world_size
        """The number of ranks."""
        self.timeout_s = float(timeout_s)
        """Seconds that a rank waits for the others."""
        self.local_size = max(1, min(world_size if local_size is None else local_size, world_size))
        """The number of ranks on this machine."""
        if node is not None and (type(node) is not str or not node):
            raise InvalidInputError(f"node={node!r:.100}: give a name")
        self.node = node or socket.gethostname()
        """The name of this machine."""
        self._store = store

    def __repr__(self) -> str:
        """Name the rank."""
        return f"<asymcheck.Ranks {self.rank} of {self.world_size}>"

    @classmethod
    def from_torch(cls, *, timeout_s: float = _TIMEOUT_S, node: str | None = None) -> Ranks:
        """Return the ranks of ``torch.distributed``, with the store by which their processes found each other.

        ``node`` names this machine; see :class:`Ranks`.

        Raises:
            InvalidInputError: ``torch.distributed`` is not initialised.
        """
        if not is_initialised():
            raise InvalidInputError("torch.distributed is not initialised: call init_process_group() first")
        from torch.distributed.distributed_c10d import (  # noqa: PLC0415 - only there where torch was built with it
            PrefixStore,
            _get_default_store,
        )

        store = PrefixStore(_PREFIX, _get_default_store())
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        local_size = int(local) if local.isdecimal() else None
        return cls(dist.get_rank(), dist.get_world_size(), store, timeout_s=timeout_s, local_size=local_size, node=node)

    def connect(self) -> KeyReader:
        """Return a connection to the store, for one thread."""
        return KeyReader(self._store)


def is_initialised() -> bool:
    """Tell whether this process is one of several of ``torch.distributed``."""
    return bool(dist.is_available() and dist.is_initialized())


RanksGiven: TypeAlias = Ranks | Callable[[], Ranks] | Literal["auto"] | None
"""Ranks that save together, as users pass them. A function is called late, after ``torch.distributed`` is set up."""


def find_ranks(given: object) -> Ranks | None:
    """Return the ranks that save together; None where one process saves alone.

    ``"auto"`` means those of ``torch.distributed``, if it is initialised.

    Raises:
        InvalidInputError: ``given`` is none of :data:`RanksGiven`.
    """
    ranks = given() if callable(given) else given
    if isinstance(ranks, str) and ranks == "auto":
        ranks = Ranks.from_torch() if is_initialised() else None
    if ranks is not None and not isinstance(ranks, Ranks):
        raise InvalidInputError(f"ranks={given!r:.100}: give 'auto', asymcheck.Ranks, what returns one, or None")
    return None if ranks is None or ranks.world_size == 1 else ranks
