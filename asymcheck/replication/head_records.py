"""Copy head records between a store and a remote location, if both belong to one training (SPEC.md §A5.2)."""

from __future__ import annotations

from asymcheck.errors import FormatError, HeadRecordError, InvalidInputError, UnsupportedFormatError
from asymcheck.restore.lineage import intact_heads
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.remote import RemoteTier


def publish_heads(local: ReadTier, remote: RemoteTier, run: str) -> set[int]:
    """Publish the head records of a run that a location lacks; return the generations that then have one there.

    Return an empty set without a request if the store has no head record.

    Raises:
        HeadRecordError: a head record is damaged in the store or at the location.
        InvalidInputError: another training has used the run name at the location.
        RemoteUnreachableError, StorageError: the location failed.
    """
    if not (own := local.manifests.heads(run)):
        return set()
    present = set(remote.manifests.heads(run))
    # Checking the last common record is enough, because it names its parent by a random id. Records without a parent
    # differ in their time.
    common = [number for number in own if number in present]
    numbers = [*common[-1:], *(number for number in own if number not in present)]
    try:
        heads = [local.manifests.read_head(run, number) for number in numbers]
    except FormatError as error:
        raise HeadRecordError(f"{local.root}: {error}; run asymcheck verify {local.root}") from error
    try:
        for head in heads:
            if head is not None and head[0].generation in present:
                remote.manifests.check_head(head[0])
            elif head is not None:
                remote.manifests.publish_head(head[0])
    except UnsupportedFormatError as error:
        raise HeadRecordError(f"{remote.location}: {error}") from error
    except FormatError as error:
        raise HeadRecordError(f"{remote.location}: {error}; remove that file there, and push again") from error
    return present.union(own)


def pull_heads(remote: RemoteTier, local: NvmeTier, run: str) -> None:
    """Copy the head records of a run that are missing or damaged in the store.

    Raises:
        InvalidInputError: a local record differs, or may differ: two trainings have used the same run name.
        FormatError: a required record is damaged at the location.
    """
    numbers = remote.manifests.heads(run)
    with remote.manifests.reading_heads(run, numbers):
        for generation in numbers:
            _pull_head(remote, local, run, generation)


def _pull_head(remote: RemoteTier, local: NvmeTier, run: str, generation: int) -> None:
    try:
        own = local.manifests.read_head(run, generation)
    except UnsupportedFormatError:
        raise
    except FormatError:
        fetch_head(remote, local, run, generation)
        return
    if own is None:
        missing = remote.manifests.read_head(run, generation)
        if missing is None or local.manifests.publish_head(missing[0]):
            return
        own = local.manifests.read_head(run, generation)
    if own is None or not all(own[0].is_same(head) for head in intact_heads(remote, run, [generation])):
        raise InvalidInputError(
            f"cannot pull run {run!r} into store {local.root}: its generation {generation} differs from the one at "
            f"{remote.location}, so another training of this name was saved in the store; pull into another store"
        )


def fetch_head(remote: RemoteTier, local: NvmeTier, run: str, generation: int) -> None:
    """Copy one head record that is missing or damaged in the store.

    Raises:
        InvalidInputError: the location has no such record, or one of another training.
        FormatError: the record is damaged at the location, too.
    """
    head = remote.manifests.read_head(run, generation)
    if head is None:
        raise InvalidInputError(f"{remote.location} has no head record of generation {generation} of run {run!r}")
    if not _have_one_training(remote, local, run, generation):
        raise InvalidInputError(
            f"cannot copy head record {generation} of run {run!r} from {remote.location}: it has no checkpoint of that "
            f"generation in common with store {local.root}, so the record may be that of another training"
        )
    if generation in local.manifests.heads(run):
        local.manifests.replace_head(head[0])
    else:
        local.manifests.publish_head(head[0])


def _have_one_training(remote: RemoteTier, local: NvmeTier, run: str, generation: int) -> bool:
    """Tell whether a generation is the same on both sides, by a common random save id or by a later generation."""
    common = set(remote.manifests.refs(run)).intersection(local.manifests.refs(run))
    if any(ref.generation == generation for ref in common):
        return True
    # Equal records of a later generation name the same parent and the same start in nanoseconds.
    return any(
        own.is_same(other)
        for number in remote.manifests.heads(run)
        if number > generation
        for own in intact_heads(local, run, [number])
        for other in intact_heads(remote, run, [number])
    )
