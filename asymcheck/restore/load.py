"""Load: resolve, fetch, assemble; a damaged candidate gives way to the next one, and the reasons are kept."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from asymcheck.errors import (
    UNKNOWING,
    AsymcheckError,
    DamagedPartitionError,
    DigestMismatchError,
    FormatError,
    InconsistentCheckpointError,
    PartialRestoreError,
    RefusedStateError,
    StateMismatchError,
)
from asymcheck.events import timed
from asymcheck.format.digest import digest
from asymcheck.format.manifest import Manifest
from asymcheck.restore.assemble import Assembly, holds
from asymcheck.restore.in_place import InPlaceFill
from asymcheck.restore.read_plan import Demand, demands_of, execute, execute_in_memory, read_parts
from asymcheck.restore.reshard import ShardSet, box_of
from asymcheck.restore.resolve import Resolved, candidates, resolve_each, resolve_manifests
from asymcheck.restore.state_template import with_tensors
from asymcheck.state.shards import TensorShard
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.types import CheckpointRef, Digest

_SHOWN = 8
_ATTEMPTS = 8


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Result of reading a checkpoint."""

    state: object
    """The state, or what else was made."""
    run: str
    """The run."""
    ref: CheckpointRef
    """The checkpoint that was read."""
    manifests: Sequence[Manifest]
    """Those of its ranks that were read, in their order."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that were passed over, with the reasons."""


Read = Callable[[Resolved], object]
"""Makes the result of one checkpoint; raises DamagedPartitionError or FormatError to have the next one tried."""


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """Request to read a checkpoint."""

    tensors: str
    """A glob of the dotted names that are wanted."""
    into: object
    """A state to be filled; None for new tensors."""
    device: torch.device
    """Where new tensors are made."""
    fall_back: bool = False
    """Whether a checkpoint that turns out to be damaged half-way gives way to the next older one in place, too."""
    rank: int | None = None
    """Rank that reads; None for the merged state of all ranks."""
    grows: bool = False
    """Whether mappings inside of :attr:`into` get back what they lack."""


def load(tier: ReadTier, run: str, step: int | str | None, wanted: LoadRequest) -> Loaded:
    """Read a checkpoint, every byte verified, into new tensors or existing ones.

    Raises:
        CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: as :func:`read_first`.
        StateMismatchError: ``into`` does not fit; nothing was overwritten.
        PartialRestoreError: filling in place failed half-way.
        RefusedStateError: an object refused its state.
    """
    return read_first(tier, run, step, partial(_load_one, tier, wanted), fall_back=wanted.fall_back)


def read_first(tier: ReadTier, run: str, step: int | str | None, read: Read, *, fall_back: bool = False) -> Loaded:
    """Read the newest checkpoint that can be read, or that of ``step``.

    With ``fall_back``, one whose damage shows when something was overwritten already gives way, too: the next one
    overwrites it again.

    Raises:
        PartialRestoreError: something was overwritten, and then the checkpoint proved damaged.
        CheckpointNotFoundError: there is none.
        InconsistentCheckpointError: none of the candidates can be restored; lists the reasons.
        HeadRecordError: which checkpoint is newest cannot be known.
    """
    with timed("find", 0, lambda: {"run": run}):
        listings = candidates(tier, run, step)
    skipped: list[str] = []
    for _ in range(_ATTEMPTS):
        skipped.clear()
        loaded = _first(tier, listings, skipped, read, fall_back=fall_back)
        if loaded is not None:
            return loaded
        if step is not None:
            break
        # A training that keeps a few checkpoints may have deleted these since they were listed, and saved others; or
        # the newest was not complete then, and is now.
        seen = set(listings)
        listings = candidates(tier, run, step)
        if seen.issuperset(listings):
            break
    what = f"no checkpoint of run {run!r} can be restored"
    if step is not None:
        name = step if isinstance(step, str) else f"step {step}"
        what = f"{name} of run {run!r} cannot be restored; other steps may be intact"
    message = f"store {tier.root}: {what}; run asymcheck verify {tier.root} for all the damage:"
    raise InconsistentCheckpointError(message, skipped)


def _first(
    tier: ReadTier, listings: list[CheckpointFiles], skipped: list[str], read: Read, *, fall_back: bool
) -> Loaded | None:
    """Read the first of the checkpoints that can be read; append to ``skipped`` why others were passed over."""
    attempts = resolve_each(tier, listings, skipped)
    spoilt: PartialRestoreError | None = None
    for resolved in attempts:
        with resolved.sources:
            try:
                state = read(resolved)
            except (DamagedPartitionError, FormatError) as error:
                skipped.append(f"{resolved.ref}: {error}")
            except RefusedStateError:
                # What an object refuses now, it would refuse of an older checkpoint, too.
                raise
            except PartialRestoreError as error:
                if not fall_back:
                    raise _with_next_step(error, attempts) from error
                skipped.append(f"{resolved.ref}: {error}")
                spoilt = error
            except StateMismatchError as error:
                if spoilt is None:
                    raise
                message = f"{spoilt}. The next older one does not fit: {error}"
                raise PartialRestoreError(message, spoilt.overwritten, None) from error
            else:
                return Loaded(state, resolved.run, resolved.ref, resolved.manifests, tuple(skipped))
    if spoilt is not None:
        raise _with_next_step(spoilt, attempts) from spoilt
    return None


def _load_one(tier: ReadTier, wanted: LoadRequest, resolved: Resolved) -> object:
    if wanted.into is None:
        return _load_anew(tier, wanted, resolved)
    own = (wanted.rank or 0) % resolved.manifests[0].header.world_size
    parts = ShardSet(resolved.manifests, [manifest.header.rank for manifest in resolved.manifests].index(own))
    with _saying_what_is_left(tier, resolved, parts, "\n"):
        filler = InPlaceFill(wanted.into, parts, wanted.tensors, grows=wanted.grows)
    assembly = Assembly(filler.demands, wanted.device, resolved.sources)
    fetch_in_place(tier, resolved, assembly)
    return _finish(filler, assembly)


def _load_anew(tier: ReadTier, wanted: LoadRequest, resolved: Resolved) -> object:
    parts, shape = read_parts(resolved.manifests, resolved.ref, wanted.rank, wanted.tensors)
    with _saying_what_is_left(tier, resolved, parts, ". "):
        demands = demands_of(parts, shape, whole=wanted.rank is None)
    assembly = Assembly(demands.values(), wanted.device, resolved.sources)
    execute(assembly, tier, resolved)
    return with_tensors(shape, {number: _present(assembly, demand) for number, demand in demands.items()})


def _present(assembly: Assembly, demand: Demand) -> object:
    """Return a tensor as it stands in the state: a part of a whole says so."""
    tensor, box = assembly.tensor(demand), box_of(demand.row)
    return tensor if box.is_whole else TensorShard(tensor, box.whole, box.offset)


@contextlib.contextmanager
def _saying_what_is_left(tier: ReadTier, resolved: Resolved, parts: ShardSet, separator: str) -> Iterator[None]:
    """Say of a checkpoint whose parts make up no whole tensors who can read it, and which other one may be whole."""
    try:
        yield
    except StateMismatchError as error:
        ranks = resolved.manifests[0].header.world_size
        if not parts.gaps or len(resolved.manifests) < ranks:
            # What is not here may be elsewhere.
            raise
        older: list[CheckpointRef] = []
        with contextlib.suppress(AsymcheckError):
            listings = tier.manifests.checkpoints(resolved.run)
            older = [one.ref for one in listings if one.is_complete and one.ref < resolved.ref]
        instead = f"; or ask for an older step, such as step={older[-1].step}" if older else ""
        who = f"{ranks} ranks saved: as many can" if ranks > 1 else "its rank saved: who wants no more can"
        advice = f"{resolved.ref} has all that {who} still restore their own parts of it{instead}"
        raise StateMismatchError(f"{error}{separator}{advice}") from error


def load_part(tier: ReadTier, run: str, ref: CheckpointRef, wanted: LoadRequest) -> Loaded:
    """Fill what one rank has with what it, or the one in its place, saved in a checkpoint, whether all of it is there.

    That is right when each rank of the job does so with the same checkpoint.

    Raises:
        InconsistentCheckpointError, MissingPartitionError, DamagedPartitionError, FormatError, StorageError: what the
            rank needs is not here.
        StateMismatchError: the state does not fit; nothing was overwritten.
        PartialRestoreError: some of it was overwritten, and then the rest proved damaged.
        RefusedStateError: an object refused its state.
    """
    listing = tier.manifests.listing(run, ref)
    if not listing.world_size:
        raise InconsistentCheckpointError(f"{tier.root}: nothing of {ref} is here")
    ranks = [name.rank for name in listing.manifests]
    own = (wanted.rank or 0) % listing.world_size
    if own not in ranks or len(ranks) != len(set(ranks)):
        raise InconsistentCheckpointError(f"{tier.root}: what rank {own} saved at {ref} is not here")
    manifests = tier.manifests.read_all(listing)
    with resolve_manifests(tier, listing, manifests).sources as sources:
        try:
            state = _load_one(tier, wanted, Resolved(run, ref, manifests, sources))
        except StateMismatchError as error:
            if listing.is_whole:
                raise
            raise InconsistentCheckpointError(f"{tier.root}: {error}; other ranks may have saved it") from error
    return Loaded(state, run, ref, manifests)


def load_captured(manifest: Manifest, payload: Callable[[Digest], memoryview], into: object) -> object:
    """Fill a state from a capture in memory; ``payload`` gives the bytes of a partition.

    Raises:
        StateMismatchError: it does not fit; nothing was overwritten.
        DigestMismatchError: the memory has changed; tensors may have been overwritten.
    """
    filler = InPlaceFill(into, ShardSet([manifest]), grows=True)
    assembly = Assembly(filler.demands, torch.device("cpu"))

    def checked(name: Digest) -> memoryview:
        data = payload(name)
        if digest(data) != name:
            raise DigestMismatchError(f"digest mismatch in partition {name.hex()} in memory; restore() reads the store")
        return data

    execute_in_memory(assembly, checked)
    return _finish(filler, assembly)


def fetch_in_place(tier: ReadTier, resolved: Resolved, assembly: Assembly) -> None:
    """Execute a plan that may fill tensors of the caller.

    Raises:
        StateMismatchError: some share memory, and differ in the checkpoint where they do; all were overwritten.
        DamagedPartitionError: no copy of a partition is intact; nothing was overwritten.
        PartialRestoreError: the same, when something was.
        RemoteUnreachableError, TooManyFilesError: nothing is known; the message says what was overwritten.
    """
    try:
        execute(assembly, tier, resolved)
        _check_overlapping(tier, resolved, assembly.overlapping)
    except (DamagedPartitionError, *UNKNOWING) as error:
        overwritten = assembly.overwritten()
        if not overwritten:
            raise
        if isinstance(error, DamagedPartitionError):
            raise PartialRestoreError(str(error), overwritten, None) from error
        # Not a PartialRestoreError: for that, an older checkpoint would be taken for this one, which may be sound.
        message = f"{error}. {_overwritten(overwritten)}; the state is a mixture until a restore into it succeeds"
        raise type(error)(message) from error


def _check_overlapping(tier: ReadTier, resolved: Resolved, filled: Sequence[tuple[torch.Tensor, Demand]]) -> None:
    """Read again what was put into tensors that share some of their memory, and see that it is there."""
    wrong = []
    for tensor, demand in filled:
        # One at a time: a buffer and all its views may be most of what fits into memory.
        expected = Demand(demand.row, demand.pieces)
        assembly = Assembly([expected], torch.device("cpu"))
        execute(assembly, tier, resolved)
        if not holds(tensor, assembly.tensor(expected)):
            wrong.append(demand.row.name)
    if wrong:
        raise StateMismatchError(
            f"{', '.join(wrong[:_SHOWN])}: shares memory with other tensors of the given state that differ from it in "
            "the checkpoint, and holds theirs now; all were overwritten. Give each tensor memory of its own"
        )


def _finish(filler: InPlaceFill, assembly: Assembly) -> object:
    try:
        return filler.finish(assembly)
    except RefusedStateError as error:
        names = assembly.overwritten()
        raise RefusedStateError(f"{error}. {_overwritten(names)}", names, None) from error.__cause__


def _overwritten(names: Sequence[str]) -> str:
    if not names:
        return "No tensor was overwritten"
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"{'1 tensor was' if len(names) == 1 else f'{len(names)} tensors were'} overwritten already: {shown}"


def _with_next_step(error: PartialRestoreError, attempts: Iterator[Resolved]) -> PartialRestoreError:
    """Say what was overwritten and which older checkpoint could be restored instead."""
    following = next(attempts, None)
    if following is not None:
        following.sources.close()
    advice = (
        f"restore {following.ref} instead (step={following.ref.step})"
        if following is not None
        else "no older checkpoint is consistent"
    )
    step = None if following is None else following.ref.step
    return PartialRestoreError(f"{error}. {_overwritten(error.overwritten)}; {advice}", error.overwritten, step)
