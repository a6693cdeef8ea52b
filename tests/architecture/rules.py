"""The rules that the tree keeps, each with its reason: a failure should explain itself to whoever meets it first.

A rule is a function from a tree to its violations. `test_layers` runs all of them over the repository;
`test_rules_can_fail` shows each of them something it has to catch. Rules about who imports whom are here,
rules about what a module contains are in `content_rules`.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.architecture.source_tree import PACKAGE, Import, Module, SourceTree


@dataclass(frozen=True)
class Violation:
    """One place that breaks a rule."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Rule:
    """A named check and the reason for it."""

    name: str
    reason: str
    check: Callable[[SourceTree], Iterator[Violation]]


@dataclass(frozen=True)
class Layer:
    """Rooms of the house on one floor."""

    level: int
    rooms: tuple[str, ...]
    siblings_may_meet: bool
    """Whether a room may import another room of its own floor."""


LAYERS = (
    Layer(7, ("cli", "interop", "__main__"), siblings_may_meet=True),
    Layer(6, ("checkpointer",), siblings_may_meet=False),
    # Migration moves checkpoints between stores: it goes up one and down the other.
    Layer(
        5,
        (
            "store",
            "opened_store",
            "training_services",
            "pruning",
            "save_reporting",
            "together",
            "migration",
            "verify",
        ),
        siblings_may_meet=True,
    ),
    # `measure` asks tiers and codecs, and gives facts to policies, which may not meet those.
    Layer(4, ("pipeline", "recovery", "measure"), siblings_may_meet=False),
    Layer(3, ("policies", "partition", "tiers", "codecs", "ranks", "arguments", "tracing"), siblings_may_meet=False),
    Layer(2, ("format",), siblings_may_meet=False),
    # What may meet on the ground floor is narrower than "anything", see `ground_floor`.
    Layer(1, ("errors", "types", "config", "events", "threads"), siblings_may_meet=True),
)

FLOOR_OF = {f"{PACKAGE}.{room}": layer for layer in LAYERS for room in layer.rooms}

IMPURE = (
    {"torch", "os", "io", "time", "threading", "mmap", "pathlib", "socket", "subprocess"}
    | {"asyncio", "concurrent", "multiprocessing", "shutil", "tempfile"}  # the same by another door
)

TORCH_FREE = (f"{PACKAGE}.tiers", f"{PACKAGE}.policies")
TORCH_ALLOWED = (f"{PACKAGE}.tiers.gpu_staging", f"{PACKAGE}.tiers.dram_ring")

ONLY_IMPORTER = {
    "lmdb": ("asymcheck/tiers/nvme/catalog.py",),
    "xxhash": ("asymcheck/format/digest.py",),
    "pyarrow": ("asymcheck/format/manifest*.py", "asymcheck/tiers/remote/*"),
    "zstandard": ("asymcheck/codecs/zstd.py",),
    "click": ("asymcheck/cli/*",),
    "rich": ("asymcheck/cli/*",),
}

UNSHIPPED = frozenset({"tools", "tests", "benchmarks", "format_spec"})


def is_inside(name: str, package: str) -> bool:
    """Whether a dotted name is the package itself or something in it."""
    return name == package or name.startswith(f"{package}.")


def room_of(name: str) -> str | None:
    """`asymcheck.tiers` for `asymcheck.tiers.nvme.catalog`; None for the public face and for strangers."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == PACKAGE and len(parts) > 1 else None


def _inner_imports(tree: SourceTree) -> Iterator[tuple[Module, Import, str, str]]:
    """Each import of one room by another: module, import, importing room, imported room."""
    for module in tree.package:
        here = room_of(module.name)
        for found in module.imports:
            there = room_of(tree.resolve(found))
            if here and there and here != there:
                yield module, found, here, there


def every_module_has_a_layer(tree: SourceTree) -> Iterator[Violation]:
    """A module or package at the top of `asymcheck/` that no layer lists."""
    for module in tree.package:
        room = room_of(module.name)
        if room is not None and room not in FLOOR_OF:
            yield Violation(module.path, 1, f"{room} is on no floor: give it one in LAYERS, with its reason")


def arrows_point_down(tree: SourceTree) -> Iterator[Violation]:
    """An import of a higher layer."""
    for module, found, here, there in _inner_imports(tree):
        if here in FLOOR_OF and there in FLOOR_OF and FLOOR_OF[there].level > FLOOR_OF[here].level:
            what = f"{here} (L{FLOOR_OF[here].level}) imports {there} (L{FLOOR_OF[there].level})"
            yield Violation(module.path, found.line, what)


def siblings_do_not_meet(tree: SourceTree) -> Iterator[Violation]:
    """An import of another room on the same floor, where the floor does not allow it."""
    for module, found, here, there in _inner_imports(tree):
        floor = FLOOR_OF.get(here)
        if floor and floor == FLOOR_OF.get(there) and not floor.siblings_may_meet:
            yield Violation(module.path, found.line, f"{here} imports its sibling {there}")


def ground_floor(tree: SourceTree) -> Iterator[Violation]:
    """An import in errors, types, config or events of anything but the standard library and `types`."""
    types = f"{PACKAGE}.types"
    for module in tree.package:
        floor = FLOOR_OF.get(room_of(module.name) or "")
        if floor is None or floor.level != 1:
            continue
        for found in module.imports:
            own_types = is_inside(tree.resolve(found), types)
            if found.top not in sys.stdlib_module_names and not own_types:
                yield Violation(module.path, found.line, f"the ground floor imports {found.full_name}")


def nobody_enters_by_the_public_face(tree: SourceTree) -> Iterator[Violation]:
    """`from asymcheck import X` or `import asymcheck` inside the package."""
    for module in tree.package:
        for found in module.imports:
            if found.target == PACKAGE and module.name != PACKAGE:
                name = found.name or "…"
                yield Violation(module.path, found.line, f"write `from {PACKAGE}.<module> import {name}`")


def format_is_pure(tree: SourceTree) -> Iterator[Violation]:
    """An import in `format` of something that acts on the world."""
    for module in tree.package:
        if is_inside(module.name, f"{PACKAGE}.format"):
            for found in module.imports:
                if found.top in IMPURE:
                    yield Violation(module.path, found.line, f"the format layer imports {found.target}")


def tiers_and_policies_know_no_torch(tree: SourceTree) -> Iterator[Violation]:
    """An import of torch in a tier or policy other than the two that own device memory."""
    for module in tree.package:
        bound = any(is_inside(module.name, package) for package in TORCH_FREE)
        if bound and not any(is_inside(module.name, package) for package in TORCH_ALLOWED):
            for found in module.imports:
                if found.top == "torch":
                    yield Violation(module.path, found.line, f"{module.name} imports {found.target}")


def one_importer_each(tree: SourceTree) -> Iterator[Violation]:
    """An import of a third-party engine outside the one module that wraps it."""
    for module in tree.package:
        for found in module.imports:
            homes = ONLY_IMPORTER.get(found.top)
            if homes and not any(fnmatchcase(module.path, home) for home in homes):
                yield Violation(module.path, found.line, f"{found.top} is imported only by {' and '.join(homes)}")


def shipped_code_stands_alone(tree: SourceTree) -> Iterator[Violation]:
    """An import in the package of a folder that is not in the wheel."""
    for module in tree.package:
        for found in module.imports:
            if found.top in UNSHIPPED:
                yield Violation(module.path, found.line, f"{found.target} is not installed with the package")


def the_reference_reader_is_independent(tree: SourceTree) -> Iterator[Violation]:
    """An import of the library in `format_spec/`."""
    for module in tree.below("format_spec"):
        for found in module.imports:
            if found.top == PACKAGE:
                yield Violation(module.path, found.line, f"format_spec imports {found.full_name}")


def no_cycles(tree: SourceTree) -> Iterator[Violation]:
    """A ring of modules that import each other; the first line of each module in it is named once."""
    arrows = {
        module.name: sorted({tree.resolve(found) for found in module.imports} & tree.by_name.keys() - {module.name})
        for module in tree.package
    }
    reported: set[str] = set()
    for start in sorted(arrows):
        ring = _way_back(arrows, start)
        if ring and not reported & set(ring):
            reported |= set(ring)
            yield Violation(tree.by_name[start].path, 1, " → ".join([*ring, start]))


def _way_back(arrows: dict[str, list[str]], start: str) -> list[str]:
    """The shortest path along the arrows that leaves `start` and could step back to it; empty if there is none."""
    paths = [[start]]
    seen = {start}
    for path in paths:
        for neighbour in arrows[path[-1]]:
            if neighbour == start:
                return path
            if neighbour not in seen:
                seen.add(neighbour)
                paths.append([*path, neighbour])
    return []


IMPORT_RULES = (
    Rule(
        "every_module_has_a_layer",
        "A room that no layer lists is a room without rules. A new one is a decision: say what may import it.",
        every_module_has_a_layer,
    ),
    Rule(
        "arrows_point_down",
        "A lower layer is understood, tested and replaced without knowing who uses it. One arrow upwards, even inside "
        "a function or under TYPE_CHECKING, makes two layers one. Pass a value or a callback down instead.",
        arrows_point_down,
    ),
    Rule(
        "siblings_do_not_meet",
        "The way down, the way up and the look at both share formats and tiers, not code; policies decide about bytes "
        "that tiers hold and codecs encode, without calling them. What two siblings both need lies a floor below.",
        siblings_do_not_meet,
    ),
    Rule(
        "ground_floor",
        "errors, types, config and events are imported by everyone, so they import nothing of ours except types: "
        "anything more, and importing an error class would load an engine.",
        ground_floor,
    ),
    Rule(
        "nobody_enters_by_the_public_face",
        "asymcheck/__init__.pyi names something of every room. A module that imports from it depends on what nobody "
        "sees, and rules about layers cannot be checked.",
        nobody_enters_by_the_public_face,
    ),
    Rule(
        "format_is_pure",
        "The format layer is SPEC.md in code: bytes to values and back. Without I/O, clock, threads and torch it can "
        "be fuzzed, checked against vectors, and read beside the specification.",
        format_is_pure,
    ),
    Rule(
        "tiers_and_policies_know_no_torch",
        "A tier moves bytes and a policy weighs numbers; neither knows what a model is. Only the GPU staging buffer "
        "and the pinned ring own memory that torch must see.",
        tiers_and_policies_know_no_torch,
    ),
    Rule(
        "one_importer_each",
        "An engine with one importer can be bounded, checked and replaced in one place, and its surprises (LMDB's "
        "unchecked pages, Arrow's unvalidated buffers) are dealt with once.",
        one_importer_each,
    ),
    Rule(
        "shipped_code_stands_alone",
        "tools, tests, benchmarks and format_spec are not in the wheel: such an import works here, not at a user's.",
        shipped_code_stands_alone,
    ),
    Rule(
        "the_reference_reader_is_independent",
        "format_spec proves that SPEC.md alone is enough to read a store. A reader that imports the library proves "
        "only that the library agrees with itself.",
        the_reference_reader_is_independent,
    ),
    Rule(
        "no_cycles",
        "Modules in a ring can only be read, tested and changed together. Local and TYPE_CHECKING imports count: they "
        "hide a ring, they do not open it.",
        no_cycles,
    ),
)
