"""Frames that are decoded from a base: how deep they may lie, and what is checked on the way (SPEC.md §12.5)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable

from asymcheck.codecs.decode import decode
from asymcheck.errors import (
    UNKNOWING,
    BaseDamagedError,
    DigestMismatchError,
    FormatError,
    RecoveryError,
    StorageError,
    UnsupportedFormatError,
)
from asymcheck.events import timed
from asymcheck.format import registry
from asymcheck.format.digest import digest as digest_of
from asymcheck.format.frame import FrameDescriptor
from asymcheck.types import Digest


@dataclasses.dataclass(frozen=True)
class Chain:
    """The frames from the partition that is wanted down to the one that is decoded now."""

    names: tuple[Digest, ...] = ()
    deltas: int = 0
    lost: set[tuple[Digest, int]] = dataclasses.field(default_factory=set, compare=False)
    """Bases that could not be had below so many deltas, on any way down from the same partition."""

    def below(self, frame: FrameDescriptor, where: str) -> Chain:
        """Return the chain for the base of ``frame``.

        Raises:
            BaseDamagedError: the frame is derived and somebody's base, the chain is too long, or leads back.
        """
        names = (*self.names, frame.digest)
        deltas = self.deltas + (frame.kind == registry.KIND_DELTA)
        if frame.kind == registry.KIND_DERIVED and self.names:
            raise BaseDamagedError(f"{where}: a derived partition is a base")
        if deltas > registry.DELTA_DEPTH_MAX:
            raise BaseDamagedError(f"{where}: a chain of more than {registry.DELTA_DEPTH_MAX} deltas")
        if frame.base_digest in names:
            raise BaseDamagedError(f"{where}: its chain of bases leads back to {frame.base_digest.hex()}")
        return Chain(names, deltas, self.lost if self.names else set())


_WANTED = Chain()

BaseReader = Callable[[Digest, Chain], memoryview]
"""Returns the plain bytes of a base, whose digest was checked, or raises what is wrong with it."""

FrameReader = Callable[[], tuple[FrameDescriptor, memoryview, str]]
"""Reads and checks one frame: its descriptor, its payload, and its name in errors."""


def base_reader(copies_of: Callable[[Digest], Iterable[FrameReader]]) -> BaseReader:
    """Return a reader of bases that takes the first copy which is intact, and has intact bases itself."""

    def read(name: Digest, chain: Chain) -> memoryview:
        if (name, chain.deltas) in chain.lost:
            # Each copy of each frame above asks for it again: of a few in each place, that would be millions of ways.
            raise BaseDamagedError("as was said of another copy")
        problems = []
        for copy in copies_of(name):
            try:
                frame, payload, where = copy()
                return decode_checked(name, frame, payload, where, read, chain)
            except (UnsupportedFormatError, *UNKNOWING):
                raise
            except (FormatError, RecoveryError, StorageError) as error:
                problems.append(str(error))
        chain.lost.add((name, chain.deltas))
        raise BaseDamagedError("; ".join(problems) or "it lies in no readable pack")

    return read


def decode_checked(
    name: Digest, frame: FrameDescriptor, payload: memoryview, where: str, read_base: BaseReader, chain: Chain = _WANTED
) -> memoryview:
    """Return the plain bytes of a checked frame, which have the digest ``name``; its base is read where it has one.

    Raises:
        BaseDamagedError: the base cannot be had; the message names both.
        FormatError: of the kind that fits.
    """
    base = None
    if frame.kind != registry.KIND_FULL:
        below = chain.below(frame, where)
        base_name = Digest(frame.base_digest)
        try:
            base = read_base(base_name, below)
        except BaseDamagedError as error:
            raise BaseDamagedError(f"{where}: partition {name.hex()} needs base {base_name.hex()}: {error}") from error
    with timed("decode", frame.plain_length) if frame.codec != registry.CODEC_IDENTITY else contextlib.nullcontext():
        plain = decode(frame, payload, base, where=where)
    with timed("verify", len(plain)):
        if frame.digest != name or len(plain) != frame.plain_length or digest_of(plain) != name:
            raise DigestMismatchError(f"digest mismatch in {where}")
    return plain
