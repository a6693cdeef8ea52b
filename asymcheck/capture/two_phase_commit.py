"""Two-phase commit: the captures of all ranks become one checkpoint, or none does (SPEC.md §C5).

In ``step()``, rank 0 sends the save id and its partition plan, so that all ranks split replicas alike. In the first
phase, on the commit thread, each rank writes its partitions, seals its packs and reports. In the second phase, each
rank finds the partitions of other ranks, publishes its manifest and reports. Then the checkpoint is durable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from asymcheck.capture.inflight import Capture
from asymcheck.commit.save_request import LineagePosition, SaveRequest, SaveRound
from asymcheck.distributed import Session
from asymcheck.distributed.replica_assignment import (
    NOBODY,
    ReplicaAssigner,
    ReplicaAssignment,
    decode_shares,
    encode_rows,
)
from asymcheck.errors import RankFailedError, RanksMissingError
from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.format.frame import frame_length
from asymcheck.format.record import head_from_json, head_to_json, parent_from_json, parent_to_json
from asymcheck.policies.interval import TrainingPace
from asymcheck.state.partition_plan import Plan
from asymcheck.storage.nvme import ManifestFiles
from asymcheck.types import Digest, SaveId

_SAVES = "saves"
_DIGESTS, _STORED, _COMMITTED = range(1, 4)
_SHARED_FOR = 100
"""Number of saves after which the ranks compare their partitions again."""
_SHARED_FOR_BY_STORES = 25
"""The same with one store per machine, where nothing else detects replicas that diverge."""
_DIVERGED_MAX = 8
"""Maximum number of diverged partitions that one rank reports for one checkpoint."""
_KEY_BYTES = 8


class Writes(Protocol):
    """Writer of the partitions of one capture."""

    def write_soon(self, capture: Capture, number: int) -> None:
        """Queue a partition to be written."""

    def write(self, capture: Capture, number: int) -> bool:
        """Write a partition; return whether the store did not have it."""


@dataclasses.dataclass
class _Shared:
    """Result of comparing the replicas of all ranks."""

    identities: list[bytes]
    """Identity of each partition; the owners stay the same as long as the identities do."""
    owners: list[int]
    """For each partition, its writer or ``NOBODY``."""
    digests: list[Digest | None]
    """Digest of each partition at that time."""
    elsewhere: list[bool]
    """For each partition, whether another store pushes it."""
    step: int
    """Last step at which the replicas were equal."""
    changed: set[int] = dataclasses.field(default_factory=set)
    """Partitions that have changed and stayed equal, so that they are replicas and not equal by chance."""


class Replicas:
    """Replicas that this rank shares with others. For the commit thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shared: _Shared | None = None
        self._identities: list[bytes] = []
        self._named: tuple[object, ...] = ()
        self._diverged: list[dict[str, object]] = []

    def report(self, capture: Capture, *, places: bool) -> bytes:
        """Return the report to rank 0 on the partitions of a complete capture, optionally with their places."""
        identities = self._identities_of(capture)
        pairs = zip(identities, capture.digests, strict=True)
        keys = [digest(identity + (name or b""))[:_KEY_BYTES] for identity, name in pairs]
        lengths = [partition.length for partition in capture.partitions]
        return encode_rows(keys, lengths, [identity[:_KEY_BYTES] for identity in identities] if places else [])

    def take(self, capture: Capture, shares: ReplicaAssignment) -> None:
        """Apply the decision of rank 0."""
        step = capture.request.step
        for difference in shares.differences:
            self._note_divergence(capture, *difference)
        identities, digests = self._identities_of(capture), list(capture.digests)
        self._shared = _Shared(identities, shares.owners, digests, shares.elsewhere, step)

    def elsewhere(self, capture: Capture) -> set[Digest]:
        """Return the partitions of a capture that another store pushes."""
        if self._shared is None or not self.knows(capture):
            return set()
        pairs = list(zip(capture.digests, self._shared.elsewhere, strict=True))
        # A digest that occurs several times, such as zeros, is ours if any occurrence is.
        ours = {name for name, is_elsewhere in pairs if not is_elsewhere}
        return {name for name, is_elsewhere in pairs if is_elsewhere and name is not None} - ours

    def knows(self, capture: Capture) -> bool:
        """Tell whether the writers of a capture are known."""
        return self._shared is not None and self._shared.identities is self._identities_of(capture)

    def is_of_other(self, capture: Capture, number: int) -> bool:
        """Tell whether another rank writes a partition."""
        shared = self._shared if self.knows(capture) else None
        return shared is not None and shared.owners[number] not in (self._rank, NOBODY)

    def compare(self, capture: Capture, number: int, *, differs: bool) -> None:
        """Note whether the writer of a partition has written other bytes, so that this rank had to write its own."""
        shared = self._shared
        if shared is None:
            return
        if not differs:
            if shared.digests[number] != capture.digests[number]:
                shared.changed.add(number)
            return
        owner, shared.owners[number] = shared.owners[number], self._rank
        shared.elsewhere[number] = False
        if number in shared.changed:
            self._note_divergence(capture, number, owner, shared.step)

    def _note_divergence(self, capture: Capture, number: int, owner: int, equal_until: int) -> None:
        """Note that a partition differs from the replica of rank ``owner``, which was equal until a step."""
        first, *others = dict.fromkeys(piece.row for piece in capture.partitions[number].pieces)
        more = f" (or one of {len(others)} other tensors in its partition)" if others else ""
        low, high = sorted((owner, self._rank))
        text = (
            f"step {capture.request.step} of run {capture.request.run!r}: tensor {capture.names[first]}{more} differs "
            f"between ranks {low} and {high} from byte {capture.partitions[number].pieces[0].start} on, but was equal "
            f"until step {equal_until}. The data of each rank was saved"
        )
        self._diverged.append({"owner": owner, "text": text})

    def end(self, capture: Capture) -> list[dict[str, object]]:
        """Finish a capture; return the owner and a message for each partition that has diverged."""
        diverged, self._diverged = self._diverged, []
        if self._shared is not None:
            self._shared.step = capture.request.step
        return diverged

    def _identities_of(self, capture: Capture) -> list[bytes]:
        """Return a hash of the position of each partition; the same list object as before if equal."""
        named = (capture.plan, capture.names, capture.boxes)
        if named != self._named:
            self._identities = _identities(capture)
        self._named = named
        return self._identities


def _identities(capture: Capture) -> list[bytes]:
    tensors = [f"{name} {box.whole} {box.offset}" for name, box in zip(capture.names, capture.boxes, strict=True)]
    return [
        digest("\n".join(f"{tensors[piece.row]} {piece.start} {piece.length}" for piece in partition.pieces).encode())
        for partition in capture.partitions
    ]


class TwoPhaseCommit:
    """Part of this rank in the saves of all ranks."""

    def __init__(
        self, session: Session, placing: Callable[[Capture], LineagePosition], manifests: ManifestFiles, run: str
    ) -> None:
        """Save ``run`` with the ranks of ``session``; on rank 0, ``placing`` returns the position of a checkpoint."""
        self.store_ranks = session.store_ranks
        """Ranks that save into this store; None if all ranks do."""
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
        # Used on rank 0 only.
        self._shared_plan: Plan | None = None
        self._since_shared = 0
        self._is_outdated = False

    @contextlib.contextmanager
    def beginning(self) -> Iterator[int]:
        """Yield the number of the save that begins in the block. All ranks learn of a failure. Training thread."""
        number = self._session.next_number()
        try:
            yield number
        except BaseException as error:
            self._session.give_up(number, error)
            raise

    def lead(self, number: int, request: SaveRequest, generation: int | None, plan: Plan) -> SaveRound:
        """Begin a save on rank 0. Training thread."""
        with self._lock:
            reassigns = plan is not self._shared_plan or self._is_outdated or self._since_shared >= self._shared_for
            if reassigns:
                self._shared_plan, self._since_shared, self._is_outdated = plan, 0, False
            self._since_shared += 1
        head = None if generation is None else self._head_of(generation)
        save_round = SaveRound(number, request.step, request.save_id, generation, plan.record(), reassigns, head)
        details = {**dataclasses.asdict(save_round), "save_id": request.save_id.hex()}
        self._session.open(number, _SAVES, request.step, _DIGESTS if reassigns else _STORED, details)
        return save_round

    def follow(self, request: SaveRequest) -> SaveRound:
        """Take part in the save that rank 0 begins. Training thread.

        Raises:
            RanksError: rank 0 begins no save, or another one.
        """
        what = f"save of step {request.step} of run {self._run!r}"
        _, details = self._session.follow(_SAVES, request.step, what)
        self._take_head(details["head"])
        return SaveRound(**{**details, "save_id": SaveId(bytes.fromhex(details["save_id"]))})

    def _head_of(self, generation: int) -> Mapping[str, object] | None:
        """Return the head record that the stores of other machines need as well."""
        if self.store_ranks is not None and (self._head is None or self._head["generation"] != generation):
            head = self._manifests.read_head(self._run, generation)
            self._head = None if head is None else head_to_json(head[0])
        return self._head

    def _take_head(self, record: Mapping[str, object] | None) -> None:
        """Begin the generation in this store before its first checkpoint."""
        head = None if record is None else head_from_json(record, "head record of rank 0")
        if head is not None and head.generation > self._newest_head:
            self._manifests.take_head(head)
            self._newest_head = head.generation

    def holds(self, capture: Capture, number: int) -> bool:
        """Tell whether a partition has to wait, because another rank writes it or the writer is unknown."""
        save_round = capture.save_round
        return save_round is not None and (save_round.reassigns or self._replicas.is_of_other(capture, number))

    def commit(self, capture: Capture, writes: Writes) -> None:
        """Commit the captures of all ranks as one checkpoint. Commit thread.

        Raises:
            RanksMissingError: some ranks did not respond in time.
            RankFailedError: another rank failed.
            AsymcheckError: this rank failed; the other ranks learn of it.
        """
        save_round = capture.save_round
        if save_round is None:
            raise RankFailedError(f"step {capture.request.step} was begun by this rank alone")
        at = (save_round.number, _DIGESTS if save_round.reassigns else _STORED)
        try:
            capture.wait()
            if save_round.reassigns:
                self._share(capture, at)
                at = (save_round.number, _STORED)
                self._write_own(capture, writes)
            for number in capture.known:
                writes.write(capture, number)
            capture.transaction.seal_frames()
            place, is_unassigned, metrics = self._all_stored(capture, at)
            at = (save_round.number, _COMMITTED)
            self._take_from_others(capture, writes, is_unassigned=is_unassigned)
            elsewhere = self._replicas.elsewhere(capture)
            ref = capture.transaction.commit_capture(capture.manifest, lambda: place, elsewhere, metrics)
            try:
                self._all_committed(capture, at)
            except RankFailedError:
                # A rank has no manifest, and every rank learns that. The others would occupy the drive for nothing, and
                # the retention of a store would count them instead of checkpoints that all ranks can restore.
                capture.transaction.revoke()
                raise
            capture.ref = ref
        except (RankFailedError, RanksMissingError):
            # All ranks know.
            raise
        except BaseException as error:
            self._committing.fail(at, error)
            raise

    def _what(self, capture: Capture, what: str) -> str:
        return f"{what} of step {capture.request.step} of run {self._run!r}"

    def _share(self, capture: Capture, at: tuple[int, int]) -> None:
        report = self._replicas.report(capture, places=self.store_ranks is not None)
        decide = partial(self._sharing, step=capture.request.step)
        shares = self._committing.agree(at, report, decide, self._what(capture, "digests"))
        self._replicas.take(capture, decode_shares(shares, len(capture.partitions)))

    def _write_own(self, capture: Capture, writes: Writes) -> None:
        own = [number for number in capture.held if not self._replicas.is_of_other(capture, number)]
        capture.held = [number for number in capture.held if self._replicas.is_of_other(capture, number)]
        capture.transaction.expect(sum(frame_length(capture.partitions[number].length) for number in own))
        for number in own:
            writes.write_soon(capture, number)
        capture.wait()

    def _all_stored(
        self, capture: Capture, at: tuple[int, int]
    ) -> tuple[LineagePosition, bool, Mapping[str, float] | None]:
        """Wait until all ranks have stored their partitions; return the position of the checkpoint.

        Also return whether some rank did not know its assignment, so that its partitions may be missing. With several
        stores, also return the metrics of all ranks, so that every store retains and pushes the same checkpoints.
        """

        def decide(reports: list[Any]) -> object:
            place = self._placing(capture)
            # For different values of a metric, the last rank wins, as for readers.
            metrics = {name: value for report in reports for name, value in report["metrics"].items()}
            return {
                "generation": place.generation,
                "parent": parent_to_json(place.parent),
                "is_unassigned": any(report["is_unassigned"] for report in reports),
                "head": self._head_of(place.generation),
                "metrics": dict(list(metrics.items())[: registry.METRICS_MAX]),
            }

        is_unassigned = not self._replicas.knows(capture)
        has_stores = self.store_ranks is not None
        own = {"is_unassigned": is_unassigned, "metrics": dict(capture.request.metrics) if has_stores else {}}
        decision = self._committing.agree_json(at, own, decide, self._what(capture, "partitions"))
        self._take_head(decision["head"])
        parent = parent_from_json(decision["parent"], "parent of rank 0")
        position = LineagePosition(decision["generation"], parent)
        return position, decision["is_unassigned"], decision["metrics"] if has_stores else None

    def _take_from_others(self, capture: Capture, writes: Writes, *, is_unassigned: bool) -> None:
        """Use the partitions that other ranks have written. Write missing ones, which were no replicas."""
        for number in capture.held:
            capture.transaction.expect(frame_length(capture.partitions[number].length))
            is_new = writes.write(capture, number)
            # Without an assignment, the writer may have written nothing, which is no difference.
            if not (is_new and is_unassigned):
                self._replicas.compare(capture, number, differs=is_new)

    def _all_committed(self, capture: Capture, at: tuple[int, int]) -> None:
        """Wait until all ranks have published their manifests, which makes the checkpoint durable."""

        def decide(reports: list[Any]) -> object:
            with self._lock:
                self._is_outdated |= any(report["is_outdated"] for report in reports)
            paces = (TrainingPace(**report["pace"]) for report in reports if report["pace"] is not None)
            capture.paces = list(dict.fromkeys(paces))
            return [divergence for report in reports for divergence in report["diverged"]][:_DIVERGED_MAX]

        diverged = self._replicas.end(capture)[:_DIVERGED_MAX]
        pace = None if capture.request.pace is None else dataclasses.asdict(capture.request.pace)
        is_outdated = bool(diverged) or not self._replicas.knows(capture)
        own = {"is_outdated": is_outdated, "diverged": diverged, "pace": pace}
        every = self._committing.agree_json(at, own, decide, self._what(capture, "commit"))
        # Rank 0 reports all divergences, other ranks only their own.
        rank = self._session.rank
        reported = every if self.is_first else [*diverged, *(one for one in every if one["owner"] == rank)]
        capture.diverged = [one["text"] for one in reported]
