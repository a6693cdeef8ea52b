"""Joint: the captures of all ranks become one checkpoint, or none does (SPEC.md §8.1).

In ``step()`` rank 0 gives the save id and its plan to all, so that replicas are cut alike. The rest happens where a
rank commits: each rank writes its partitions, seals their packs and reports; when all have done so, each looks for what
others have written, publishes its manifest and reports; when all have done that, the checkpoint is durable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from asymcheck.capture.inflight import Capture, InFlight
from asymcheck.commit.save_request import LineagePosition, SaveRequest, SaveRound
from asymcheck.distributed import Session
from asymcheck.distributed.coordinator import reason_of
from asymcheck.distributed.replica_assignment import (
    NOBODY,
    ReplicaAssigner,
    ReplicaAssignment,
    decode_shares,
    encode_rows,
)
from asymcheck.errors import AsymcheckError, RankFailedError, RanksError, RanksMissingError
from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.format.frame import frame_length
from asymcheck.format.record import head_from_json, head_to_json
from asymcheck.policies.interval import TrainingPace
from asymcheck.state.partition_plan import Plan
from asymcheck.storage.manifests import ManifestReader
from asymcheck.storage.nvme import ManifestFiles
from asymcheck.types import CheckpointRef, Digest, SaveId

_SAVES = "saves"
_DIGESTS, _STORED, _COMMITTED = range(1, 4)
_SHARED_FOR = 100
"""After so many saves the ranks look anew at what they have in common …"""
_SHARED_FOR_BY_STORES = 25
"""The same where every machine has its own store: nothing else detects that copies on two machines differ."""
_DIVERGED_MAX = 8
"""Differences of one rank that are reported for one checkpoint."""


class Writes(Protocol):
    """Writer of the partitions of one capture."""

    def write_soon(self, inflight: InFlight, number: int) -> None:
        """Queue a partition to be written."""

    def write(self, inflight: InFlight, number: int) -> bool:
        """Write a partition; return whether the store did not have it."""


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
    """Result of comparing the replicas of all ranks."""

    identities: list[bytes]
    """Identity of each partition; the owners stay the same as long as the identities do."""
    owners: list[int]
    """Of each partition: a rank, or ``NOBODY``."""
    digests: list[Digest | None]
    """Digest of each partition at that time."""
    elsewhere: list[bool]
    """Of each partition: whether another store brings it to where all are together."""
    step: int
    """The step at which they were found equal last."""
    changed: set[int] = dataclasses.field(default_factory=set)
    """Those that have changed and stayed equal: they are copies of each other, and not alike by chance."""


class Replicas:
    """Replicas that this rank shares with others. For the commit thread."""

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

    def take(self, capture: Capture, shares: ReplicaAssignment) -> None:
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


class TwoPhaseCommit:
    """This rank's part in the saves of all. :meth:`turn` is for the training thread, the rest for the commit thread."""

    def __init__(
        self, session: Session, placing: Callable[[Capture], LineagePosition], manifests: ManifestFiles, run: str
    ) -> None:
        """Save ``run`` with those of ``session``; on rank 0 ``placing`` says where on the line a checkpoint goes."""
        self.store_ranks = session.store_ranks
        """The ranks that save into this store; None when all do."""
        self.is_first = session.is_first
        """Whether this is rank 0."""
        self._head: Mapping[str, object] | None = None
        self._newest_head = 0
        self._manifests = manifests
        self._session = session
        self._committing = session.for_thread()
        self._placing, self._run = placing, run
        self._replicas = Replicas(session.rank)
        self._sharing = ReplicaAssigner(session.groups)
        self._shared_for = _SHARED_FOR if self.store_ranks is None else _SHARED_FOR_BY_STORES
        self._lock = threading.Lock()
        # Of rank 0.
        self._shared_plan: Plan | None = None
        self._since_shared = 0
        self._is_outdated = False

    # --------------------------------------------------------------------------------------- on the training thread

    @contextlib.contextmanager
    def beginning(self) -> Iterator[int]:
        """Yield the number of the save that begins in the block. A failure to begin it is sent to all."""
        number = self._session.next_number()
        try:
            yield number
        except BaseException as error:
            self._session.give_up(number, error)
            raise

    def lead(self, number: int, request: SaveRequest, generation: int | None, plan: Plan) -> SaveRound:
        """Begin a save, as rank 0."""
        with self._lock:
            anew = plan is not self._shared_plan or self._is_outdated or self._since_shared >= self._shared_for
            if anew:
                self._shared_plan, self._since_shared, self._is_outdated = plan, 0, False
            self._since_shared += 1
        head = None if generation is None else self._head_of(generation)
        turn = SaveRound(number, request.step, request.save_id, generation, plan.record(), anew, head)
        said = {**dataclasses.asdict(turn), "save_id": request.save_id.hex()}
        self._session.open(number, _SAVES, request.step, _DIGESTS if anew else _STORED, said)
        return turn

    def follow(self, request: SaveRequest) -> SaveRound:
        """Take part in the save that rank 0 begins; its number is that which rank 0 has given it.

        Raises:
            RanksError: rank 0 does not begin it, or begins another one.
        """
        what = f"save of step {request.step} of run {self._run!r}"
        _, said = self._session.follow(_SAVES, request.step, what)
        self._take_head(said["head"])
        return SaveRound(**{**said, "save_id": SaveId(bytes.fromhex(said["save_id"]))})

    def _head_of(self, generation: int) -> Mapping[str, object] | None:
        """Return the head record that the stores of other machines need, too."""
        if self.store_ranks is not None and (self._head is None or self._head["generation"] != generation):
            found = self._manifests.read_head(self._run, generation)
            self._head = None if found is None else head_to_json(found[0])
        return self._head

    def _take_head(self, said: Mapping[str, object] | None) -> None:
        """Open a generation in this store, too, before anything is saved that belongs to it."""
        head = None if said is None else head_from_json(said, "head record of rank 0")
        if head is not None and head.generation > self._newest_head:
            self._manifests.take_head(head)
            self._newest_head = head.generation

    # ----------------------------------------------------------------------------------------- on the commit thread

    def holds(self, capture: Capture, number: int) -> bool:
        """Tell whether a partition is not written yet: another rank writes it, or who does is not known yet."""
        turn = capture.turn
        return turn is not None and (turn.shares_anew or self._replicas.is_of_other(capture, number))

    def commit(self, inflight: InFlight, writes: Writes) -> None:
        """Make one checkpoint of what all ranks captured.

        Raises:
            RanksMissingError: some ranks did not come so far in time.
            RankFailedError: one failed.
            AsymcheckError: this rank failed; the other ranks get to know.
        """
        capture = inflight.capture
        turn = capture.turn
        if turn is None:
            raise RankFailedError(f"step {capture.request.step} was begun by this rank alone")
        at = (turn.number, _DIGESTS if turn.shares_anew else _STORED)
        try:
            inflight.wait()
            if turn.shares_anew:
                self._share(capture, at)
                at = (turn.number, _STORED)
                self._write_own(inflight, writes)
            for number in inflight.put_off:
                writes.write(inflight, number)
            inflight.transaction.seal_frames()
            place, is_void, metrics = self._all_stored(capture, at)
            at = (turn.number, _COMMITTED)
            self._take_from_others(inflight, writes, is_void=is_void)
            elsewhere = self._replicas.elsewhere(capture)
            ref = inflight.transaction.commit_capture(inflight.manifest, lambda: place, elsewhere, metrics)
            self._all_committed(capture, ref, at)
            capture.ref = ref
        except (RankFailedError, RanksMissingError):
            # All know.
            raise
        except BaseException as error:
            with contextlib.suppress(RanksError):
                self._committing.report(at, reason_of(error).encode(), failed=True)
            raise

    def _what(self, capture: Capture, what: str) -> str:
        return f"{what} of step {capture.request.step} of run {self._run!r}"

    def _share(self, capture: Capture, at: tuple[int, int]) -> None:
        report = self._replicas.report(capture, places=self.store_ranks is not None)
        decide = partial(self._sharing, step=capture.request.step)
        shares = self._committing.agree(at, report, decide, self._what(capture, "digests"))
        self._replicas.take(capture, decode_shares(shares, len(capture.partitions)))

    def _write_own(self, inflight: InFlight, writes: Writes) -> None:
        capture = inflight.capture
        own = [number for number in inflight.held if not self._replicas.is_of_other(capture, number)]
        inflight.held = [number for number in inflight.held if self._replicas.is_of_other(capture, number)]
        inflight.transaction.expect(sum(frame_length(capture.partitions[number].length) for number in own))
        for number in own:
            writes.write_soon(inflight, number)
        inflight.wait()

    def _all_stored(
        self, capture: Capture, at: tuple[int, int]
    ) -> tuple[LineagePosition, bool, Mapping[str, float] | None]:
        """Wait until all ranks have stored what is theirs; return where the checkpoint goes.

        And whether some rank does not know what it was to write, so that it is no wonder if that is not there. And the
        metrics of all ranks where these have several stores: each of them keeps and pushes the same checkpoints by it.
        """

        def decide(reports: Sequence[bytes]) -> bytes:
            place = self._placing(capture)
            parent = place.parent
            # Of many ranks nearly all say the same. What several say differently is that of the last, as readers do.
            found = [json.loads(report) for report in reversed(dict.fromkeys(reversed(reports)))]
            metrics = {name: value for one in found for name, value in one["metrics"].items()}
            said = {
                "generation": place.generation,
                "parent": None if parent is None else [parent.generation, parent.step, parent.save_id.hex()],
                "is_void": any(one["is_void"] for one in found),
                "head": self._head_of(place.generation),
                "metrics": dict(list(metrics.items())[: registry.METRICS_MAX]),
            }
            return json.dumps(said).encode()

        is_void = not self._replicas.knows(capture)
        are_apart = self.store_ranks is not None
        mine = {"is_void": is_void, "metrics": dict(capture.request.metrics) if are_apart else {}}
        report = json.dumps(mine).encode()
        said = json.loads(self._committing.agree(at, report, decide, self._what(capture, "partitions")))
        self._take_head(said["head"])
        parent = said["parent"]
        if parent is not None:
            parent = CheckpointRef(parent[0], parent[1], SaveId(bytes.fromhex(parent[2])))
        return LineagePosition(said["generation"], parent), said["is_void"], said["metrics"] if are_apart else None

    def _take_from_others(self, inflight: InFlight, writes: Writes, *, is_void: bool) -> None:
        """Take what others have written; write what is not there, for then it was no copy."""
        for number in inflight.held:
            inflight.transaction.expect(frame_length(inflight.capture.partitions[number].length))
            if writes.write(inflight, number):
                self._replicas.differs(inflight.capture, number, is_void=is_void)
            else:
                self._replicas.is_equal(inflight.capture, number)

    def _all_committed(self, capture: Capture, ref: CheckpointRef, at: tuple[int, int]) -> None:
        """Wait until the manifests of all ranks are there: from now on the checkpoint is durable."""

        def decide(reports: Sequence[bytes]) -> bytes:
            # Of many ranks nearly all say the same: that nothing is to be said.
            found = [json.loads(report) for report in dict.fromkeys(reports)]
            with self._lock:
                self._is_outdated |= any(one["is_outdated"] for one in found)
            capture.paces = [TrainingPace(**one["pace"]) for one in found if one["pace"] is not None]
            told = [one for report in found for one in report["diverged"]]
            return json.dumps(told[:_DIVERGED_MAX]).encode()

        diverged = [dataclasses.asdict(one) for one in self._replicas.end(capture)[:_DIVERGED_MAX]]
        pace = None if capture.request.pace is None else dataclasses.asdict(capture.request.pace)
        is_outdated = bool(diverged) or not self._replicas.knows(capture)
        mine = {"is_outdated": is_outdated, "diverged": diverged, "pace": pace}
        said = self._committing.agree(at, json.dumps(mine).encode(), decide, self._what(capture, "commit"))
        # Rank 0 tells of all: its output is the one that is looked at. Others, of what is theirs.
        found, rank = json.loads(said), self._session.rank
        told = found if self.is_first else [*diverged, *(one for one in found if one["owner"] == rank)]
        capture.diverged = [Divergence(**one).text(self._manifests, self._run, ref) for one in told]
