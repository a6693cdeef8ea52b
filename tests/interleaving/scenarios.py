"""Scenarios: processes that use one store at the same time."""

from __future__ import annotations

import contextlib
from pathlib import Path

from asymcheck.format.frame import frame_length, payload_offset
from asymcheck.types import Digest
from tests.crash.actions import Action, open_store
from tests.damage.flips import flip
from tests.interleaving.execution import Scenario
from tests.interleaving.remote import push_before
from tests.interleaving.trainings import leave_lock

READER: list[Action] = [["load", 1], ["newest"], ["list"], ["verify"]]


def damage_garbage(store_path: Path) -> None:
    """Flip a bit of a frame that no checkpoint needs, in a pack with needed frames."""
    with open_store(store_path, read_only=True) as store:
        tier = store.resources.nvme
        (listing,) = tier.manifests.checkpoints("default")
        needed = {name for manifest in tier.manifests.read_all(listing) for name in manifest.partitions()}
        for pack_id in tier.pack_ids():
            with contextlib.closing(tier.open_pack(pack_id)) as pack:
                names = [Digest(entry["digest"].tobytes()) for entry in pack.entries]
                if needed.isdisjoint(names):
                    continue
                for entry, name in zip(pack.entries, names, strict=True):
                    if name not in needed:
                        offset = int(entry["offset"]) + payload_offset(int(entry["plain_length"]))
                        assert offset < int(entry["offset"]) + frame_length(int(entry["plain_length"]))
                        flip(tier.pack_path(pack_id), 8 * offset)
                        return
    raise AssertionError("no pack has needed and unneeded frames")


SCENARIOS = {
    # The save reuses partitions of packs that the collection copies into others, or that it frees.
    "reuse": Scenario(
        [["save", 0], ["save", 1]],
        {"save": [["save", 2, 0]], "gc": [["delete", 0], ["gc"]], "read": READER},
    ),
    "reuse-all": Scenario(
        [["save", 0], ["save", 2]],
        {"save": [["save", 4, 2]], "gc": [["delete", 2], ["gc"]], "read": [["load", 0], ["newest"], ["verify"]]},
    ),
    # The save overwrites packs that are freed, and that the reader may be reading.
    "recycle": Scenario(
        [["save", 0], ["save", 1], ["save", 2], ["delete", 0], ["gc"]],
        {"save": [["save", 3], ["save", 4]], "gc": [["delete", 2], ["gc"]], "read": [["load", 2], *READER]},
    ),
    "writers": Scenario(
        [["save", 0], ["save", 1]],
        {"one": [["save", 2, 0]], "other": [["save", 3, 0]], "gc": [["delete", 0], ["gc"]]},
    ),
    # The collections copy live frames out of packs that are mostly garbage.
    "repack": Scenario(
        [["save", 0], ["save", 1], ["save", 2], ["save", 4], ["delete", 0], ["delete", 2]],
        {"save": [["save", 6, 2]], "gc": [["gc"]], "read": [["load", 4], *READER]},
    ),
    "collections": Scenario(
        [["save", 0], ["save", 2], ["save", 4]],
        {"one": [["delete", 0], ["gc"]], "other": [["delete", 2], ["gc"]], "save": [["save", 6, 0]]},
    ),
    # The processes open the catalog as part of the schedule. If the others are dead, they rebuild it.
    "restart": Scenario(
        [["save", 0], ["save", 1]],
        {"first": [["save", 2, 0]], "second": [["save", 3, 0]], "gc": [["delete", 0], ["gc"]], "read": READER},
        late=frozenset({"second", "gc", "read"}),
    ),
    "generations": Scenario(
        [["save", 0], ["save", 1]],
        {"one": [["branch", 0], ["save", 2]], "other": [["branch", 0], ["save", 3]], "gc": [["gc"]]},
    ),
    "retention": Scenario(
        [["save", 0], ["save", 1], ["save", 2]],
        {"save": [["save", 3, 0]], "prune": [["keep", 1]], "gc": [["gc"]], "read": [["newest"], ["list"], ["verify"]]},
    ),
    "rebuild": Scenario(
        [["save", 0], ["save", 1]],
        {"rebuild": [["rebuild"]], "save": [["save", 2, 0]], "gc": [["delete", 0], ["gc"]]},
    ),
    "repair": Scenario(
        [["save", 0], ["save", 1], ["delete", 0]],
        {"repair": [["repair"]], "save": [["save", 2]], "gc": [["gc"]], "read": [["load", 1], ["newest"], ["list"]]},
        prepare=damage_garbage,
        after=[["repair"]],
        loses_power=False,
    ),
    # Both trainings find the lock of a dead one. If the first is killed, the restart or the start of another run adopts
    # its ring, beside commands.
    "capture": Scenario(
        [["save", 0], ["save", 1]],
        {
            "train": [["train", 2]],
            "restart": [["train", 1]],
            "other": [["train-other", 1]],
            "look": [["rings"], ["gc-rings"]],
        },
        late=frozenset({"restart", "other", "look"}),
        prepare=leave_lock,
        loses_power=False,
        finish={"again": [["train", 1]]},
    ),
    # The retention of a training frees packs while the next capture is committed.
    "capture-pruned": Scenario(
        [["save", 0]],
        {"train": [["train-pruned", 4]], "restart": [["train-pruned", 2]], "gc": [["gc"]], "look": [["verify"]]},
        late=frozenset({"restart"}),
        finish={"again": [["train", 1]]},
    ),
    # If a rank is killed, the other one gives up, and both start again.
    "ranks": Scenario(
        [["save", 0], ["save", 1]],
        {"one": [["rank", 0, 2, 0]], "other": [["rank", 1, 2, 0]], "gc": [["delete", 0], ["gc"]]},
        finish={"again-one": [["rank", 0, 1, 1]], "again-other": [["rank", 1, 1, 1]]},
        loses_power=False,
    ),
    # Two pushes rely on packs that collections at the remote location free.
    "push": Scenario(
        [["save", 0], ["save", 1], ["save", 2]],
        {
            "one": [["push", 1]],
            "other": [["push", 2], ["push", 1]],
            "far": [["far-delete", 0], ["far-gc"]],
            "far-gc": [["far-gc"]],
        },
        prepare=push_before(0),
        pushed=(0,),
    ),
    # Pushes read packs that the collection of the store frees.
    "push-of-garbage": Scenario(
        [["save", 0], ["save", 1], ["save", 2]],
        {"push": [["push", 1]], "gc": [["delete", 0], ["delete", 2], ["gc"]], "save": [["save", 3, 0]]},
        prepare=push_before(0),
        pushed=(0,),
    ),
    # The pull relies on packs of the deleted checkpoint, which the collections free and the save reuses.
    "pull": Scenario(
        [["save", 0], ["save", 1], ["save", 2]],
        {
            "pull": [["delete", 0], ["pull", 0]],
            "gc": [["delete", 2], ["gc"]],
            "save": [["save", 3, 0]],
            "read": [["load", 1], ["newest"], ["list"]],
        },
        prepare=push_before(0),
        pushed=(0,),
    ),
}
