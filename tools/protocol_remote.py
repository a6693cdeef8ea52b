"""Model of a remote layout for :mod:`tools.protocol`: pushes and collections without locks (SPEC.md §8.6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

Names = frozenset[str]
Packs = frozenset[int]
Listing = tuple[tuple[int, str], ...]
"""Pack ids and their names: p is `<id>.pack`, a digit is `<id>.<collection>.doomed`, and the empty name is none."""

RULES = {
    "push-checks-again": "§8.6 push, step 6: the push checks its packs again after the commit",
    "push-reprieves": "§8.6: a push renames a pack back when it relies on it and finds it doomed",
    "present-lists-last": "§8.6: a push that finds a checkpoint there lists the packs after it has read the manifest",
    "announce": "§8.6 collection, step 2: a pack is renamed before it is removed",
    "read-again": "§8.6 collection, step 3: manifests are read again before a pack is removed",
    "own-name": "§8.6 collection, step 3: a pack under a name of another collection is not removed",
}


class Pack(NamedTuple):
    """A pack with one partition."""

    name: str
    digest: str
    is_old: bool
    uploader: int = -1


class Manifest(NamedTuple):
    """The manifest of one checkpoint."""

    exists: bool = False
    is_reported: bool = False
    is_deleted: bool = False


class Process(NamedTuple):
    """The next step of a process, and its variables."""

    step: str = ""
    checkpoint: int = -1
    need: Names = frozenset()
    relied: Packs = frozenset()
    listing: Listing = ()
    live: Names = frozenset()
    name: str = ""


class World(NamedTuple):
    """A state."""

    packs: tuple[Pack, ...]
    manifests: tuple[Manifest, ...]
    processes: tuple[Process, ...]
    left: tuple[int, ...]
    collections: int = 0


BUDGETS = ("push", "collect", "delete", "kill", "day")


class Scenario(NamedTuple):
    """Programs and budgets, as in :class:`tools.protocol_store.Scenario`. The packs of the first state are old."""

    programs: tuple[tuple[str, ...], ...]
    packs: tuple[str, ...]
    saves: tuple[str, ...]
    done: int
    left: tuple[int, ...]


SCENARIOS = {
    "push": Scenario((("push",), ("collect",), ("collect",)), ("a", "b"), ("b", "a"), 1, (1, 2, 0, 1, 0)),
    "pushes": Scenario((("push",), ("push",), ("collect",)), ("a", "b"), ("b", "a"), 1, (2, 1, 0, 1, 0)),
    "prune": Scenario((("push",), ("delete", "collect")), ("a", "b"), ("b", "a", "ac"), 1, (2, 1, 1, 1, 1)),
}


class RemoteModel:
    """Pushes and collections at one location."""

    def __init__(self, scenario: Scenario, without: Iterable[str] = ()) -> None:
        self.scenario, self.without = scenario, frozenset(without)

    def _has(self, rule: str) -> bool:
        return rule not in self.without

    def first(self) -> World:
        """Return the state before all steps."""
        packs = tuple(Pack("p", digest, is_old=True) for digest in self.scenario.packs)
        new = len(self.scenario.saves) - self.scenario.done
        manifests = (*[Manifest(exists=True, is_reported=True)] * self.scenario.done, *[Manifest()] * new)
        return World(packs, manifests, (Process(),) * len(self.scenario.programs), self.scenario.left)

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield every next step."""
        for number, process in enumerate(world.processes):
            if process.step:
                text, after = getattr(self, f"_{process.step}")(world, number, process)
                yield f"P{number} {text}", after
                if world.left[3]:
                    yield f"P{number} is killed", spent(stopped(world, number), "kill")
                continue
            program = self.scenario.programs[number]
            if "push" in program and world.left[0]:
                for checkpoint in range(self.scenario.done, len(world.manifests)):
                    step = "look" if self._has("present-lists-last") else "list_early"
                    after = with_process(world, number, step=step, checkpoint=checkpoint)
                    yield f"P{number} begins to push checkpoint {checkpoint}", spent(after, "push")
            if "collect" in program and world.left[1]:
                after = world._replace(collections=world.collections + 1)
                after = with_process(after, number, step="list_packs", name=str(after.collections))
                yield f"P{number} begins collection {after.collections}", spent(after, "collect")
            if "delete" in program and world.left[2]:
                for checkpoint, manifest in enumerate(world.manifests):
                    if manifest.exists:
                        after = with_manifest(world, checkpoint, exists=False, is_reported=False, is_deleted=True)
                        yield f"P{number} deletes checkpoint {checkpoint}", spent(after, "delete")
        if world.left[4]:
            packs = tuple(pack._replace(is_old=pack.is_old or pack.uploader < 0) for pack in world.packs)
            yield "a day passes", spent(world._replace(packs=packs), "day")

    def problem(self, world: World) -> str:
        """Return the invariant that a state breaks, or an empty string."""
        there = {pack.digest for pack in world.packs if pack.name}
        for checkpoint, manifest in enumerate(world.manifests):
            missing = {*self.scenario.saves[checkpoint]} - there
            if missing and manifest.is_reported and not manifest.is_deleted:
                return f"I2: checkpoint {checkpoint} was reported as pushed, and lacks partition {min(missing)}"
        return ""

    # Pushes.

    def _list_early(self, world: World, number: int, _process: Process) -> tuple[str, World]:
        return "lists packs", with_process(world, number, step="look", listing=names(world))

    def _look(self, world: World, number: int, process: Process) -> tuple[str, World]:
        if not world.manifests[process.checkpoint].exists:
            return "finds no manifest", with_process(world, number, step="index")
        return "reads the manifest", with_process(world, number, step="compare")

    def _compare(self, world: World, number: int, process: Process) -> tuple[str, World]:
        listing = process.listing or names(world)
        there = {world.packs[pack].digest for pack, name in listing if name == "p"}
        if there.issuperset(self.scenario.saves[process.checkpoint]):
            return "finds the checkpoint whole, and reports it", self._reported(world, number, process)
        return "finds packs missing", with_process(world, number, step="index", listing=())

    def _index(self, world: World, number: int, process: Process) -> tuple[str, World]:
        found: dict[str, int] = {}
        for pack, name in names(world):
            if name:
                found.setdefault(world.packs[pack].digest, pack)
        need = frozenset(self.scenario.saves[process.checkpoint])
        relied = frozenset(found[digest] for digest in sorted(need & found.keys()))
        text = f"reads indexes, and relies on packs {sorted(relied)}"
        need -= set(found)
        step = "upload" if need else "check_names"
        return text, with_process(world, number, step=step, need=need, relied=relied)

    def _upload(self, world: World, number: int, process: Process) -> tuple[str, World]:
        digest, pack = min(process.need), Pack("p", min(process.need), is_old=False, uploader=number)
        need, relied = process.need - {digest}, process.relied | {len(world.packs)}
        after = with_process(world, number, step="upload" if need else "check_names", need=need, relied=relied)
        return f"uploads {digest} as pack {len(world.packs)}", after._replace(packs=(*world.packs, pack))

    def _check_names(self, world: World, number: int, process: Process) -> tuple[str, World]:
        listing = tuple(pair for pair in names(world) if pair[0] in process.relied)
        return "lists packs", with_process(world, number, step="reprieve", listing=listing)

    def _reprieve(self, world: World, number: int, process: Process) -> tuple[str, World]:
        is_whole = True
        for pack, name in process.listing:
            if name != "p":
                is_whole &= bool(name) and (world.packs[pack].name == name or not self._has("push-reprieves"))
                world = moved(world, pack, name, "p") if self._has("push-reprieves") else world
        if not is_whole:
            return "finds packs removed", with_process(world, number, step="index")
        if process.name == "committed":
            return "finds its packs, and reports", self._reported(world, number, process)
        return "finds its packs", with_process(world, number, step="publish")

    def _publish(self, world: World, number: int, process: Process) -> tuple[str, World]:
        after = with_manifest(world, process.checkpoint, exists=True, is_deleted=False)
        if not self._has("push-checks-again"):
            return "publishes the manifest, and reports", self._reported(after, number, process)
        return "publishes the manifest: the commit", with_process(after, number, step="check_names", name="committed")

    def _reported(self, world: World, number: int, process: Process) -> World:
        exists = world.manifests[process.checkpoint].exists
        return stopped(with_manifest(world, process.checkpoint, is_reported=exists), number)

    # Collections.

    def _list_packs(self, world: World, number: int, _process: Process) -> tuple[str, World]:
        old = tuple((pack, name) for pack, name in names(world) if name == "p" and world.packs[pack].is_old)
        return f"lists old packs {[pack for pack, _ in old]}", with_process(
            world, number, step="read_manifests", listing=old
        )

    def _read_manifests(self, world: World, number: int, _process: Process) -> tuple[str, World]:
        live = Names().union(*(self.scenario.saves[i] for i, m in enumerate(world.manifests) if m.exists))
        step = "doom" if self._has("announce") else "remove"
        return f"reads manifests, which need {sorted(live)}", with_process(world, number, step=step, live=live)

    def _doom(self, world: World, number: int, process: Process) -> tuple[str, World]:
        doomed = [pair for pair in process.listing if world.packs[pair[0]].digest not in process.live]
        for pack, name in doomed[:1]:
            after = moved(world, pack, name, process.name)
            listing = tuple(pair for pair in process.listing if pair[0] != pack)
            return f"dooms pack {pack}", with_process(after, number, listing=listing)
        others = tuple(pair for pair in names(world) if pair[1] not in ("", "p", process.name))
        return f"lists packs that others doomed: {others}", with_process(world, number, step="adopt", listing=others)

    def _adopt(self, world: World, number: int, process: Process) -> tuple[str, World]:
        for pack, name in process.listing[:1]:
            after = moved(world, pack, name, process.name)
            return f"dooms pack {pack} again", with_process(after, number, listing=process.listing[1:])
        doomed = tuple(pair for pair in names(world) if pair[1] not in ("", "p"))
        step = "read_again" if self._has("read-again") else "remove"
        return f"lists doomed packs {doomed}", with_process(world, number, step=step, listing=doomed)

    def _read_again(self, world: World, number: int, process: Process) -> tuple[str, World]:
        text, after = self._read_manifests(world, number, process)
        return f"again {text}", with_process(after, number, step="remove")

    def _remove(self, world: World, number: int, process: Process) -> tuple[str, World]:
        for pack, name in process.listing[:1]:
            after = with_process(world, number, listing=process.listing[1:])
            if world.packs[pack].digest in process.live:
                return f"reprieves pack {pack}", moved(after, pack, world.packs[pack].name, "p" if name else "")
            if not self._has("own-name") and world.packs[pack].name != "p":
                return f"removes pack {pack}", moved(after, pack, world.packs[pack].name, "")
            if name != process.name and self._has("announce"):
                return f"leaves pack {pack} to another collection", after
            return f"removes pack {pack}", moved(after, pack, name, "")
        return "ends", stopped(world, number)


def names(world: World) -> Listing:
    """Return the names of all packs."""
    return tuple((number, pack.name) for number, pack in enumerate(world.packs))


def moved(world: World, number: int, name: str, new: str) -> World:
    """Return a state in which a pack was renamed or removed, if it still had a name."""
    pack = world.packs[number]
    if pack.name != name or not name:
        return world
    return world._replace(packs=(*world.packs[:number], pack._replace(name=new), *world.packs[number + 1 :]))


def with_manifest(world: World, number: int, **changes: Any) -> World:  # noqa: ANN401 - fields of a manifest
    """Return a state with a changed manifest."""
    manifest = world.manifests[number]._replace(**changes)
    return world._replace(manifests=(*world.manifests[:number], manifest, *world.manifests[number + 1 :]))


def with_process(world: World, number: int, **changes: Any) -> World:  # noqa: ANN401 - fields of a process
    """Return a state with a changed process."""
    process = world.processes[number]._replace(**changes)
    return world._replace(processes=(*world.processes[:number], process, *world.processes[number + 1 :]))


def stopped(world: World, number: int) -> World:
    """Return a state in which a process has ended its operation."""
    packs = tuple(pack._replace(uploader=-1) if pack.uploader == number else pack for pack in world.packs)
    idle = (*world.processes[:number], Process(), *world.processes[number + 1 :])
    return world._replace(packs=packs, processes=idle)


def spent(world: World, name: str) -> World:
    """Return a state with a smaller budget."""
    left = tuple(count - (budget == name) for count, budget in zip(world.left, BUDGETS, strict=True))
    return world._replace(left=left)
