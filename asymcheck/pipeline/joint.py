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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from asymcheck.errors import RankFailedError, RanksError, RanksMissingError
from asymcheck.format import registry
from asymcheck.format.frame import frame_length
from asymcheck.format.record import head_from_json, head_to_json
from asymcheck.partition.plan import Plan
from asymcheck.pipeline.capture import Capture
from asymcheck.pipeline.moving import Moving
from asymcheck.pipeline.replicas import Divergence, Replicas
from asymcheck.pipeline.request import Place, SaveRequest
from asymcheck.pipeline.turn import Turn
from asymcheck.policies.interval import Pace
from asymcheck.ranks import Session
from asymcheck.ranks.session import reason_of
from asymcheck.ranks.sharing import Sharing, decode_shares
from asymcheck.tiers.nvme import ManifestFiles
from asymcheck.types import CheckpointRef, SaveId

_SAVES = "saves"
_DIGESTS, _STORED, _COMMITTED = range(1, 4)
_SHARED_FOR = 100
"""After so many saves the ranks look anew at what they have in common …"""
_SHARED_FOR_BY_STORES = 25
"""… and where machines have stores of their own, for nothing else tells that copies on two of them differ."""
_DIVERGED_MAX = 8
"""So many differences of one rank are told of one checkpoint."""


class Writes(Protocol):
    """What moves the partitions of one capture."""

    def soon(self, moving: Moving, numbers: Sequence[int]) -> None:
        """Begin to write partitions."""

    def wait(self, moving: Moving) -> None:
        """Wait for what was begun; raises what went wrong."""

    def now(self, moving: Moving, number: int) -> bool:
        """Store a partition; return whether it had to be written."""


class Joint:
    """This rank's part in the saves of all. :meth:`turn` is for the training thread, the rest for the commit thread."""

    def __init__(
        self, session: Session, placing: Callable[[Capture], Place], manifests: ManifestFiles, run: str
    ) -> None:
        """Save ``run`` with those of ``session``; on rank 0 ``placing`` says where on the line a checkpoint goes."""
        self.store_ranks = session.store_ranks
        """The ranks that save into this store; None when all do."""
        self._head: Mapping[str, object] | None = None
        self._newest_head = 0
        self._manifests = manifests
        self._session = session
        self._committing = session.for_thread()
        self._placing, self._run = placing, run
        self._replicas = Replicas(session.rank)
        self._sharing = Sharing(session.groups)
        self._shared_for = _SHARED_FOR if self.store_ranks is None else _SHARED_FOR_BY_STORES
        self._lock = threading.Lock()
        # Of rank 0.
        self._shared_plan: Plan | None = None
        self._since_shared = 0
        self._is_outdated = False

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._session.is_first

    # --------------------------------------------------------------------------------------- on the training thread

    def lead(self, number: int, request: SaveRequest, generation: int | None, plan: Plan) -> Turn:
        """Begin a save, as rank 0."""
        with self._lock:
            anew = plan is not self._shared_plan or self._is_outdated or self._since_shared >= self._shared_for
            if anew:
                self._shared_plan, self._since_shared, self._is_outdated = plan, 0, False
            self._since_shared += 1
        head = None if generation is None else self._head_of(generation)
        turn = Turn(number, request.step, request.save_id, generation, plan.record(), anew, head)
        said = {**dataclasses.asdict(turn), "save_id": request.save_id.hex()}
        self._session.open(number, _SAVES, request.step, _DIGESTS if anew else _STORED, said)
        return turn

    def follow(self, _number: int, request: SaveRequest) -> Turn:
        """Take part in the save that rank 0 begins; its number is that which rank 0 has given it.

        Raises:
            RanksError: rank 0 does not begin it, or begins another one.
        """
        what = f"save of step {request.step} of run {self._run!r}"
        _, said = self._session.follow(_SAVES, request.step, what)
        self._take_head(said["head"])
        return Turn(**{**said, "save_id": SaveId(bytes.fromhex(said["save_id"]))})

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

    def next_number(self) -> int:
        """Return the number of the save that is about to begin."""
        return self._session.next_number()

    def give_up(self, number: int, error: BaseException) -> None:
        """Tell the others that this rank has not even begun."""
        self._session.give_up(number, error)

    # ----------------------------------------------------------------------------------------- on the commit thread

    def holds(self, capture: Capture, number: int) -> bool:
        """Tell whether a partition is not written yet: another rank writes it, or who does is not known yet."""
        turn = capture.turn
        return turn is not None and (turn.shares_anew or self._replicas.is_of_other(capture, number))

    def commit(self, moving: Moving, writes: Writes) -> None:
        """Make one checkpoint of what all ranks captured.

        Raises:
            RanksMissingError: some ranks did not come so far in time.
            RankFailedError: one failed.
            AsymcheckError: this one failed; the others are told.
        """
        capture = moving.capture
        turn = capture.turn
        if turn is None:
            raise RankFailedError(f"step {capture.request.step} was begun by this rank alone")
        at = (turn.number, _DIGESTS if turn.shares_anew else _STORED)
        try:
            writes.wait(moving)
            if turn.shares_anew:
                self._share(capture, at)
                at = (turn.number, _STORED)
                self._write_own(moving, writes)
            for number in moving.put_off:
                writes.now(moving, number)
            moving.transaction.seal_frames()
            place, is_void, metrics = self._all_stored(capture, at)
            at = (turn.number, _COMMITTED)
            self._take_from_others(moving, writes, is_void=is_void)
            elsewhere = self._replicas.elsewhere(capture)
            ref = moving.transaction.commit_capture(moving.manifest, lambda: place, elsewhere, metrics)
            self._all_committed(capture, ref, at)
            moving.ref = ref
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

    def _write_own(self, moving: Moving, writes: Writes) -> None:
        capture = moving.capture
        own = [number for number in moving.held if not self._replicas.is_of_other(capture, number)]
        moving.held = [number for number in moving.held if self._replicas.is_of_other(capture, number)]
        moving.transaction.expect(sum(frame_length(capture.partitions[number].length) for number in own))
        writes.soon(moving, own)
        writes.wait(moving)

    def _all_stored(self, capture: Capture, at: tuple[int, int]) -> tuple[Place, bool, Mapping[str, float] | None]:
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
        return Place(said["generation"], parent), said["is_void"], said["metrics"] if are_apart else None

    def _take_from_others(self, moving: Moving, writes: Writes, *, is_void: bool) -> None:
        """Take what others have written; write what is not there, for then it was no copy."""
        for number in moving.held:
            moving.transaction.expect(frame_length(moving.capture.partitions[number].length))
            if writes.now(moving, number):
                self._replicas.differs(moving.capture, number, is_void=is_void)
            else:
                self._replicas.is_equal(moving.capture, number)

    def _all_committed(self, capture: Capture, ref: CheckpointRef, at: tuple[int, int]) -> None:
        """Wait until the manifests of all ranks are there: from now on the checkpoint is durable."""

        def decide(reports: Sequence[bytes]) -> bytes:
            # Of many ranks nearly all say the same: that nothing is to be said.
            found = [json.loads(report) for report in dict.fromkeys(reports)]
            with self._lock:
                self._is_outdated |= any(one["is_outdated"] for one in found)
            capture.paces = [Pace(**one["pace"]) for one in found if one["pace"] is not None]
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
