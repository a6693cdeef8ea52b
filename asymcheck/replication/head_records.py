"""Head records on their way from a remote location into a store, when both have one training (SPEC.md §6.2)."""

from __future__ import annotations

from asymcheck.errors import FormatError, InvalidInputError, UnsupportedFormatError
from asymcheck.format.record import HeadRecord
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.remote import RemoteTier


def pull_heads(there: RemoteTier, here: NvmeTier, run: str) -> None:
    """Publish the head records of a run that are not here, and replace those of which no copy is intact here.

    Raises:
        InvalidInputError: one that is here is another one, or may be: two trainings have the same run name.
        FormatError: one that is needed is damaged there.
    """
    for generation in there.manifests.heads(run):
        try:
            own = here.manifests.read_head(run, generation)
        except UnsupportedFormatError:
            raise
        except FormatError:
            bring_head(there, here, run, generation)
            continue
        if own is None:
            missing = there.manifests.read_head(run, generation)
            if missing is None or here.manifests.publish_head(missing[0]):
                continue
            own = here.manifests.read_head(run, generation)
        found = _intact(there, run, generation)
        if own is None or (found is not None and not own[0].is_same(found)):
            raise InvalidInputError(
                f"store {here.root} has another generation {generation} of run {run!r} than {there.location}: "
                "another training of this name was saved here; pull into another store"
            )


def bring_head(there: RemoteTier, here: NvmeTier, run: str, generation: int) -> None:
    """Put a head record here that is missing, or of which no copy is intact.

    Raises:
        InvalidInputError: the location has no such record, or none of the same training.
        FormatError: it is damaged there, too.
    """
    found = there.manifests.read_head(run, generation)
    if found is None:
        raise InvalidInputError(f"{there.location} has no head record of generation {generation} of run {run!r}")
    if not _have_one_training(there, here, run, generation):
        raise InvalidInputError(
            f"{there.location} has no checkpoint of generation {generation} of run {run!r} in common with store "
            f"{here.root}, so its head record may be that of another training"
        )
    if generation in here.manifests.heads(run):
        here.manifests.replace_head(found[0])
    else:
        here.manifests.publish_head(found[0])


def _have_one_training(there: RemoteTier, here: NvmeTier, run: str, generation: int) -> bool:
    """Tell whether a generation is the same on both sides: by a save id, which is random, or by what came after it."""
    common = set(there.manifests.refs(run)).intersection(here.manifests.refs(run))
    if any(ref.generation == generation for ref in common):
        return True
    # A later one has its parent by a save id, or was opened at the same nanosecond.
    later = [number for number in there.manifests.heads(run) if number > generation]
    pairs = ((_intact(there, run, number), _intact(here, run, number)) for number in later)
    return any(one is not None and other is not None and one.is_same(other) for one, other in pairs)


def _intact(tier: ReadTier, run: str, generation: int) -> HeadRecord | None:
    try:
        found = tier.manifests.read_head(run, generation)
    except UnsupportedFormatError:
        raise
    except FormatError:
        return None
    return None if found is None else found[0]
