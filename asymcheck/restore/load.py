"""Load: resolve a checkpoint and read it. A damaged candidate is skipped with a reason, and the next one is tried."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from asymcheck.errors import (
    INCONCLUSIVE,
    AsymcheckError,
    DamagedPartitionError,
    DigestMismatchError,
    FormatError,
    InconsistentCheckpointError,
    LockTimeoutError,
    PartialRestoreError,
    RefusedStateError,
    StateDifferenceWarning,
    StateMismatchError,
    StorageError,
    UnsupportedFormatError,
    listed,
    warn_user,
)
from asymcheck.events import timed
from asymcheck.format.digest import digest
from asymcheck.format.manifest import Manifest
from asymcheck.format.spans import Spans
from asymcheck.restore.assemble import Assembly, holds
from asymcheck.restore.in_place import InPlaceFill
from asymcheck.restore.read_plan import Demand, demands_of, execute, execute_in_memory, read_parts
from asymcheck.restore.reshard import ShardSet, box_of
from asymcheck.restore.resolve import (
    LISTINGS_MAX,
    Resolved,
    candidates,
    has_newer,
    inconsistent,
    resolve_each,
    resolve_manifests,
)
from asymcheck.restore.state_template import with_tensors
from asymcheck.state.shards import TensorShard
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.types import CheckpointRef, Digest


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Result of reading a checkpoint."""

    state: object  # the state, or another result of the reader
    run: str
    ref: CheckpointRef
    manifests: Sequence[Manifest]  # in the order of ranks
    skipped: tuple[str, ...] = ()  # newer checkpoints that were skipped, with the reasons


Read = Callable[[Resolved], object]
"""Read one checkpoint. DamagedPartitionError and FormatError make the caller try the next one."""


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """Request to read a checkpoint."""

    tensors: str  # glob of dotted tensor names
    into: object  # state to fill in place; None for new tensors
    device: torch.device  # device of new tensors
    fall_back: bool = False  # try the next older checkpoint if damage was found while tensors were filled in place
    rank: int | None = None  # rank that reads; None for the merged state of all ranks
    grows: bool = False  # add stored entries to mappings inside ``into`` that lack them
    strict: bool = False  # raise for differences that torch accepts in silence
    world_size: int | None = None  # number of ranks that continue the training; None for a single process
    returns: bool = False  # a newer checkpoint of the same training was restored into ``into`` before


def load(tier: ReadTier, run: str, step: int | str | None, wanted: LoadRequest) -> Loaded:
    """Read a checkpoint into new or existing tensors, and verify every byte.

    Raises:
        CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: as :func:`read_first`.
        StateMismatchError: ``into`` does not fit; nothing was overwritten.
        PartialRestoreError: filling in place failed after some tensors were overwritten.
        RefusedStateError: an object refused its state.
        UnsupportedFormatError: the checkpoint requires a newer version of asymcheck.
    """
    return read_first(tier, run, step, partial(_load_one, wanted), fall_back=wanted.fall_back)


def read_first(tier: ReadTier, run: str, step: int | str | None, read: Read, *, fall_back: bool = False) -> Loaded:
    """Read the newest readable checkpoint, or that of ``step``.

    With ``fall_back``, the next older checkpoint is also tried after some tensors were overwritten.

    Raises:
        PartialRestoreError: damage was found after some tensors were overwritten.
        CheckpointNotFoundError: no checkpoint matches.
        InconsistentCheckpointError: no candidate can be restored; lists the reasons.
        HeadRecordError: the newest checkpoint is unknown, because a head record is damaged or lost.
    """
    skipped: list[str] = []
    for attempt in range(LISTINGS_MAX):
        with timed("find", 0, lambda: {"run": run}):
            listings = candidates(tier, run, step)
        skipped.clear()
        is_stale = _NewerCandidate(tier, run, step, listings) if attempt + 1 < LISTINGS_MAX else None
        loaded = _first(tier, listings, skipped, read, fall_back=fall_back, is_stale=is_stale)
        if loaded is not None:
            return loaded
        if is_stale is None or not is_stale():
            break
    if step is None:
        # Raises CheckpointNotFoundError if all checkpoints were deleted meanwhile.
        candidates(tier, run, step)
    raise inconsistent(tier, run, step, skipped, "restored")


class _NewerCandidate:
    """Tells whether there is a candidate that a listing lacks. A candidate that was seen counts for ever.

    A save that fails withdraws its manifest, but the other checkpoints of the listing may not have been read yet.
    """

    def __init__(self, tier: ReadTier, run: str, step: int | str | None, listings: Sequence[CheckpointFiles]) -> None:
        self._look = partial(has_newer, tier, run, step, frozenset(listings))
        self._is_found = False

    def __call__(self) -> bool:
        if not self._is_found:
            self._is_found = self._look()
        return self._is_found


def _first(
    tier: ReadTier,
    listings: list[CheckpointFiles],
    skipped: list[str],
    read: Read,
    *,
    fall_back: bool,
    is_stale: Callable[[], bool] | None,
) -> Loaded | None:
    """Read the first readable checkpoint; append the reasons for skipped ones to ``skipped``.

    Return None if no checkpoint is readable, or if one was skipped and ``is_stale`` tells of a newer listing.
    """
    attempts = resolve_each(tier, listings, skipped)
    spoilt: PartialRestoreError | None = None
    try:
        for resolved in attempts:
            with resolved.sources:
                if skipped and spoilt is None and is_stale is not None and is_stale():
                    return None
                try:
                    state = read(resolved)
                except (RefusedStateError, UnsupportedFormatError):
                    # The object would also refuse the state of an older checkpoint. A checkpoint of a newer program is
                    # intact, so using an older one would silently lose training.
                    raise
                except (DamagedPartitionError, FormatError) as error:
                    skipped.append(f"{resolved.ref}: {error}")
                except PartialRestoreError as error:
                    if not fall_back:
                        raise _with_next_step(tier, error, attempts) from error
                    skipped.append(f"{resolved.ref}: {error}")
                    spoilt = error
                else:
                    return Loaded(state, resolved.run, resolved.ref, resolved.manifests, tuple(skipped))
    except AsymcheckError as error:
        if spoilt is None or isinstance(error, PartialRestoreError):
            raise
        message = f"{spoilt}. {_overwritten(spoilt.overwritten)}. The next older checkpoint cannot be read: {error}"
        raise PartialRestoreError(message, spoilt.overwritten, None) from error
    if spoilt is not None:
        raise _with_next_step(tier, spoilt, attempts) from spoilt
    return None


def _load_one(wanted: LoadRequest, resolved: Resolved) -> object:
    if wanted.into is None:
        return _load_anew(wanted, resolved)
    header = resolved.manifests[0].header
    if wanted.grows and header.merged is not None:
        reason = "it was merged from other checkpoints, and has no optimizer state"
        if header.merged.get("method") == "pull":
            reason = f"it was pulled with the tensors {header.merged.get('tensors')!r:.100} only"
        raise StateMismatchError(
            f"cannot continue training from {resolved.ref} of run {resolved.run!r}: {reason}. Load its weights with "
            "Store.load(into=…), and train in a new run"
        )
    own = (wanted.rank or 0) % header.world_size
    parts = ShardSet(resolved.manifests, [manifest.header.rank for manifest in resolved.manifests].index(own))
    with _with_advice(resolved, parts, "\n"):
        name = f"{resolved.ref} of run {resolved.run!r} in store {resolved.sources.tier.root}"
        filler = InPlaceFill(
            wanted.into,
            parts,
            wanted.tensors,
            grows=wanted.grows,
            returns=wanted.returns,
            merges=wanted.rank is None,
            reshards=wanted.world_size not in (None, header.world_size),
            name=name,
        )
    differences = [*filler.omissions, *filler.differences] if wanted.strict else filler.differences
    if differences:
        shown = "\n  ".join(differences)
        if wanted.strict:
            raise StateMismatchError(
                f"the given state differs from {resolved.ref}; nothing was overwritten:\n  {shown}"
            )
        warn_user(f"the given state differs from {resolved.ref}, which is restored:\n  {shown}", StateDifferenceWarning)
    assembly = Assembly(filler.demands, wanted.device, resolved.sources)
    with noting_overwritten(partial(_changed, filler, assembly)):
        fetch_in_place(resolved, assembly)
        return _finish(filler, assembly)


def _load_anew(wanted: LoadRequest, resolved: Resolved) -> object:
    parts, shape = read_parts(resolved.manifests, wanted.rank, wanted.tensors)
    with _with_advice(resolved, parts, ". "):
        demands = demands_of(parts, shape, whole=wanted.rank is None)
    assembly = Assembly(demands.values(), wanted.device, resolved.sources)
    execute(assembly, resolved)
    return with_tensors(shape, {number: _present(assembly, demand) for number, demand in demands.items()})


def _present(assembly: Assembly, demand: Demand) -> object:
    """Return a tensor for the state, as a TensorShard if it is a part of a tensor."""
    tensor, box = assembly.tensor(demand), box_of(demand.row)
    return tensor if box.is_whole else TensorShard(tensor, box.whole, box.offset)


@contextlib.contextmanager
def _with_advice(resolved: Resolved, parts: ShardSet, separator: str) -> Iterator[None]:
    """Add advice to errors about a checkpoint with missing shards: who can still restore it, or an older step."""
    try:
        yield
    except StateMismatchError as error:
        ranks = resolved.manifests[0].header.world_size
        if not parts.gaps or len(resolved.manifests) < ranks:
            # Other stores may have the missing shards.
            raise
        older: list[CheckpointRef] = []
        with contextlib.suppress(AsymcheckError):
            listings = resolved.sources.tier.manifests.checkpoints(resolved.run)
            older = [listing.ref for listing in listings if listing.is_complete and listing.ref < resolved.ref]
        instead = f"; or ask for an older step, such as step={older[-1].step}" if older else ""
        savers, same = (f"its {ranks} ranks", "as many ranks") if ranks > 1 else ("its rank", "a single rank")
        advice = f"{resolved.ref} has only the shards that {savers} saved; {same} can restore them{instead}"
        raise StateMismatchError(f"{error}{separator}{advice}") from error


def load_part(tier: ReadTier, run: str, ref: CheckpointRef, wanted: LoadRequest, ranks: Spans | None = None) -> Loaded:
    """Fill the state of one rank from its own shards, even if shards of other ranks are missing in this store.

    All ranks of a job have to do so with the same checkpoint. With ``ranks``, only their shards are read.

    Raises:
        InconsistentCheckpointError, MissingPartitionError, DamagedPartitionError, FormatError: this store lacks data of
            the rank.
        StateMismatchError: the state does not fit; nothing was overwritten.
        StorageError: a tensor cannot be allocated, or a thread cannot be started.
        PartialRestoreError: damage was found after some tensors were overwritten.
        RefusedStateError: an object refused its state.
    """
    listing, resolved = _resolved_part(tier, run, ref, wanted.rank or 0, ranks)
    with resolved.sources:
        try:
            state = _load_one(wanted, resolved)
        except StateMismatchError as error:
            # Another checkpoint might fit by chance, and training would continue from it in silence.
            if listing.is_whole or not error.lacking:
                raise
            if listing.world_size != wanted.world_size:
                error.lacking = ()  # the store of another rank may be lost
            raise InconsistentCheckpointError(f"{tier.root}: {error}; other ranks may have saved it") from error
    return Loaded(state, run, ref, resolved.manifests)


def _resolved_part(
    tier: ReadTier, run: str, ref: CheckpointRef, rank: int, ranks: Spans | None
) -> tuple[CheckpointFiles, Resolved]:
    """Open the packs of the shards for :func:`load_part`. A drive that cannot be read lacks them."""
    try:
        listing = tier.manifests.listing(run, ref).of_ranks(ranks)
        if not listing.world_size:
            raise InconsistentCheckpointError(f"{tier.root}: nothing of {ref} is here")
        present = [name.rank for name in listing.manifests]
        own = rank % listing.world_size
        if own not in present or len(present) != len(set(present)):
            raise InconsistentCheckpointError(f"{tier.root}: what rank {own} saved at {ref} is not here")
        return listing, resolve_manifests(tier, listing, tier.manifests.read_all(listing))
    except (LockTimeoutError, *INCONCLUSIVE):
        raise
    except StorageError as error:
        raise InconsistentCheckpointError(str(error)) from error


def load_captured(manifest: Manifest, payload: Callable[[Digest], memoryview], into: object) -> object:
    """Fill a state from a capture in memory; ``payload`` returns the bytes of a partition.

    Raises:
        StateMismatchError: the state does not fit; nothing was overwritten.
        DigestMismatchError: the memory was damaged; tensors may have been overwritten.
    """
    filler = InPlaceFill(into, ShardSet([manifest]), grows=True, returns=True)
    assembly = Assembly(filler.demands, torch.device("cpu"))

    def checked(name: Digest) -> memoryview:
        data = payload(name)
        if digest(data) != name:
            raise DigestMismatchError(f"digest mismatch in partition {name.hex()} in memory; restore() reads the store")
        return data

    with noting_overwritten(partial(_changed, filler, assembly)):
        execute_in_memory(assembly, checked)
        return _finish(filler, assembly)


@contextlib.contextmanager
def noting_overwritten(names: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Give an error of the block the names of overwritten tensors.

    This includes KeyboardInterrupt, after which a program may save its state and end.
    """
    try:
        yield
    except BaseException as error:
        if not getattr(error, "overwritten", ()):
            setattr(error, "overwritten", tuple(names()))  # noqa: B010 - only errors of this package declare it
        raise


def fetch_in_place(resolved: Resolved, assembly: Assembly) -> None:
    """Execute a plan that may fill tensors of the caller.

    Raises:
        StateMismatchError: tensors, or elements of one, share memory, but their values differ in the checkpoint; all
            were overwritten.
        DamagedPartitionError: no copy of a partition is intact; nothing was overwritten.
        PartialRestoreError: no copy of a partition is intact; some tensors were overwritten.
        RemoteUnreachableError, TooManyFilesError, LockTimeoutError: a partition could not be read; the message lists
            overwritten tensors.
    """
    try:
        execute(assembly, resolved)
        _check_overlapping(resolved, assembly.overlapping)
    except AsymcheckError as error:
        error.overwritten = tuple(assembly.overwritten())
        if not error.overwritten or not isinstance(error, (DamagedPartitionError, LockTimeoutError, *INCONCLUSIVE)):
            raise
        if isinstance(error, DamagedPartitionError):
            raise PartialRestoreError(str(error), error.overwritten, None) from error
        # Not a PartialRestoreError, after which an older checkpoint would replace this one, which may be intact.
        told = _overwritten(error.overwritten)
        cut_off = type(error)(f"{error}. {told}; the state is a mixture until a restore into it succeeds")
        cut_off.overwritten = error.overwritten
        raise cut_off from error


def _check_overlapping(resolved: Resolved, filled: Sequence[tuple[torch.Tensor, Demand]]) -> None:
    """Compare tensors that may share memory with the checkpoint again."""
    wrong = []
    for tensor, demand in filled:
        # One at a time, because a buffer and its views may need most of the memory.
        expected = Demand(demand.row, demand.pieces)
        assembly = Assembly([expected], torch.device("cpu"))
        execute(assembly, resolved)
        if not holds(tensor, assembly.tensor(expected)):
            wrong.append(demand.row.name)
    if wrong:
        raise StateMismatchError(
            f"{listed(wrong)}: shares memory with other tensors of the given state or among its elements, but their "
            "values differ in the checkpoint. All were overwritten, and the last one won. Give each tensor its own "
            "memory"
        )


def _changed(filler: InPlaceFill, assembly: Assembly) -> list[str]:
    """Return the names of tensors that were filled in place, or handed to ``load_state_dict()``."""
    return [*dict.fromkeys([*assembly.overwritten(), *filler.loaded])]


def _finish(filler: InPlaceFill, assembly: Assembly) -> object:
    try:
        return filler.finish(assembly)
    except RefusedStateError as error:
        names = _changed(filler, assembly)
        raise RefusedStateError(f"{error}. {_overwritten(names)}", names, None) from error.__cause__


def _overwritten(names: Sequence[str]) -> str:
    if not names:
        return "No tensor was overwritten"
    return f"{'1 tensor was' if len(names) == 1 else f'{len(names)} tensors were'} overwritten already: {listed(names)}"


def _with_next_step(tier: ReadTier, error: PartialRestoreError, attempts: Iterator[Resolved]) -> PartialRestoreError:
    """Return an error with the store, the overwritten tensors and an older checkpoint that can be restored instead."""
    advice = "no older checkpoint is consistent"
    step: int | None = None
    try:
        following = next(attempts, None)
    except AsymcheckError as problem:
        following = None
        advice = f"the next older checkpoint cannot be read: {problem}"
    if following is not None:
        following.sources.close()
        step = following.ref.step
        advice = f"restore {following.ref} instead (step={step})"
    message = f"store {tier.root}: {error}. {_overwritten(error.overwritten)}; {advice}"
    return PartialRestoreError(message, error.overwritten, step)
