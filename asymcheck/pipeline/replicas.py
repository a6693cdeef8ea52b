"""Replicas: partitions of which other ranks have equal ones. One of these ranks, the owner, writes them for all."""

from __future__ import annotations

import contextlib
import dataclasses

from asymcheck.errors import AsymcheckError
from asymcheck.format.digest import digest
from asymcheck.pipeline.capture import Capture
from asymcheck.ranks.sharing import NOBODY, Shares, encode_rows
from asymcheck.tiers.manifests import ManifestReader
from asymcheck.types import CheckpointRef, Digest

_KEY_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A partition that was a copy of another rank's, and is none any more."""

    rank: int
    """Which rank found that out."""
    owner: int
    """Which rank has the other copy."""
    tensor: str
    """Name of the (first) tensor in it."""
    tensors: int
    """How many tensors are in it."""
    start: int
    """Its first byte in that tensor."""
    digest: str
    """Digest on ``rank``, hexadecimal."""
    equal_until: int
    """The last step at which both were equal."""

    def text(self, manifests: ManifestReader, run: str, ref: CheckpointRef) -> str:
        """Say it, with the digest of the other copy as the checkpoint has it."""
        other = self._other_digest(manifests, run, ref)
        more = "" if self.tensors == 1 else f" (or one of {self.tensors - 1} beside it)"
        # Which of them found it depends on who writes for both: to who reads it that makes no difference.
        (first, its), (second, others) = sorted({self.owner: other, self.rank: self.digest}.items())
        return (
            f"step {ref.step} of run {run!r}: tensor {self.tensor}{more} is not the same on ranks {first} and "
            f"{second}, as it was until step {self.equal_until}: from byte {self.start} on, rank {first} has "
            f"digest {its}, rank {second} has {others}. Each rank's own was saved"
        )

    def _other_digest(self, manifests: ManifestReader, run: str, ref: CheckpointRef) -> str:
        with contextlib.suppress(AsymcheckError):
            names = [name for name in manifests.listing(run, ref).manifests if name.rank == self.owner]
            if not names:
                return "that lies in another store"
            manifest = manifests.read(run, ref, names[0])
            for row in manifest.rows(range(len(manifest))):
                at = 0
                for extent in row.extents if row.name == self.tensor else ():
                    if at == self.start:
                        return extent.digest.hex()
                    at += extent.length
        return "another"


@dataclasses.dataclass
class _Shared:
    """What came of looking at what the ranks have in common."""

    identities: list[bytes]
    """What each partition is of; as long as that stays the same, so do the owners."""
    owners: list[int]
    """Of each partition: a rank, or ``NOBODY``."""
    digests: list[Digest | None]
    """What it was then."""
    elsewhere: list[bool]
    """Of each partition: whether another store brings it to where all are together."""
    step: int
    """The step at which they were found equal last."""
    changed: set[int] = dataclasses.field(default_factory=set)
    """Those that have changed and stayed equal: they are copies of each other, and not alike by chance."""


class Replicas:
    """What this rank has in common with others. For the commit thread."""

    def __init__(self, rank: int) -> None:
        """Begin without knowing anything; this rank is ``rank``."""
        self._rank = rank
        self._shared: _Shared | None = None
        self._last: Capture | None = None
        self._identities: list[bytes] = []
        self._named: tuple[object, ...] = ()
        self._diverged: list[Divergence] = []

    def report(self, capture: Capture, *, places: bool) -> bytes:
        """Return what rank 0 needs to know of the partitions of a capture that is complete, and their places."""
        identities = self._identities_of(capture)
        pairs = zip(identities, capture.digests, strict=True)
        keys = [digest(identity + (name or b""))[:_KEY_BYTES] for identity, name in pairs]
        lengths = [partition.length for partition in capture.partitions]
        return encode_rows(keys, lengths, [identity[:_KEY_BYTES] for identity in identities] if places else [])

    def take(self, capture: Capture, shares: Shares) -> None:
        """Take what rank 0 has decided on that."""
        step = capture.request.step
        self._diverged += [self._divergence(capture, *one) for one in shares.differences]
        identities, digests = self._identities_of(capture), list(capture.digests)
        self._shared = _Shared(identities, shares.owners, digests, shares.elsewhere, step)

    def elsewhere(self, capture: Capture) -> set[Digest]:
        """Return the partitions of a capture that another store brings to where all are together."""
        if self._shared is None or not self.knows(capture):
            return set()
        pairs = list(zip(capture.digests, self._shared.elsewhere, strict=True))
        # What lies in several places, such as zeros, may be others' in one and ours in another: then it is ours.
        ours = {name for name, is_elsewhere in pairs if not is_elsewhere}
        return {name for name, is_elsewhere in pairs if is_elsewhere and name is not None} - ours

    def knows(self, capture: Capture) -> bool:
        """Tell whether it is known who writes what of a capture."""
        return self._shared is not None and self._shared.identities is self._identities_of(capture)

    def is_of_other(self, capture: Capture, number: int) -> bool:
        """Tell whether another rank writes a partition."""
        known = self._shared if self.knows(capture) else None
        return known is not None and known.owners[number] not in (self._rank, NOBODY)

    def is_equal(self, capture: Capture, number: int) -> None:
        """Note that the owner has written the very same."""
        if self._shared is not None and self._shared.digests[number] != capture.digests[number]:
            self._shared.changed.add(number)

    def differs(self, capture: Capture, number: int, *, is_void: bool) -> None:
        """Note that the owner has written something else, so that this rank had to write its own.

        With ``is_void`` it may have written nothing, and nothing follows.
        """
        shared = self._shared
        if shared is None or is_void:
            return
        owner, shared.owners[number] = shared.owners[number], self._rank
        shared.elsewhere[number] = False
        if number in shared.changed:
            self._diverged.append(self._divergence(capture, number, owner, shared.step))

    def _divergence(self, capture: Capture, number: int, other: int, equal_until: int) -> Divergence:
        pieces = capture.partitions[number].pieces
        name, own = capture.names[pieces[0].row], (capture.digests[number] or b"").hex()
        count = len({piece.row for piece in pieces})
        return Divergence(self._rank, other, name, count, pieces[0].start, own, equal_until)

    def end(self, capture: Capture) -> list[Divergence]:
        """Say that a capture is through; return what has diverged in it."""
        found, self._diverged = self._diverged, []
        if self._shared is not None:
            self._shared.step = capture.request.step
        return found

    def _identities_of(self, capture: Capture) -> list[bytes]:
        """Return what each partition is of: the same list as of the capture before, if that is the same."""
        if capture is not self._last:
            named = (capture.plan, capture.names, capture.boxes)
            if self._last is None or named != self._named:
                self._identities = _identities(capture)
            self._named, self._last = named, capture
        return self._identities


def _identities(capture: Capture) -> list[bytes]:
    tensors = [f"{name} {box.whole} {box.offset}" for name, box in zip(capture.names, capture.boxes, strict=True)]
    return [
        digest("\n".join(f"{tensors[one.row]} {one.start} {one.length}" for one in partition.pieces).encode())
        for partition in capture.partitions
    ]
