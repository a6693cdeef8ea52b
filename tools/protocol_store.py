"""Model of a store for :mod:`tools.protocol`: saves, deletions, collections, repairs and a reader (SPEC.md §8).

A state has the files of a store with their durable and pending names, the catalog, the manifests, and the next step of
each process. The invariants treat each pending name as lost or kept, whichever is worse.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

Names = frozenset[str]
Packs = frozenset[int]
Move = tuple[str, Any]
"""Text of a step, and the state after it."""

RULES = {
    "lock-until-pinned": "§8.1 step 3: a writer holds the lock on a new pack until the pack is pinned",
    "sync-pack": "§8.1 step 2: a pack is synced before its rename",
    "sync-packs": "§8.1 step 2: the folder of packs is synced before the catalog has the pack",
    "check-reused": "§8.1 step 3: the transaction that pins reused packs checks that they are live",
    "pin": "§8.1 step 3: packs are pinned until the catalog has the manifest",
    "pin-bases": "§12.5: a writer relies on the pack of a base as on a reused partition",
    "pin-then-commit": "§8.1 step 4: the manifest is renamed after the packs were pinned",
    "sync-manifest": "§8.1 step 4: the folder of a manifest is synced before the save is reported",
    "sync-head": "§8.1 step 4: the head record of a generation is durable before its first manifest",
    "exclusive-head": "§3: of two writers of one head record, one fails",
    "sync-deletion": "§8.2: the folder of a deleted manifest is synced before the deletion is reported",
    "sync-kept": "§8.2: the checkpoint that retention keeps is synced before older ones are deleted",
    "dead-pins-first": "§8.3 step 1: dead owners are found before the manifests are listed",
    "live-bases": "§8.3 step 2: the base of a frame of a live digest is live",
    "sync-found-deletions": "§8.3 step 2: folders of manifests that others deleted are synced",
    "lock-garbage": "§8.3 step 3: a pack is locked before it is freed",
    "see-manifests": "§8.3 step 4: the catalog names no manifest that the collection did not see",
    "skip-pinned": "§8.3 step 4: pinned packs are skipped",
    "lock-until-synced": "§8.3 step 5: the lock on a freed pack is held until both folders are synced",
    "sync-pool": "§8.3: the pool is synced before one of its files is overwritten",
    "repack-copies-live": "§8.3: a pack is freed only if each digest live by then has another copy",
    "relied-is-live": "§8.3, §8.4: the packs that have the other copies are live in the transaction",
    "replace-skips-pinned": "§8.3, §8.4 step 3: no pin names the pack that is replaced",
    "reader-locks": "§8.3: a reader holds a shared lock on a pack while it reads from it",
    "reader-checks-name": "§8.3: a reader checks after locking that the path still names the file",
    "reader-lists-again": "§10.3: a reader lists the packs again before it rejects a checkpoint",
    "rebuild-syncs": "§10.4: the folder of packs is synced before a rebuilt catalog names them",
}


class File(NamedTuple):
    """A pack file: t3 is `packs/3.tmp`, p3 is `packs/3.pack`, q3 is `pool/3.pack`, and the empty name is none."""

    names: tuple[str, ...] = ("",)
    """The durable name, then the pending ones; the last is the current name."""
    pack: int = 0
    """Pack id in the header; 0 while the file is written."""
    frames: Names = frozenset()
    """Digests; `d>a` is stored with base a, and `!a` is damaged."""
    is_synced: bool = True
    owner: int = -1
    """Process with the exclusive lock."""
    is_shared: bool = False
    """Whether the reader holds a shared lock."""


class Catalog(NamedTuple):
    """The catalog of a store."""

    places: frozenset[tuple[str, int]] = frozenset()
    packs: frozenset[tuple[int, bool]] = frozenset()
    """Pack ids, and whether they are live (or freed)."""
    manifests: Packs = frozenset()
    pins: frozenset[tuple[int, int, Packs]] = frozenset()
    """Checkpoint, process (-1 if dead) and packs."""


class Manifest(NamedTuple):
    """The manifest of one checkpoint."""

    names: tuple[bool, ...] = (False,)
    """Whether its name exists: durably, then after each pending change."""
    is_reported: bool = False
    deletion: int = 0
    """1 when begun, 2 when reported."""


class Process(NamedTuple):
    """The next step of a process, and its variables."""

    step: str = ""
    checkpoint: int = -1
    file: int = -1
    pack: int = 0
    need: Names = frozenset()
    relied: frozenset[tuple[str, int]] = frozenset()
    seen: Packs = frozenset()
    known: Packs = frozenset()
    dead: Packs = frozenset()
    packs: Packs = frozenset()
    mode: str = ""


class World(NamedTuple):
    """A state."""

    files: tuple[File, ...]
    catalog: Catalog
    manifests: tuple[Manifest, ...]
    processes: tuple[Process, ...]
    left: tuple[int, ...]
    """How many of each of :data:`BUDGETS` may still happen."""
    head: tuple[int, ...] = (-1,)
    """Writer of the head record of generation 2: durable, then pending."""
    next_pack: int = 1
    lost: Names = frozenset()
    """Digests whose last intact copy was damaged."""
    problem: str = ""


BUDGETS = ("save", "delete", "collect", "repair", "read", "kill", "power", "damage")


class Scenario(NamedTuple):
    """The processes, the first state, and budgets."""

    programs: tuple[tuple[str, ...], ...]
    """Operations of each process."""
    packs: tuple[str, ...]
    """Digests in the packs of the first state."""
    saves: tuple[str, ...]
    """Digests of each checkpoint; a 2 at the end begins generation 2."""
    done: int
    """Checkpoints that exist in the first state."""
    left: tuple[int, ...]
    """Budgets."""
    slots: int = 4
    """Files."""


SCENARIOS = {
    "reuse": Scenario((("save",), ("delete", "collect")), ("a", "b"), ("a", "b", "a"), 2, (1, 1, 1, 0, 0, 1, 1, 0)),
    "recycle": Scenario((("save", "delete"), ("collect",)), ("a", "b"), ("a", "b", "c"), 2, (1, 1, 1, 0, 0, 1, 1, 0)),
    "bases": Scenario((("save",), ("delete", "collect")), ("a", "b"), ("a", "b", "d"), 2, (1, 1, 2, 0, 0, 0, 0, 0)),
    "unsynced": Scenario((("save", "delete"), ("save",)), ("c",), ("c", "a", "a"), 1, (2, 1, 0, 0, 0, 1, 1, 0)),
    "heads": Scenario((("save",), ("save",)), ("c",), ("c", "a2", "b2"), 1, (2, 0, 0, 0, 0, 1, 1, 0)),
    "repack": Scenario(
        (("save",), ("delete", "collect")), ("ab", "c"), ("ab", "c", "a", "b"), 3, (1, 1, 1, 0, 0, 1, 1, 0)
    ),
    "readers": Scenario(
        (("save",), ("delete", "collect"), ("read",)), ("ab", "c"), ("ab", "c", "a", "e"), 3, (1, 1, 1, 0, 1, 0, 0, 0)
    ),
    "repair": Scenario(
        (("save",), ("delete", "collect"), ("repair",)), ("ab", "ae"), ("e", "ab", "e"), 2, (1, 1, 1, 1, 0, 0, 0, 1)
    ),
    "all": Scenario(
        (("save", "delete"), ("save",), ("collect", "repair"), ("read",)),
        ("ab", "c"),
        ("ab", "c", "a", "bd", "a2"),
        3,
        (2, 1, 2, 1, 1, 1, 1, 1),
    ),
}


def digest(frame: str) -> str:
    """Return the digest of a frame."""
    return frame.lstrip("!")[0]


def readable(frames: Iterable[str]) -> Names:
    """Return the digests that can be decoded from frames."""
    intact = {frame for frame in frames if frame[0] != "!"}
    full = {frame for frame in intact if len(frame) == 1}
    return frozenset(full | {frame[0] for frame in intact if frame[2:] in full})


def is_current(file: File, pack: int) -> bool:
    """Tell whether the file is the pack at its path."""
    return file.names[-1] == f"p{pack}"


def renamed(file: File, name: str, **changes: Any) -> File:  # noqa: ANN401 - fields of a file
    """Return a file with a pending name."""
    return file._replace(names=(*file.names, name), **changes)


def synced(world: World, kinds: str) -> World:
    """Make the pending names in a folder durable, with the changes before them."""
    files = []
    for file in world.files:
        names = file.names
        ends = [i for i in range(1, len(names)) if (names[i - 1][:1] or "-") in kinds or (names[i][:1] or "-") in kinds]
        files.append(file._replace(names=names[ends[-1] :]) if ends else file)
    return world._replace(files=tuple(files))


PACKS, POOL = "tp", "q"


class StoreModel:
    """Writers, collections, repairs and a reader of one store."""

    def __init__(self, scenario: Scenario, without: Iterable[str] = ()) -> None:
        self.scenario, self.without = scenario, frozenset(without)

    def _has(self, rule: str) -> bool:
        return rule not in self.without

    def content(self, checkpoint: int) -> Names:
        """Return the digests that a checkpoint names."""
        return frozenset(self.scenario.saves[checkpoint].rstrip("2"))

    def first(self) -> World:
        """Return the state before all steps: some checkpoints are saved."""
        scenario, count = self.scenario, len(self.scenario.packs)
        files = [File((f"p{pack}",), pack, frozenset(frames)) for pack, frames in enumerate(scenario.packs, 1)]
        files += [File()] * (scenario.slots - count)
        saved = [Manifest((True,), is_reported=True)] * scenario.done
        manifests = (*saved, *[Manifest()] * (len(scenario.saves) - scenario.done))
        idle = (Process(),) * len(scenario.programs)
        return rebuilt(World(tuple(files), Catalog(), manifests, idle, scenario.left, next_pack=count + 1))

    def moves(self, world: World) -> Iterator[Move]:
        """Yield every next step."""
        for number, process in enumerate(world.processes):
            if process.step:
                for text, after in getattr(self, f"_{process.step}")(world, number, process):
                    yield f"P{number} {process.mode or ''} {text}".replace("  ", " "), after
                if world.left[5]:
                    yield f"P{number} is killed", spent(killed(world, number), "kill")
            else:
                for name in self.scenario.programs[number]:
                    if world.left[BUDGETS.index(name)]:
                        for text, after in getattr(self, f"_start_{name}")(world, number):
                            yield f"P{number} {text}", spent(after, name)
        if world.left[5]:
            after = world
            for number in range(len(world.processes)):
                after = killed(after, number)
            after = synced(after, PACKS) if self._has("rebuild-syncs") else after
            yield "all processes are killed, and the catalog is rebuilt (§10.4)", spent(rebuilt(after), "kill")
        if world.left[6]:
            yield from self._power_loss(spent(world, "power"))
        # A check before a pack is freed cannot detect damage that comes later.
        if world.left[7] and not any(process.mode for process in world.processes):
            yield from self._damage(spent(world, "damage"))

    def _power_loss(self, world: World) -> Iterator[Move]:
        names = [
            *(file.names for file in world.files),
            *(manifest.names for manifest in world.manifests),
            world.head,
        ]
        choices: list[Iterable[Any]] = [dict.fromkeys(choice) for choice in names]
        for number in range(len(world.processes)):
            world = killed(world, number)
        for picked in itertools.product(*choices):
            count, files = len(world.files), []
            for file, name in zip(world.files, picked, strict=False):
                lost = File() if not name else file if file.is_synced else File()
                files.append(lost._replace(names=(name,), is_synced=file.is_synced or not name))
            manifests = tuple(
                manifest._replace(names=(there,))
                for manifest, there in zip(world.manifests, picked[count:-1], strict=True)
            )
            after = world._replace(files=tuple(files), manifests=manifests, head=(picked[-1],))
            yield f"power loss leaves {[str(name) for name in picked if name]}", rebuilt(after)

    def _damage(self, world: World) -> Iterator[Move]:
        for number, file in enumerate(world.files):
            for frame in sorted(file.frames) if file.names[0][:1] == "p" and len(file.names) == 1 else ():
                if frame[0] != "!":
                    after = with_file(world, number, frames=file.frames - {frame} | {f"!{frame}"})
                    lost = readable(safe_frames(world, but_freed=True)) - readable(safe_frames(after, but_freed=True))
                    yield f"frame {frame} of pack {file.pack} is damaged", after._replace(lost=world.lost | lost)

    def problem(self, world: World) -> str:
        """Return the invariant that a state breaks, or an empty string."""
        if world.problem:
            return world.problem
        # A frame that was written on a base with unnoticed damage is lost with the base.
        have = readable({*safe_frames(world), *world.lost})
        problem = self._problem_of_manifests(world, have)
        return problem or self._problem_of_packs(world)

    def _problem_of_manifests(self, world: World, have: Names) -> str:
        for number, manifest in enumerate(world.manifests):
            missing = self.content(number) - have
            if missing and any(manifest.names):
                return f"I2: checkpoint {number} may lack partition {min(missing)}"
            if manifest.is_reported and not manifest.deletion and not all(manifest.names):
                return f"§14: checkpoint {number} was reported durable and may be lost"
            if manifest.deletion == 2 and any(manifest.names):
                return f"§8.2: checkpoint {number} was reported deleted and may return"
            if self.scenario.saves[number][-1] == "2" and any(manifest.names) and -1 in world.head:
                return f"I6: checkpoint {number} may exist without the head record of its generation"
        if not any(all(manifest.names) and not manifest.deletion for manifest in world.manifests):
            return "§8.2: retention may leave no checkpoint"
        return ""

    def _problem_of_packs(self, world: World) -> str:
        for file in world.files:
            if any(name[:1] == "p" and (name != f"p{file.pack}" or not file.is_synced) for name in file.names):
                return f"I1: the pack {file.names} may be incomplete or have another id"
        for _, owner, packs in world.catalog.pins:
            for pack in packs if owner >= 0 else ():
                if not any(is_current(file, pack) for file in world.files) or (pack, False) in world.catalog.packs:
                    return f"I5: pack {pack} is pinned, and freed"
        return ""

    # Saves (§8.1).

    def _start_save(self, world: World, number: int) -> Iterator[Move]:
        checkpoint = len(self.scenario.saves) - world.left[0]
        yield (
            f"begins to save checkpoint {checkpoint}",
            set_process(world, number, step="look_up", checkpoint=checkpoint),
        )

    def _look_up(self, world: World, number: int, process: Process) -> Iterator[Move]:
        places = dict(world.catalog.places)

        def found(name: str) -> str:
            """Return the frame of a stored partition."""
            for file in world.files:
                if is_current(file, places.get(name, 0)) and file.owner in (-1, number):
                    return next((frame for frame in file.frames if digest(frame) == name), "")
            return ""

        own = {frame for file in world.files if file.owner == number for frame in file.frames}
        relied, need = set(process.relied), set[str]()
        for name in self.content(process.checkpoint) - {*map(digest, own)}:
            frame = found(name)
            base = "a" if name == "d" and found("a") == "a" else ""
            if frame and (len(frame) == 1 or base):
                relied.add((name, places[name]))
            else:
                need.add(f"d>{base}" if base else name)
            if base and frame != "d" and self._has("pin-bases"):
                relied.add((base, places[base]))
        step = "create" if need else self._after_seal()
        yield (
            "looks up its partitions",
            set_process(world, number, step=step, need=frozenset(need), relied=frozenset(relied)),
        )

    def _after_seal(self) -> str:
        return "pin" if self._has("pin-then-commit") else "publish"

    def _create(self, world: World, number: int, _process: Process) -> Iterator[Move]:
        name = f"t{world.next_pack}"
        pooled = [i for i, f in enumerate(world.files) if f.names[-1][:1] == "q" and f.owner < 0 and not f.is_shared]
        if pooled and self._has("sync-pool"):
            world = synced(world, POOL)
        held = {process.file for process in world.processes}
        free = pooled or [i for i, f in enumerate(world.files) if f == File() and i not in held]
        for slot in free[:1]:
            file = renamed(world.files[slot], name, owner=number)
            after = set_process(put(world, slot, file), number, step="write", file=slot)
            yield f"takes {file.names[-2] or 'a new file'} as {name}", after._replace(next_pack=world.next_pack + 1)

    def _write(self, world: World, number: int, process: Process) -> Iterator[Move]:
        after = with_file(world, process.file, pack=0, frames=Names(), is_synced=False)
        yield "writes frames", set_process(after, number, step="seal")

    def _seal(self, world: World, number: int, process: Process) -> Iterator[Move]:
        pack = int(world.files[process.file].names[-1][1:])
        after = with_file(world, process.file, pack=pack, frames=process.need, is_synced=self._has("sync-pack"))
        yield "writes index and header, and syncs", set_process(after, number, step="rename")

    def _rename(self, world: World, number: int, process: Process) -> Iterator[Move]:
        file = world.files[process.file]
        owner = number if self._has("lock-until-pinned") else -1
        after = put(world, process.file, renamed(file, f"p{file.pack}", owner=owner))
        step = "relist" if process.mode else self._after_seal()
        if self._has("sync-packs"):
            step = "sync_packs"
        yield f"renames t{file.pack} to p{file.pack}", set_process(after, number, step=step)

    def _sync_packs(self, world: World, number: int, process: Process) -> Iterator[Move]:
        step = "relist" if process.mode else self._after_seal()
        yield "syncs packs/", set_process(synced(world, PACKS), number, step=step)

    def _pin(self, world: World, number: int, process: Process) -> Iterator[Move]:
        live = {pack for pack, is_live in world.catalog.packs if is_live}
        relied = frozenset(pair for pair in process.relied if pair[1] in live or not self._has("check-reused"))
        after, own = world, set[int]()
        for slot, file in enumerate(world.files):
            if (file.owner == number or slot == process.file) and file.names[-1][:1] == "p":
                after = entered(after, file)
                own.add(file.pack)
        # A frame whose base has gone is written again, too.
        lost = process.relied - relied
        packs = frozenset(own | {pack for _, pack in relied})
        pins = {pin for pin in after.catalog.pins if pin[:2] != (process.checkpoint, number)}
        if self._has("pin"):
            pins.add((process.checkpoint, number, packs))
        after = after._replace(catalog=after.catalog._replace(pins=frozenset(pins)))
        if lost:
            if lost_base := {name for name, _ in lost} - self.content(process.checkpoint):
                need = frozenset(frame[:1] for frame in process.need if frame[2:] in lost_base)
            else:
                need = frozenset(name for name, _ in lost)
            yield "pins, and finds packs gone", set_process(after, number, step="create", need=need, relied=relied)
            return
        for slot, file in enumerate(after.files):
            if file.owner == number:
                after = with_file(after, slot, owner=-1)
        is_first = self.scenario.saves[process.checkpoint][-1] == "2"
        step = "enter" if not self._has("pin-then-commit") else "begin" if is_first else "publish"
        yield f"pins packs {sorted(packs)}, and unlocks", set_process(after, number, step=step, file=-1)

    def _begin(self, world: World, number: int, _process: Process) -> Iterator[Move]:
        if world.head[-1] < 0:
            after = world._replace(head=(*world.head, number))
        elif self._has("exclusive-head") or world.head[-1] == number:
            after = world
        else:
            after = world._replace(problem="§6.2: a head record was replaced")
        step = "sync_head" if self._has("sync-head") else "publish"
        yield "publishes the head record of generation 2", set_process(after, number, step=step)

    def _sync_head(self, world: World, number: int, _process: Process) -> Iterator[Move]:
        yield "syncs heads/", set_process(world._replace(head=world.head[-1:]), number, step="publish")

    def _publish(self, world: World, number: int, process: Process) -> Iterator[Move]:
        names = world.manifests[process.checkpoint].names
        after = with_manifest(world, process.checkpoint, names=(*names, True))
        yield "renames the manifest: the commit", set_process(after, number, step="report")

    def _report(self, world: World, number: int, process: Process) -> Iterator[Move]:
        names = world.manifests[process.checkpoint].names
        names = names[-1:] if self._has("sync-manifest") else names
        after = with_manifest(world, process.checkpoint, names=names, is_reported=True)
        step = "enter" if self._has("pin-then-commit") else "pin"
        yield "syncs the folder of the manifest, and reports", set_process(after, number, step=step)

    def _enter(self, world: World, number: int, process: Process) -> Iterator[Move]:
        catalog = world.catalog
        pins = frozenset(pin for pin in catalog.pins if pin[:2] != (process.checkpoint, number))
        catalog = catalog._replace(manifests=catalog.manifests | {process.checkpoint}, pins=pins)
        yield "enters the manifest and unpins", stopped(world._replace(catalog=catalog), number)

    # Retention and deletion (§8.2).

    def _start_delete(self, world: World, number: int) -> Iterator[Move]:
        there = [i for i, manifest in enumerate(world.manifests) if manifest.names[-1]]
        for checkpoint in there[:-1]:
            if not world.manifests[checkpoint].deletion:
                after = world
                if self._has("sync-kept"):
                    after = with_manifest(world, there[-1], names=(True,))
                yield f"keeps checkpoint {there[-1]}", set_process(after, number, step="unlink", checkpoint=checkpoint)

    def _unlink(self, world: World, number: int, process: Process) -> Iterator[Move]:
        names = world.manifests[process.checkpoint].names
        after = with_manifest(world, process.checkpoint, names=(*names, False), deletion=1)
        yield f"unlinks manifest {process.checkpoint}", set_process(after, number, step="sync_deletion")

    def _sync_deletion(self, world: World, number: int, process: Process) -> Iterator[Move]:
        names = world.manifests[process.checkpoint].names
        names = names[-1:] if self._has("sync-deletion") else names
        after = with_manifest(world, process.checkpoint, names=names, deletion=2)
        yield "syncs the folder, and reports the deletion", set_process(after, number, step="forget_manifest")

    def _forget_manifest(self, world: World, number: int, process: Process) -> Iterator[Move]:
        catalog = world.catalog._replace(manifests=world.catalog.manifests - {process.checkpoint})
        yield "removes the row of the manifest", stopped(world._replace(catalog=catalog), number)

    # Collection, repacking and repair (§8.3, §8.4).

    def _start_collect(self, world: World, number: int) -> Iterator[Move]:
        after = world
        for slot, file in enumerate(world.files):
            if file.names[-1][:1] == "t" and file.owner < 0:
                after = put(after, slot, renamed(file, ""))
        step = "find_dead" if self._has("dead-pins-first") else "list_manifests"
        yield "removes temporary files", set_process(after, number, step=step)

    def _find_dead(self, world: World, number: int, process: Process) -> Iterator[Move]:
        dead = frozenset(checkpoint for checkpoint, owner, _ in world.catalog.pins if owner < 0)
        step = "list_manifests" if self._has("dead-pins-first") else "list_packs"
        yield (
            f"finds dead pins {sorted(dead)}",
            set_process(world, number, step=step, dead=dead, seen=process.seen if step == "list_packs" else Packs()),
        )

    def _list_manifests(self, world: World, number: int, process: Process) -> Iterator[Move]:
        seen = frozenset(i for i, manifest in enumerate(world.manifests) if manifest.names[-1])
        step = "list_packs" if self._has("dead-pins-first") else "find_dead"
        yield f"lists manifests {sorted(seen)}", set_process(world, number, step=step, seen=seen, dead=process.dead)

    def _list_packs(self, world: World, number: int, process: Process) -> Iterator[Move]:
        if self._has("sync-found-deletions"):
            world = world._replace(
                manifests=tuple(m if m.names[-1] else m._replace(names=(False,)) for m in world.manifests)
            )
        known = visible(world)
        live = self._live(world, process.seen)
        locked = set[int]()
        for slot, file in enumerate(world.files):
            is_free = file.owner < 0 and not file.is_shared
            is_garbage = is_current(file, file.pack) and not live & {*map(digest, file.frames)}
            if is_garbage and (is_free or not self._has("lock-garbage")):
                locked.add(file.pack)
                world = with_file(world, slot, owner=number) if is_free else world
        yield (
            f"syncs deletions, lists packs, and locks {sorted(locked)}",
            set_process(world, number, step="mark", known=known, packs=frozenset(locked)),
        )

    def _live(self, world: World, seen: Packs) -> Names:
        live = frozenset().union(*map(self.content, seen))
        frames = (frame for file in world.files if file.names[-1][:1] == "p" for frame in file.frames)
        bases = {frame[-1] for frame in frames if digest(frame) in live and ">" in frame}
        return live | bases if self._has("live-bases") else live

    def _is_current(self, world: World, process: Process, own: int = 0) -> bool:
        gone = {i for i, manifest in enumerate(world.manifests) if not manifest.names[-1]}
        freed = {pack for pack, is_live in world.catalog.packs if not is_live}
        unseen = world.catalog.manifests - process.seen - gone if self._has("see-manifests") else None
        return not unseen and visible(world) - process.known - freed <= {own}

    def _mark(self, world: World, number: int, process: Process) -> Iterator[Move]:
        if not self._is_current(world, process):
            yield "starts again", set_process(unlocked(world, number), number, step="find_dead")
            return
        catalog = world.catalog
        pins = frozenset(pin for pin in catalog.pins if pin[0] not in process.dead or pin[1] >= 0)
        pinned = {pack for pin in pins for pack in pin[2]} if self._has("skip-pinned") else set[int]()
        freed = process.packs - pinned
        rows = catalog.manifests & process.seen
        after = marked(world._replace(catalog=catalog._replace(pins=pins, manifests=rows)), freed)
        after = after if freed else unlocked(after, number)
        step = "retire" if freed else "plan"
        yield f"marks packs {sorted(freed)} freed", set_process(after, number, step=step, packs=freed)

    def _retire(self, world: World, number: int, process: Process) -> Iterator[Move]:
        for slot, file in enumerate(world.files):
            if file.names[-1] in {f"p{pack}" for pack in process.packs}:
                is_recycled = process.mode != "repair"
                world = put(world, slot, renamed(file, f"q{file.names[-1][1:]}" if is_recycled else ""))
        if not self._has("lock-until-synced"):
            world = unlocked(world, number)
        yield f"removes packs {sorted(process.packs)} from packs/", set_process(world, number, step="sync_both")

    def _sync_both(self, world: World, number: int, _process: Process) -> Iterator[Move]:
        yield "syncs packs/ and pool/", set_process(synced(world, PACKS + POOL), number, step="forget")

    def _forget(self, world: World, number: int, process: Process) -> Iterator[Move]:
        there = visible(world)
        packs = frozenset(pair for pair in world.catalog.packs if pair[1] or pair[0] in there)
        after = unlocked(world._replace(catalog=world.catalog._replace(packs=packs)), number)
        after = set_process(after, number, step="plan", packs=Packs())
        yield "forgets the freed packs, and unlocks", stopped(after, number) if process.mode else after

    def _plan(self, world: World, number: int, process: Process) -> Iterator[Move]:
        live = self._live(world, process.seen)
        pinned = {pack for pin in world.catalog.pins for pack in pin[2]}
        for file in world.files:
            names = {*map(digest, file.frames)}
            if is_current(file, file.pack) and file.pack not in pinned and names & live and names - live:
                yield from self._replace(world, number, "repack", file, live)
                return
        yield "has nothing to repack", stopped(world, number)

    def _start_repair(self, world: World, number: int) -> Iterator[Move]:
        for file in world.files:
            if is_current(file, file.pack) and any(frame[0] == "!" for frame in file.frames):
                yield from self._replace(world, number, "repair", file, frozenset(map(digest, file.frames)))

    def _replace(self, world: World, number: int, mode: str, old: File, live: Names) -> Iterator[Move]:
        """Plan the replacement of a pack: copy live frames that no other live pack has."""
        wanted = {frame for frame in old.frames if digest(frame) in live}
        other = {
            (digest(frame), file.pack)
            for file in world.files
            if (file.pack, True) in world.catalog.packs
            and is_current(file, file.pack)
            and file.pack != old.pack
            and (mode == "repack" or not any(frame[0] == "!" for frame in file.frames))
            for frame in file.frames
            if frame[0] != "!" and {frame, frame[0], f"!{frame}", f"!{frame[0]}"} & wanted
        }
        need = frozenset(frame for frame in wanted if digest(frame) not in {name for name, _ in other})
        if mode == "repack" and any(frame[0] == "!" for frame in need):
            yield "cannot repack a damaged frame", stopped(world, number)
            return
        need -= {frame for frame in need if frame[0] == "!"}
        step = "create" if need else "relist"
        yield (
            f"plans to replace pack {old.pack}",
            set_process(world, number, step=step, mode=mode, pack=old.pack, need=need, relied=frozenset(other)),
        )

    def _relist(self, world: World, number: int, process: Process) -> Iterator[Move]:
        seen = frozenset(i for i, manifest in enumerate(world.manifests) if manifest.names[-1])
        after = world
        for slot, file in enumerate(world.files):
            if is_current(file, process.pack) and file.owner < 0 and not file.is_shared:
                after = with_file(after, slot, owner=number)
        yield (
            f"lists manifests {sorted(seen)} and packs, and locks pack {process.pack}",
            set_process(after, number, step="move", seen=seen, known=visible(world)),
        )

    def _move(self, world: World, number: int, process: Process) -> Iterator[Move]:
        old = next((file for file in world.files if is_current(file, process.pack) and file.owner == number), None)
        new = world.files[process.file] if process.need else None
        is_repack = process.mode == "repack"
        if old and is_repack and not self._is_current(world, process, new.pack if new else 0):
            yield "starts again", set_process(world, number, step="relist")
            return
        copies = {(digest(frame), new.pack) for frame in new.frames} if new else set[tuple[str, int]]()
        wanted = {*map(digest, old.frames)} if old else set[str]()
        wanted &= self._live(world, process.seen) if is_repack else wanted
        wanted -= {digest(frame) for frame in old.frames if frame[0] == "!"} if old and not is_repack else set()
        relied = {pair for pair in process.relied if not is_repack or pair[0] in wanted}
        dead = {pack for _, pack in relied if (pack, True) not in world.catalog.packs}
        pinned = {pack for pin in world.catalog.pins for pack in pin[2]}
        if not self._has("replace-skips-pinned"):
            pinned = set()
        lacks = wanted - {name for name, _ in copies | relied} if self._has("repack-copies-live") else None
        if old is None or process.pack in pinned or lacks or (dead and self._has("relied-is-live")):
            if new is not None:
                world = put(world, process.file, renamed(new, ""))
            yield "gives up", stopped(unlocked(world, number), number)
            return
        after = marked(entered(world, new) if new else world, frozenset({process.pack}))
        taken = {name for name, _ in after.catalog.places}
        places = after.catalog.places | {pair for pair in relied if pair[0] not in taken}
        after = after._replace(catalog=after.catalog._replace(places=places))
        yield (
            f"enters the new pack and marks pack {process.pack} freed",
            set_process(after, number, step="retire", packs=frozenset({process.pack})),
        )

    # A reader (§8.3, §10.3).

    def _start_read(self, world: World, number: int) -> Iterator[Move]:
        for i, manifest in enumerate(world.manifests):
            if manifest.names[-1] and not manifest.deletion:
                yield (
                    f"reads checkpoint {i}",
                    set_process(world, number, step="list", checkpoint=i, need=self.content(i)),
                )

    def _list(self, world: World, number: int, process: Process) -> Iterator[Move]:
        new = visible(world) - process.known
        if new and (not process.known or self._has("reader-lists-again")):
            yield f"lists packs {sorted(new)}", set_process(world, number, step="open", packs=new)
        elif world.manifests[process.checkpoint].deletion or process.need & world.lost:
            yield "rejects the checkpoint", stopped(world, number)
        else:
            problem = f"§10.3: the reader rejects checkpoint {process.checkpoint}, which is consistent"
            yield "rejects the checkpoint", world._replace(problem=problem)

    def _open(self, world: World, number: int, process: Process) -> Iterator[Move]:
        if not process.packs:
            yield "has opened all listed packs", set_process(world, number, step="list")
            return
        pack = min(process.packs)
        slot = next((i for i, file in enumerate(world.files) if is_current(file, pack)), -1)
        after = set_process(world, number, packs=process.packs - {pack}, known=process.known | {pack})
        yield (
            f"opens pack {pack}",
            set_process(after, number, step="lock", file=slot, pack=pack) if slot >= 0 else after,
        )

    def _lock(self, world: World, number: int, process: Process) -> Iterator[Move]:
        file = world.files[process.file]
        if file.owner >= 0 and self._has("reader-locks"):
            return
        after = set_process(world, number, step="open", file=-1)
        if is_current(file, process.pack) or not self._has("reader-checks-name"):
            if file.pack != process.pack:
                after = after._replace(problem="§8.3: the reader takes a recycled file for a damaged pack")
            elif process.need & {frame[0] for frame in file.frames}:
                after = with_file(world, process.file, is_shared=self._has("reader-locks"))
                after = set_process(after, number, step="read")
        yield f"locks pack {process.pack}, and checks its name and index", after

    def _read(self, world: World, number: int, process: Process) -> Iterator[Move]:
        file = world.files[process.file]
        if file.pack != process.pack:
            problem = "§8.3: the reader reads a frame while its file is overwritten"
            yield "reads a frame", world._replace(problem=problem)
            return
        found = {frame for frame in file.frames if frame[0] in process.need}
        need = process.need - {frame[0] for frame in found} | {frame[-1] for frame in found if ">" in frame}
        need -= {frame for frame in file.frames if len(frame) == 1}
        after = with_file(world, process.file, is_shared=False)
        # A base may be in a pack that was opened before.
        known = process.known if need <= process.need else Packs()
        after = set_process(after, number, step="open", file=-1, need=need, known=known)
        yield "reads its frames", after if need else stopped(after, number)


def with_file(world: World, slot: int, **changes: Any) -> World:  # noqa: ANN401 - fields of a file
    """Return a state with a changed file."""
    return put(world, slot, world.files[slot]._replace(**changes))


def put(world: World, slot: int, file: File) -> World:
    """Return a state with another file; one that has no name any more and no lock is empty."""
    if file.names[-1] == "" and file.names[0] == "":
        file = File()
    return world._replace(files=(*world.files[:slot], file, *world.files[slot + 1 :]))


def with_manifest(world: World, number: int, **changes: Any) -> World:  # noqa: ANN401 - fields of a manifest
    """Return a state with a changed manifest."""
    manifest = world.manifests[number]._replace(**changes)
    return world._replace(manifests=(*world.manifests[:number], manifest, *world.manifests[number + 1 :]))


def set_process(world: World, number: int, **changes: Any) -> World:  # noqa: ANN401 - fields of a process
    """Return a state with a changed process."""
    process = world.processes[number]._replace(**changes)
    return world._replace(processes=(*world.processes[:number], process, *world.processes[number + 1 :]))


def stopped(world: World, number: int) -> World:
    """Return a state in which a process has ended its operation."""
    return world._replace(processes=(*world.processes[:number], Process(), *world.processes[number + 1 :]))


def spent(world: World, name: str) -> World:
    """Return a state with a smaller budget."""
    left = tuple(count - (budget == name) for count, budget in zip(world.left, BUDGETS, strict=True))
    return world._replace(left=left)


def visible(world: World) -> Packs:
    """Return the ids of the packs that a listing shows."""
    return frozenset(int(file.names[-1][1:]) for file in world.files if file.names[-1][:1] == "p")


def safe_frames(world: World, *, but_freed: bool = False) -> Iterator[str]:
    """Yield the frames of the packs that every power loss leaves, perhaps without those marked freed."""
    freed = {pack for pack, is_live in world.catalog.packs if but_freed and not is_live}
    for file in world.files:
        if file.is_synced and file.pack not in freed and all(name == f"p{file.pack}" for name in file.names):
            yield from file.frames


def unlocked(world: World, number: int) -> World:
    """Return a state in which a process holds no exclusive lock."""
    return world._replace(files=tuple(f._replace(owner=-1) if f.owner == number else f for f in world.files))


def killed(world: World, number: int) -> World:
    """Return a state after a kill: the locks of the process are free, and its pins are dead."""
    if world.processes[number].step == "read":
        world = with_file(world, world.processes[number].file, is_shared=False)
    pins = frozenset((c, -1 if owner == number else owner, packs) for c, owner, packs in world.catalog.pins)
    return stopped(unlocked(world._replace(catalog=world.catalog._replace(pins=pins)), number), number)


def entered(world: World, file: File) -> World:
    """Return a state whose catalog has a pack and its partitions."""
    names = {digest(frame) for frame in file.frames}
    places = {pair for pair in world.catalog.places if pair[0] not in names} | {(name, file.pack) for name in names}
    packs = world.catalog.packs - {(file.pack, False)} | {(file.pack, True)}
    return world._replace(catalog=world.catalog._replace(places=frozenset(places), packs=packs))


def marked(world: World, freed: Packs) -> World:
    """Return a state whose catalog marks packs freed."""
    places = frozenset(pair for pair in world.catalog.places if pair[1] not in freed)
    packs = frozenset((pack, is_live and pack not in freed) for pack, is_live in world.catalog.packs)
    packs |= {(pack, False) for pack in freed}
    return world._replace(catalog=world.catalog._replace(places=places, packs=packs))


def rebuilt(world: World) -> World:
    """Return a state with a catalog that was rebuilt from the files (§10.4)."""
    there = frozenset(i for i, manifest in enumerate(world.manifests) if manifest.names[-1])
    world = world._replace(catalog=Catalog(manifests=there))
    for file in world.files:
        if is_current(file, file.pack):
            world = entered(world, file)
    return world
