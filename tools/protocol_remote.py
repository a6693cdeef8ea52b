"""Model of a remote layout for :mod:`tools.protocol`: pushes and collections without locks (SPEC.md §C2, §C3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tools.protocol_model import Left, Model, Move, Names, Record, Scenario, World

Listing = tuple[tuple[int, str], ...]
"""Pack ids and their names: p is `<id>.pack`, a digit is `<id>.<collection>.doomed`, and the empty name is none."""

RULES = {
    "push-checks-again": "§C2 step 6: the push checks its packs again after the commit",
    "push-reprieves": "§C2 step 4: a push renames a pack back when it relies on it and finds it doomed",
    "present-lists-last": "§C2: a push that finds a checkpoint there lists the packs after it has read the manifest",
    "announce": "§C3 step 2: a pack is renamed before it is removed",
    "read-again": "§C3 step 3: manifests are read again before a pack is removed",
    "own-name": "§C3 step 3: a pack under a name of another collection is not removed",
}


class Pack(Record, name="p", digest="", is_old=False, uploader=-1):
    """A pack with one partition."""

    name: str

    def move(self, name: str, new: str) -> None:
        """Rename or remove the pack, if it still has a name."""
        if self.name == name:
            self.name = new if name else ""


class Manifest(Record, exists=False, is_reported=False, is_deleted=False):
    """The manifest of one checkpoint."""


class Client(
    Record, number=-1, step="", checkpoint=-1, need=Names(), relied=Names(), listing=(), live=Names(), name=""
):
    """A push or a collection."""


class Location(World, processes=(), left=Left(), packs=(), manifests=(), collections=0):
    """A state of the location and of all processes."""

    def names(self) -> Listing:
        """Return the names of all packs."""
        return tuple((number, pack.name) for number, pack in enumerate(self.packs))


SCENARIOS = {
    "push": Scenario.of("push | collect | collect", "a b", "b a", 1, collect=2, kill=1),
    "pushes": Scenario.of("push | push | collect", "a b", "b a", 1, push=2, kill=1),
    "prune": Scenario.of("push | delete collect", "a b", "b a ac", 1, push=2, kill=1, day=1),
}


class RemoteModel(Model):
    """Pushes and collections at one location."""

    def first(self) -> Location:
        """Return the state before all steps."""
        scenario = self.scenario
        done = [number < scenario.done for number in range(len(scenario.saves))]
        return Location(
            processes=[Client(number=number) for number in range(len(scenario.programs))],
            left=scenario.left,
            packs=[Pack(digest=digest, is_old=True) for digest in scenario.packs],
            manifests=[Manifest(exists=is_done, is_reported=is_done) for is_done in done],
        )

    def choices(self, w: Location, operation: str) -> Iterable[int]:
        """Return the checkpoints to push or delete."""
        if operation == "collect":
            return [0]
        if operation == "push":
            return range(self.scenario.done, len(w.manifests))
        return [number for number, manifest in enumerate(w.manifests) if manifest.exists]

    def events(self, w: Location) -> Iterator[Move]:
        """Yield the passing of a day."""
        if w.left.day:
            after = w.spent("day")
            for pack in after.packs:
                pack.is_old = pack.is_old or pack.uploader < 0
            yield "a day passes", after

    def kill(self, w: Location, number: int) -> None:
        """End the operation of a process."""
        for pack in w.packs:
            pack.uploader = -1 if pack.uploader == number else pack.uploader
        w.processes[number] = Client(number=number)

    def problem(self, w: Location) -> str:
        """Return the invariant that a state breaks, or an empty string."""
        there = {pack.digest for pack in w.packs if pack.name}
        for checkpoint, manifest in enumerate(w.manifests):
            missing = {*self.scenario.saves[checkpoint]} - there
            if missing and manifest.is_reported and not manifest.is_deleted:
                return f"I2: checkpoint {checkpoint} was reported as pushed, and lacks partition {min(missing)}"
        return ""

    # Pushes.

    def _start_push(self, _w: Location, p: Client, checkpoint: int) -> str:
        p.step, p.checkpoint = "look" if self.has("present-lists-last") else "list_early", checkpoint
        return f"begins to push checkpoint {checkpoint}"

    def _list_early(self, w: Location, p: Client) -> str:
        p.step, p.listing = "look", w.names()
        return "lists packs"

    def _look(self, w: Location, p: Client) -> str:
        p.step = "compare" if w.manifests[p.checkpoint].exists else "index"
        return "reads the manifest" if p.step == "compare" else "finds no manifest"

    def _compare(self, w: Location, p: Client) -> str:
        there = {w.packs[pack].digest for pack, name in p.listing or w.names() if name == "p"}
        if there.issuperset(self.scenario.saves[p.checkpoint]):
            self._report(w, p)
            return "finds the checkpoint whole, and reports it"
        p.step, p.listing = "index", ()
        return "finds packs missing"

    def _index(self, w: Location, p: Client) -> str:
        found: dict[str, int] = {}
        for number, pack in enumerate(w.packs):
            if pack.name:
                found.setdefault(pack.digest, number)
        need = frozenset(self.scenario.saves[p.checkpoint])
        p.relied, p.need = frozenset(found[name] for name in need & found.keys()), need.difference(found)
        p.step = "upload" if p.need else "check_names"
        return f"reads indexes, and relies on packs {sorted(p.relied)}"

    def _upload(self, w: Location, p: Client) -> str:
        name = min(p.need)
        p.need, p.relied = p.need - {name}, p.relied | {len(w.packs)}
        p.step = "upload" if p.need else "check_names"
        w.packs.append(Pack(digest=name, uploader=p.number))
        return f"uploads {name} as pack {len(w.packs) - 1}"

    def _check_names(self, w: Location, p: Client) -> str:
        p.step, p.listing = "reprieve", tuple(pair for pair in w.names() if pair[0] in p.relied)
        return "lists packs"

    def _reprieve(self, w: Location, p: Client) -> str:
        is_whole = True
        for number, name in p.listing:
            if name != "p":
                is_whole &= bool(name) and (w.packs[number].name == name or not self.has("push-reprieves"))
                w.packs[number].move(name, "p" if self.has("push-reprieves") else name)
        if is_whole and p.name == "committed":
            self._report(w, p)
            return "finds its packs, and reports"
        p.step = "publish" if is_whole else "index"
        return "finds its packs" if is_whole else "finds packs removed"

    def _publish(self, w: Location, p: Client) -> str:
        manifest = w.manifests[p.checkpoint]
        manifest.exists, manifest.is_deleted = True, False
        if not self.has("push-checks-again"):
            self._report(w, p)
            return "publishes the manifest, and reports"
        p.step, p.name = "check_names", "committed"
        return "publishes the manifest: the commit"

    def _report(self, w: Location, p: Client) -> None:
        w.manifests[p.checkpoint].is_reported = w.manifests[p.checkpoint].exists
        self.kill(w, p.number)

    # Deletions and collections.

    def _start_delete(self, w: Location, _p: Client, checkpoint: int) -> str:
        w.manifests[checkpoint] = Manifest(is_deleted=True)
        return f"deletes checkpoint {checkpoint}"

    def _start_collect(self, w: Location, p: Client, _choice: int) -> str:
        w.collections += 1
        p.step, p.name = "list_packs", str(w.collections)
        return f"begins collection {w.collections}"

    def _list_packs(self, w: Location, p: Client) -> str:
        p.step = "read_manifests"
        p.listing = tuple(pair for pair in w.names() if pair[1] == "p" and w.packs[pair[0]].is_old)
        return f"lists old packs {[number for number, _ in p.listing]}"

    def _read_manifests(self, w: Location, p: Client) -> str:
        p.step = "doom" if self.has("announce") else "remove"
        p.live = Names().union(*(self.scenario.saves[i] for i, m in enumerate(w.manifests) if m.exists))
        return f"reads manifests, which need {sorted(p.live)}"

    def _doom(self, w: Location, p: Client) -> str:
        for number, name in p.listing:
            if w.packs[number].digest not in p.live:
                w.packs[number].move(name, p.name)
                p.listing = tuple(pair for pair in p.listing if pair[0] != number)
                return f"dooms pack {number}"
        p.step, p.listing = "adopt", tuple(pair for pair in w.names() if pair[1] not in ("", "p", p.name))
        return f"lists packs that others doomed: {p.listing}"

    def _adopt(self, w: Location, p: Client) -> str:
        if p.listing:
            (number, name), p.listing = p.listing[0], p.listing[1:]
            w.packs[number].move(name, p.name)
            return f"dooms pack {number} again"
        p.step = "read_again" if self.has("read-again") else "remove"
        p.listing = tuple(pair for pair in w.names() if pair[1] not in ("", "p"))
        return f"lists doomed packs {p.listing}"

    def _read_again(self, w: Location, p: Client) -> str:
        text, p.step = self._read_manifests(w, p), "remove"
        return f"again {text}"

    def _remove(self, w: Location, p: Client) -> str:
        if not p.listing:
            self.kill(w, p.number)
            return "ends"
        (number, name), p.listing = p.listing[0], p.listing[1:]
        pack = w.packs[number]
        if pack.digest in p.live:
            pack.move(pack.name, "p")
            return f"reprieves pack {number}"
        if not self.has("own-name") and pack.name != "p":
            name = pack.name
        elif name != p.name and self.has("announce"):
            return f"leaves pack {number} to another collection"
        pack.move(name, "")
        return f"removes pack {number}"
