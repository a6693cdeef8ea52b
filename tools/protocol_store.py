"""Model of a store for :mod:`tools.protocol`: saves, deletions, collections and a reader (SPEC.md, Part B).

A state has the files of a store with their durable and pending names, the catalog, the manifests, and the next step of
each process. The invariants treat each pending name as lost or kept, whichever is worse.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from tools.protocol_model import Left, Model, Move, Names, Packs, Record, Scenario, World

RULES = {
    "lock-until-pinned": "§B2 step 3: a writer holds the lock on a new pack until the pack is pinned",
    "sync-pack": "§B2 step 2: a pack is synced before its rename",
    "sync-packs": "§B2 step 2: the folder of packs is synced before the catalog has the pack",
    "check-reused": "§B2 step 3: the transaction that pins reused packs checks that they are live",
    "pin": "§B2 step 3: packs are pinned until the catalog has the manifest",
    "pin-bases": "§A10.5: a writer relies on the pack of a base as on a reused partition",
    "pin-then-commit": "§B2 step 4: the manifest is renamed after the packs were pinned",
    "sync-manifest": "§B2 step 4: the folder of a manifest is synced before the save is reported",
    "sync-head": "§B1: the head record of a generation is durable before its first manifest",
    "exclusive-head": "§B1: of two writers of one head record, one fails",
    "sync-deletion": "§B4: the folder of a deleted manifest is synced before the deletion is reported",
    "sync-kept": "§B4: the checkpoint that retention keeps is synced before older ones are deleted",
    "dead-pins-first": "§B5 step 1: dead owners are found before the manifests are listed",
    "live-bases": "§B5 step 2: the base of a frame of a live digest is live",
    "sync-found-deletions": "§B5 step 2: folders of manifests that others deleted are synced",
    "lock-garbage": "§B5 step 3: a pack is locked before it is freed",
    "see-manifests": "§B5 step 4: the catalog names no manifest that the collection did not see",
    "enter-unpinned": "§B5 step 4.4: with the dead pin of a save, its manifest is entered",
    "skip-pinned": "§B5 step 4: pinned packs are skipped",
    "lock-until-synced": "§B5 step 5: the lock on a freed pack is held until both folders are synced",
    "sync-pool": "§B5: the pool is synced before one of its files is overwritten",
    "repack-copies-live": "§B6 step 3: a pack is freed only if each digest live by then has another copy",
    "relied-is-live": "§B6 step 3, §B7 step 4: the packs that have the other copies are live in the transaction",
    "replace-skips-pinned": "§B6 step 3, §B7 step 4: no pin names the pack that is replaced",
    "reader-locks": "§A12: a reader holds a shared lock on a pack while it reads from it",
    "reader-checks-name": "§A12: a reader checks after locking that the path still names the file",
    "reader-lists-again": "§A12: a reader lists the packs again before it rejects a checkpoint",
    "rebuild-syncs": "§B3.3: the folder of packs is synced before a rebuilt catalog names them",
}


class File(Record, names=("",), pack=0, frames=Names(), is_synced=True, owner=-1, is_shared=False):
    """A pack file.

    The names are the durable one, then the pending ones: t3 is `packs/3.tmp`, p3 is `packs/3.pack`, q3 is
    `pool/3.pack`, and the empty name is none. Frame `d>a` has base a. The owner has the exclusive
    lock; a reader has the shared one.
    """

    names: tuple[str, ...]
    pack: int
    frames: Names
    is_synced: bool

    @property
    def is_free(self) -> bool:
        """Tell whether no process holds a lock."""
        return self.owner < 0 and not self.is_shared

    @property
    def digests(self) -> Names:
        """Return the digests of all frames."""
        return frozenset(frame[0] for frame in self.frames)

    def is_at(self, kind: str) -> bool:
        """Tell whether the current name is of a kind."""
        return self.names[-1][:1] == kind

    def is_pack(self, pack: int) -> bool:
        """Tell whether the file is the pack at its path."""
        return self.names[-1] == f"p{pack}"

    def rename(self, name: str) -> None:
        """Rename or unlink the file; the new name is pending. A file that never had a durable name is gone at once."""
        self.names = (*self.names, name) if name or self.names[0] else ("",)
        if self.names == ("",):
            self.pack, self.frames, self.is_synced = 0, Names(), True


class Catalog(Record, places=Names(), live=Names(), freed=Names(), manifests=Names(), pins=Names()):
    """The catalog of a store. A pin has a checkpoint, a process (-1 if dead) and packs."""

    places: frozenset[tuple[str, int]]
    live: Packs
    freed: Packs

    @property
    def pinned(self) -> Packs:
        """Return all pinned packs."""
        return Packs().union(*(packs for _, _, packs in self.pins))

    def enter(self, file: File) -> None:
        """Enter a pack and its partitions."""
        others = {pair for pair in self.places if pair[0] not in file.digests}
        self.places = frozenset(others | {(name, file.pack) for name in file.digests})
        self.live, self.freed = self.live | {file.pack}, self.freed - {file.pack}

    def free(self, packs: Packs) -> None:
        """Mark packs freed."""
        self.places = frozenset(pair for pair in self.places if pair[1] not in packs)
        self.live, self.freed = self.live - packs, self.freed | packs


class Manifest(Record, names=(False,), is_reported=False, deletion=0):
    """The manifest of one checkpoint: whether it exists, durably and after each change. Deletion is 2 when reported."""


class Task(
    Record,
    number=-1,
    step="",
    is_repack=False,
    checkpoint=-1,
    file=-1,
    pack=0,
    need=Names(),
    relied=Names(),
    seen=Names(),
    known=Names(),
    dead=Names(),
    packs=Names(),
):
    """A save, a deletion, a collection with repacking, or a reader."""


class Store(
    World,
    processes=(),
    left=Left(),
    files=(),
    manifests=(),
    catalog=Catalog(),
    head=(-1,),
    next_pack=1,
    violation="",
):
    """A state. The head is the writer of generation 2: durable, then pending."""

    def current(self) -> Packs:
        """Return the checkpoints whose manifest exists."""
        return frozenset(number for number, manifest in enumerate(self.manifests) if manifest.names[-1])

    def visible(self) -> Packs:
        """Return the ids of the packs that a listing shows."""
        return frozenset(int(file.names[-1][1:]) for file in self.files if file.is_at("p"))

    def sync(self, kinds: str) -> None:
        """Make the pending names in a folder durable, with the changes before them."""
        for file in self.files:
            firsts = [name[:1] or "-" for name in file.names]
            for at in range(len(firsts) - 1, 0, -1):
                if firsts[at - 1] in kinds or firsts[at] in kinds:
                    file.names = file.names[at:]
                    break

    def safe_frames(self) -> Iterator[str]:
        """Yield the frames of the packs that every power loss leaves."""
        for file in self.files:
            if file.is_synced and all(name == f"p{file.pack}" for name in file.names):
                yield from file.frames

    def unlock(self, number: int) -> None:
        """Release the exclusive locks of a process."""
        for file in self.files:
            file.owner = -1 if file.owner == number else file.owner

    def stop(self, p: Task) -> None:
        """End an operation."""
        self.processes[p.number] = Task(number=p.number)

    def rebuild(self) -> None:
        """Rebuild the catalog from the files (§B3.3)."""
        self.catalog = Catalog(manifests=self.current())
        for file in self.files:
            if file.is_pack(file.pack):
                self.catalog.enter(file)


SCENARIOS = {
    "reuse": Scenario.of("save | delete collect", "a b", "a b a", 2, kill=1, power=1),
    "recycle": Scenario.of("save delete | collect", "a b", "a b c", 2, kill=1, power=1),
    "bases": Scenario.of("save | delete collect", "a b", "a b d", 2, collect=2),
    "unsynced": Scenario.of("save delete | save", "c", "c a a", 1, save=2, kill=1, power=1),
    "heads": Scenario.of("save | save", "c", "c a2 b2", 1, save=2, kill=1, power=1),
    "repack": Scenario.of("save | delete collect", "ab c", "ab c a b", 3, kill=1, power=1),
    "repacks": Scenario.of("save | delete collect | collect", "ab ac", "b a ab", 2, collect=2),
    "two-collections": Scenario.of("save | delete collect | collect", "a b", "a b a", 2, collect=2, kill=1),
    "readers": Scenario.of("save | delete collect | read", "ab c", "ab c a e", 3),
    "all": Scenario.of(
        "save delete | save | collect | read", "ab c", "ab c a bd a2", 3, save=2, collect=2, kill=1, power=1
    ),
}
FILES = 4
PACKS, POOL = "tp", "q"


def readable(frames: Iterable[str]) -> Names:
    """Return the digests that can be decoded from frames."""
    full = {frame for frame in frames if len(frame) == 1}
    return frozenset(full | {frame[0] for frame in frames if frame[2:] in full})


class StoreModel(Model):
    """Writers, collections and a reader of one store."""

    def content(self, checkpoint: int) -> Names:
        """Return the digests that a checkpoint names."""
        return frozenset(self.scenario.saves[checkpoint].rstrip("2"))

    def first(self) -> Store:
        """Return the state before all steps: some checkpoints are saved."""
        scenario = self.scenario
        files = [
            File(names=(f"p{pack}",), pack=pack, frames=Names(frames)) for pack, frames in enumerate(scenario.packs, 1)
        ]
        done = [number < scenario.done for number in range(len(scenario.saves))]
        w = Store(
            processes=[Task(number=number) for number in range(len(scenario.programs))],
            left=scenario.left,
            files=files + [File() for _ in range(FILES - len(files))],
            manifests=[Manifest(names=(is_done,), is_reported=is_done) for is_done in done],
            next_pack=len(files) + 1,
        )
        w.rebuild()
        return w

    def choices(self, w: Store, operation: str) -> Iterable[int]:
        """Return the checkpoint that is saved, or those to delete or read."""
        if operation in {"delete", "read"}:
            there = sorted(w.current())
            there = there[:-1] if operation == "delete" else there
            return [number for number in there if not w.manifests[number].deletion]
        return [len(w.manifests) - w.left.save]

    def events(self, w: Store) -> Iterator[Move]:
        """Yield the end of all processes, and power losses."""
        if w.left.kill:
            after = w.spent("kill")
            for number in range(len(w.processes)):
                self.kill(after, number)
            if self.has("rebuild-syncs"):
                after.sync(PACKS)
            after.rebuild()
            yield "all processes are killed, and the catalog is rebuilt (§B3.3)", after
        if w.left.power:
            yield from self._power_loss(w)

    def kill(self, w: Store, number: int) -> None:
        """End a process: its locks are free, and its pins are dead."""
        p = w.processes[number]
        if p.step == "read":
            w.files[p.file].is_shared = False
        w.catalog.pins = frozenset((c, -1 if owner == number else owner, packs) for c, owner, packs in w.catalog.pins)
        w.unlock(number)
        w.stop(p)

    def _power_loss(self, w: Store) -> Iterator[Move]:
        names = [*(file.names for file in w.files), *(manifest.names for manifest in w.manifests), w.head]
        choices: list[Iterable[Any]] = [dict.fromkeys(choice) for choice in names]
        for picked in itertools.product(*choices):
            after = w.spent("power")
            for number in range(len(w.processes)):
                self.kill(after, number)
            for number, (file, name) in enumerate(zip(w.files, picked, strict=False)):
                kept = {"pack": file.pack, "frames": file.frames} if file.is_synced and name else {}
                after.files[number] = File(names=(name,), is_synced=file.is_synced or not name, **kept)
            for manifest, there in zip(after.manifests, picked[len(w.files) : -1], strict=True):
                manifest.names = (there,)
            after.head = picked[-1:]
            after.rebuild()
            yield f"power loss leaves {[str(name) for name in picked if name]}", after

    def problem(self, w: Store) -> str:
        """Return the invariant that a state breaks, or an empty string."""
        have = readable([*w.safe_frames()])
        for number, manifest in enumerate(w.manifests):
            missing = self.content(number) - have
            if missing and any(manifest.names):
                return f"I2: checkpoint {number} may lack partition {min(missing)}"
            if manifest.is_reported and not manifest.deletion and not all(manifest.names):
                return f"§B12: checkpoint {number} was reported durable and may be lost"
            if manifest.deletion == 2 and any(manifest.names):
                return f"§B4: checkpoint {number} was reported deleted and may return"
            if self.scenario.saves[number][-1] == "2" and any(manifest.names) and -1 in w.head:
                return f"I6: checkpoint {number} may exist without the head record of its generation"
        if not any(all(manifest.names) and not manifest.deletion for manifest in w.manifests):
            return "§B4: retention may leave no checkpoint"
        for file in w.files:
            if any(name[:1] == "p" and (name != f"p{file.pack}" or not file.is_synced) for name in file.names):
                return f"I1: the pack {file.names} may be incomplete or have another id"
        for _, owner, packs in w.catalog.pins:
            if owner >= 0 and (lost := (packs & w.catalog.freed) | (packs - w.visible())):
                return f"I5: pack {min(lost)} is pinned, and freed"
        return str(w.violation)

    # Saves (§B2).

    def _start_save(self, _w: Store, p: Task, checkpoint: int) -> str:
        p.step, p.checkpoint = "look_up", checkpoint
        return f"begins to save checkpoint {checkpoint}"

    def _look_up(self, w: Store, p: Task) -> str:
        places = dict(w.catalog.places)

        def found(name: str) -> str:
            """Return the frame of a stored partition."""
            for file in w.files:
                if file.is_pack(places.get(name, 0)) and file.owner in (-1, p.number):
                    return next((frame for frame in file.frames if frame[0] == name), "")
            return ""

        relied, need = set(p.relied), set[str]()
        for name in self.content(p.checkpoint).difference(*(f.digests for f in w.files if f.owner == p.number)):
            frame = found(name)
            base = "a" if name == "d" and found("a") == "a" else ""
            if frame and (len(frame) == 1 or base):
                relied.add((name, places[name]))
            else:
                need.add(f"d>{base}" if base else name)
            if base and frame != "d" and self.has("pin-bases"):
                relied.add((base, places[base]))
        p.step, p.need, p.relied = "create" if need else self._sealed(p), frozenset(need), frozenset(relied)
        return "looks up its partitions"

    def _sealed(self, p: Task) -> str:
        return "relist" if p.is_repack else "pin" if self.has("pin-then-commit") else "publish"

    def _create(self, w: Store, p: Task) -> str:
        pooled = [number for number, file in enumerate(w.files) if file.is_at("q") and file.is_free]
        held = {process.file for process in w.processes}
        free = [number for number, file in enumerate(w.files) if file.names == ("",) and number not in held]
        if not pooled and not free:
            return ""
        if pooled and self.has("sync-pool"):
            w.sync(POOL)
        name, w.next_pack = f"t{w.next_pack}", w.next_pack + 1
        p.step, p.file = "write", (pooled or free)[0]
        file = w.files[p.file]
        file.rename(name)
        file.owner = p.number
        return f"takes {file.names[-2] or 'a new file'} as {name}"

    def _write(self, w: Store, p: Task) -> str:
        file, p.step = w.files[p.file], "rename"
        file.pack, file.frames, file.is_synced = int(file.names[-1][1:]), p.need, self.has("sync-pack")
        return "writes frames, index and header, and syncs"

    def _rename(self, w: Store, p: Task) -> str:
        file = w.files[p.file]
        file.rename(f"p{file.pack}")
        file.owner = p.number if self.has("lock-until-pinned") else -1
        p.step = "sync_packs" if self.has("sync-packs") else self._sealed(p)
        return f"renames t{file.pack} to p{file.pack}"

    def _sync_packs(self, w: Store, p: Task) -> str:
        w.sync(PACKS)
        p.step = self._sealed(p)
        return "syncs packs/"

    def _pin(self, w: Store, p: Task) -> str:
        relied = frozenset(pair for pair in p.relied if pair[1] in w.catalog.live or not self.has("check-reused"))
        lost, p.relied = p.relied - relied, relied
        own = [f for i, f in enumerate(w.files) if (f.owner == p.number or i == p.file) and f.is_at("p")]
        for file in own:
            w.catalog.enter(file)
        packs = frozenset([file.pack for file in own] + [pack for _, pack in relied])
        pins = frozenset(pin for pin in w.catalog.pins if pin[:2] != (p.checkpoint, p.number))
        w.catalog.pins = pins | {(p.checkpoint, p.number, packs)} if self.has("pin") else pins
        if lost:
            # A frame whose base has gone is written again, too.
            bases = {name for name, _ in lost} - self.content(p.checkpoint)
            again = [frame[:1] for frame in p.need if frame[2:] in bases] if bases else [name for name, _ in lost]
            p.step, p.need = "create", frozenset(again)
            return "pins, and finds packs gone"
        w.unlock(p.number)
        is_first = self.scenario.saves[p.checkpoint][-1] == "2"
        p.step, p.file = "enter" if not self.has("pin-then-commit") else "begin" if is_first else "publish", -1
        return f"pins packs {sorted(packs)}, and unlocks"

    def _begin(self, w: Store, p: Task) -> str:
        if w.head[-1] < 0:
            w.head = (*w.head, p.number)
        elif not self.has("exclusive-head") and w.head[-1] != p.number:
            w.violation = "§B1: a head record was replaced"
        p.step, w.head = "publish", w.head[-1:] if self.has("sync-head") else w.head
        return "publishes the head record of generation 2"

    def _publish(self, w: Store, p: Task) -> str:
        w.manifests[p.checkpoint].names += (True,)
        p.step = "report"
        return "renames the manifest: the commit"

    def _report(self, w: Store, p: Task) -> str:
        manifest = w.manifests[p.checkpoint]
        manifest.is_reported = True
        if self.has("sync-manifest"):
            manifest.names = manifest.names[-1:]
        p.step = "enter" if self.has("pin-then-commit") else "pin"
        return "syncs the folder of the manifest, and reports"

    def _enter(self, w: Store, p: Task) -> str:
        w.catalog.pins = frozenset(pin for pin in w.catalog.pins if pin[:2] != (p.checkpoint, p.number))
        w.catalog.manifests |= {p.checkpoint}
        w.stop(p)
        return "enters the manifest and unpins"

    # Retention and deletion (§B4).

    def _start_delete(self, w: Store, p: Task, checkpoint: int) -> str:
        kept = max(w.current())
        if self.has("sync-kept"):
            w.manifests[kept].names = (True,)
        p.step, p.checkpoint = "unlink", checkpoint
        return f"keeps checkpoint {kept}"

    def _unlink(self, w: Store, p: Task) -> str:
        manifest, p.step = w.manifests[p.checkpoint], "sync_deletion"
        manifest.names, manifest.deletion = (*manifest.names, False), 1
        return f"unlinks manifest {p.checkpoint}"

    def _sync_deletion(self, w: Store, p: Task) -> str:
        manifest = w.manifests[p.checkpoint]
        manifest.deletion = 2
        if self.has("sync-deletion"):
            manifest.names = manifest.names[-1:]
        w.catalog.manifests -= {p.checkpoint}
        w.stop(p)
        return "syncs the folder, reports the deletion, and removes the row of the manifest"

    # Collection and repacking (§B5, §B6).

    def _start_collect(self, w: Store, p: Task, _choice: int) -> str:
        for file in w.files:
            if file.is_at("t") and file.owner < 0:
                file.rename("")
        p.step = "find_dead" if self.has("dead-pins-first") else "list_manifests"
        return "removes temporary files"

    def _find_dead(self, w: Store, p: Task) -> str:
        p.dead = frozenset(checkpoint for checkpoint, owner, _ in w.catalog.pins if owner < 0)
        p.step = "list_manifests" if self.has("dead-pins-first") else "list_packs"
        return f"finds dead pins {sorted(p.dead)}"

    def _list_manifests(self, w: Store, p: Task) -> str:
        p.seen = w.current()
        p.step = "list_packs" if self.has("dead-pins-first") else "find_dead"
        return f"lists manifests {sorted(p.seen)}"

    def _list_packs(self, w: Store, p: Task) -> str:
        for manifest in w.manifests:
            if self.has("sync-found-deletions") and not manifest.names[-1]:
                manifest.names = (False,)
        live, garbage = self._live(w, p.seen), set[int]()
        for file in w.files:
            is_garbage = file.is_pack(file.pack) and not live & file.digests
            if is_garbage and (file.is_free or not self.has("lock-garbage")):
                garbage.add(file.pack)
                file.owner = p.number if file.is_free else file.owner
        p.step, p.known, p.packs = "mark", w.visible(), frozenset(garbage)
        return f"syncs deletions, lists packs, and locks {sorted(garbage)}"

    def _live(self, w: Store, seen: Packs) -> Names:
        live = Names().union(*map(self.content, seen))
        frames = (frame for file in w.files if file.is_at("p") for frame in file.frames)
        bases = {frame[-1] for frame in frames if frame[0] in live and ">" in frame}
        return live | bases if self.has("live-bases") else live

    def _is_seen(self, w: Store, p: Task, own: int = 0) -> bool:
        unseen = w.catalog.manifests & w.current() - p.seen if self.has("see-manifests") else None
        return not unseen and w.visible() - p.known - w.catalog.freed <= {own}

    def _mark(self, w: Store, p: Task) -> str:
        if not self._is_seen(w, p):
            w.unlock(p.number)
            p.step = "find_dead"
            return "starts again"
        catalog = w.catalog
        catalog.pins = frozenset(pin for pin in catalog.pins if pin[0] not in p.dead or pin[1] >= 0)
        catalog.manifests &= p.seen
        if self.has("enter-unpinned"):
            catalog.manifests |= p.dead & p.seen & w.current()
        p.packs -= catalog.pinned if self.has("skip-pinned") else Packs()
        catalog.free(p.packs)
        if not p.packs:
            w.unlock(p.number)
        p.step = "retire" if p.packs else "plan"
        return f"marks packs {sorted(p.packs)} freed"

    def _retire(self, w: Store, p: Task) -> str:
        for file in w.files:
            if file.names[-1] in {f"p{pack}" for pack in p.packs}:
                file.rename(f"q{file.names[-1][1:]}")
        if not self.has("lock-until-synced"):
            w.unlock(p.number)
        p.step = "sync_both"
        return f"removes packs {sorted(p.packs)} from packs/"

    def _sync_both(self, w: Store, p: Task) -> str:
        w.sync(PACKS + POOL)
        w.catalog.freed &= w.visible()
        w.unlock(p.number)
        p.step, p.packs = "plan", Packs()
        if p.is_repack:
            w.stop(p)
        return "syncs packs/ and pool/, forgets the freed packs, and unlocks"

    def _plan(self, w: Store, p: Task) -> str:
        live, pinned = self._live(w, p.seen), w.catalog.pinned
        for old in w.files:
            if old.is_pack(old.pack) and old.pack not in pinned and old.digests & live and old.digests - live:
                break
        else:
            w.stop(p)
            return "has nothing to repack"
        wanted = {frame for frame in old.frames if frame[0] in live}
        p.relied = frozenset(
            (frame[0], file.pack)
            for file in w.files
            if file.pack in w.catalog.live - {old.pack} and file.is_pack(file.pack)
            for frame in file.frames
            if {frame, frame[0]} & wanted
        )
        p.need = frozenset(frame for frame in wanted if frame[0] not in {name for name, _ in p.relied})
        p.is_repack, p.pack, p.step = True, old.pack, "create" if p.need else "relist"
        return f"plans to repack pack {old.pack}"

    def _relist(self, w: Store, p: Task) -> str:
        for file in w.files:
            if file.is_pack(p.pack) and file.is_free:
                file.owner = p.number
        p.step, p.seen, p.known = "swap", w.current(), w.visible()
        return f"lists manifests {sorted(p.seen)} and packs, and locks pack {p.pack}"

    def _swap(self, w: Store, p: Task) -> str:
        old = next((file for file in w.files if file.is_pack(p.pack) and file.owner == p.number), None)
        new = w.files[p.file] if p.need else File()
        if old and not self._is_seen(w, p, new.pack):
            p.step = "relist"
            return "starts again"
        wanted = old.digests & self._live(w, p.seen) if old else Names()
        relied = {pair for pair in p.relied if pair[0] in wanted}
        lacks = wanted - new.digests - {name for name, _ in relied} if self.has("repack-copies-live") else None
        dead = {pack for _, pack in relied} - w.catalog.live if self.has("relied-is-live") else None
        if old is None or lacks or dead or (p.pack in w.catalog.pinned and self.has("replace-skips-pinned")):
            if p.need:
                new.rename("")
            w.unlock(p.number)
            w.stop(p)
            return "gives up"
        if p.need:
            w.catalog.enter(new)
        w.catalog.free(Packs([p.pack]))
        taken = {name for name, _ in w.catalog.places}
        w.catalog.places |= {pair for pair in relied if pair[0] not in taken}
        p.step, p.packs = "retire", Packs([p.pack])
        return f"enters the new pack and marks pack {p.pack} freed"

    # A reader (§A12).

    def _start_read(self, _w: Store, p: Task, checkpoint: int) -> str:
        p.step, p.checkpoint, p.need = "list", checkpoint, self.content(checkpoint)
        return f"reads checkpoint {checkpoint}"

    def _list(self, w: Store, p: Task) -> str:
        new = w.visible() - p.known
        if new and (not p.known or self.has("reader-lists-again")):
            p.step, p.packs = "open", new
            return f"lists packs {sorted(new)}"
        if w.manifests[p.checkpoint].deletion:
            w.stop(p)
        else:
            w.violation = f"§A12: the reader rejects checkpoint {p.checkpoint}, which is consistent"
        return "rejects the checkpoint"

    def _open(self, w: Store, p: Task) -> str:
        if not p.packs:
            p.step = "list"
            return "has opened all listed packs"
        pack = min(p.packs)
        p.packs, p.known = p.packs - {pack}, p.known | {pack}
        for number, file in enumerate(w.files):
            if file.is_pack(pack):
                p.step, p.file, p.pack = "lock", number, pack
        return f"opens pack {pack}"

    def _lock(self, w: Store, p: Task) -> str:
        number, file = p.file, w.files[p.file]
        if file.owner >= 0 and self.has("reader-locks"):
            return ""
        p.step, p.file = "open", -1
        if file.is_pack(p.pack) or not self.has("reader-checks-name"):
            if file.pack != p.pack:
                w.violation = "§A12: the reader takes a recycled file for a damaged pack"
            elif p.need & {frame[0] for frame in file.frames}:
                file.is_shared = self.has("reader-locks")
                p.step, p.file = "read", number
        return f"locks pack {p.pack}, and checks its name and index"

    def _read(self, w: Store, p: Task) -> str:
        file = w.files[p.file]
        if file.pack != p.pack:
            w.violation = "§A12: the reader reads a frame while its file is overwritten"
            return "reads a frame"
        found = {frame for frame in file.frames if frame[0] in p.need}
        need = p.need - {frame[0] for frame in found} | {frame[-1] for frame in found if ">" in frame}
        need -= {frame for frame in file.frames if len(frame) == 1}
        file.is_shared = False
        # A base may be in a pack that was opened before.
        p.known = p.known if need <= p.need else Packs()
        p.step, p.file, p.need = "open", -1, need
        if not need:
            w.stop(p)
        return "reads its frames"
