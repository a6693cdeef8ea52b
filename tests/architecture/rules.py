"""Rules about imports, each with its reason, which a failing test prints.

A rule is a function from a tree to its violations. `test_layers` applies all rules to the repository.
`test_rules_can_fail` gives each rule a violation to find. Rules about the content of a module are in
`content_rules`.
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
    """A check and the reason for it."""

    reason: str
    check: Callable[[SourceTree], Iterator[Violation]]

    @property
    def name(self) -> str:
        """Name of the check."""
        return self.check.__name__


@dataclass(frozen=True)
class Layer:
    """Packages on one layer."""

    level: int
    packages: tuple[str, ...]
    siblings_allowed: bool
    """Whether a package may import another package of its own layer."""


LAYERS = (
    Layer(16, ("cli", "__main__"), siblings_allowed=True),
    Layer(15, ("integrations", "merging", "view"), siblings_allowed=False),
    Layer(14, ("checkpointer", "convert"), siblings_allowed=False),
    Layer(13, ("training", "publish"), siblings_allowed=False),
    Layer(12, ("store",), siblings_allowed=False),
    Layer(11, ("training_services",), siblings_allowed=False),
    # A background save is the largest user of the write path, and no package below needs it.
    Layer(10, ("opened_store", "capture"), siblings_allowed=False),
    Layer(9, ("replication",), siblings_allowed=False),
    Layer(8, ("gc",), siblings_allowed=False),
    Layer(7, ("inspect",), siblings_allowed=False),
    Layer(6, ("fsck",), siblings_allowed=False),
    # The write path and the read path do not import each other.
    Layer(5, ("commit", "restore"), siblings_allowed=False),
    # `measurement` measures storage and codecs for the policies, which may not import them.
    Layer(4, ("measurement", "distributed"), siblings_allowed=False),
    Layer(3, ("policies", "state", "storage", "codecs", "validation", "tracing"), siblings_allowed=False),
    # `config` checks its values against the limits of the format.
    Layer(2, ("format", "config"), siblings_allowed=True),
    # The imports of the lowest layer are restricted further, see `lowest_layer`.
    Layer(1, ("errors", "types", "events", "executor"), siblings_allowed=True),
)

LAYER_OF = {f"{PACKAGE}.{package}": layer for layer in LAYERS for package in layer.packages}

IMPURE = (
    {"torch", "os", "io", "time", "threading", "mmap", "pathlib", "socket", "subprocess"}
    | {"asyncio", "concurrent", "multiprocessing", "shutil", "tempfile"}  # the same in another way
)

TORCH_FREE = (f"{PACKAGE}.storage", f"{PACKAGE}.policies")
TORCH_ALLOWED = (f"{PACKAGE}.storage.gpu_staging", f"{PACKAGE}.storage.shm")

ONLY_IMPORTER = {
    "lmdb": ("asymcheck/storage/nvme/catalog.py",),
    "xxhash": ("asymcheck/format/digest.py",),
    "pyarrow": ("asymcheck/format/manifest*.py", "asymcheck/storage/remote/*"),
    "zstandard": ("asymcheck/codecs/zstd.py",),
    "click": ("asymcheck/cli/*",),
    "rich": ("asymcheck/cli/*",),
}

UNSHIPPED = frozenset({"tools", "tests", "benchmarks", "format_spec"})


def is_inside(name: str, package: str) -> bool:
    """Whether a dotted name is the package itself or something in it."""
    return name == package or name.startswith(f"{package}.")


def package_of(name: str) -> str | None:
    """`asymcheck.storage` for `asymcheck.storage.nvme.catalog`; None for `asymcheck` itself and for other packages."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == PACKAGE and len(parts) > 1 else None


def _inner_imports(tree: SourceTree) -> Iterator[tuple[Module, Import, str, str]]:
    """Each import of one package by another: module, import, importing package, imported package."""
    for module in tree.package:
        here = package_of(module.name)
        for found in module.imports:
            there = package_of(tree.resolve(found))
            if here and there and here != there:
                yield module, found, here, there


def every_module_has_a_layer(tree: SourceTree) -> Iterator[Violation]:
    """A module or package at the top of `asymcheck/` that no layer lists."""
    for module in tree.package:
        package = package_of(module.name)
        if package is not None and package not in LAYER_OF:
            yield Violation(module.path, 1, f"{package} is on no layer: give it one in LAYERS, with its reason")


def arrows_point_down(tree: SourceTree) -> Iterator[Violation]:
    """An import of a higher layer."""
    for module, found, here, there in _inner_imports(tree):
        if here in LAYER_OF and there in LAYER_OF and LAYER_OF[there].level > LAYER_OF[here].level:
            what = f"{here} (L{LAYER_OF[here].level}) imports {there} (L{LAYER_OF[there].level})"
            yield Violation(module.path, found.line, what)


def siblings_do_not_import(tree: SourceTree) -> Iterator[Violation]:
    """An import of another package on the same layer, where the layer does not allow it."""
    for module, found, here, there in _inner_imports(tree):
        layer = LAYER_OF.get(here)
        if layer and layer == LAYER_OF.get(there) and not layer.siblings_allowed:
            yield Violation(module.path, found.line, f"{here} imports its sibling {there}")


def lowest_layer(tree: SourceTree) -> Iterator[Violation]:
    """An import in the lowest layer of anything but the standard library and `types`; the executor may raise errors."""
    executor, errors = f"{PACKAGE}.executor", f"{PACKAGE}.errors"
    for module in tree.package:
        layer = LAYER_OF.get(package_of(module.name) or "")
        if layer is None or layer.level != 1:
            continue
        for found in module.imports:
            allowed = (f"{PACKAGE}.types", *([errors] if module.name == executor else []))
            is_allowed = any(is_inside(tree.resolve(found), name) for name in allowed)
            if found.top not in sys.stdlib_module_names and not is_allowed:
                yield Violation(module.path, found.line, f"the lowest layer imports {found.full_name}")


def no_import_of_the_public_interface(tree: SourceTree) -> Iterator[Violation]:
    """`from asymcheck import X` or `import asymcheck` inside the package."""
    for module in tree.package:
        for found in module.imports:
            if found.target == PACKAGE and module.name != PACKAGE:
                name = found.name or "…"
                yield Violation(module.path, found.line, f"write `from {PACKAGE}.<module> import {name}`")


def format_is_pure(tree: SourceTree) -> Iterator[Violation]:
    """An import in `format` of a module for I/O, time or threads."""
    for module in tree.package:
        if is_inside(module.name, f"{PACKAGE}.format"):
            for found in module.imports:
                if found.top in IMPURE:
                    yield Violation(module.path, found.line, f"the format layer imports {found.target}")


def storage_and_policies_know_no_torch(tree: SourceTree) -> Iterator[Violation]:
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
    """A cycle of modules that import each other, reported once."""
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
    """The shortest path of imports from `start` whose last module imports `start`; empty if there is none."""
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
        "A package without a layer has no rules. Give each new package a layer in LAYERS.",
        every_module_has_a_layer,
    ),
    Rule(
        "A lower layer must not depend on its users, so that it can be understood, tested and replaced alone. Imports "
        "inside functions and under TYPE_CHECKING count, too. Pass a value or a callback down instead.",
        arrows_point_down,
    ),
    Rule(
        "Packages on one layer share formats and interfaces, but no code. Move code that two of them need to a lower "
        "layer.",
        siblings_do_not_import,
    ),
    Rule(
        "All packages import errors, types and events. If these imported an engine, importing an error class would "
        "load the engine.",
        lowest_layer,
    ),
    Rule(
        "asymcheck/__init__.pyi names objects of every package. An import from there hides the real dependency from "
        "the rules about layers.",
        no_import_of_the_public_interface,
    ),
    Rule(
        "The format layer is SPEC.md in code: bytes to values and back. Without I/O, clock, threads and torch, it can "
        "be fuzzed, and compared with vectors and the specification.",
        format_is_pure,
    ),
    Rule(
        "A tier moves bytes, and a policy compares numbers. Only the GPU staging buffer and the pinned ring have "
        "memory that torch must see.",
        storage_and_policies_know_no_torch,
    ),
    Rule(
        "An engine with one importer can be limited, checked and replaced in one module. LMDB's unchecked pages and "
        "Arrow's unvalidated buffers are examples.",
        one_importer_each,
    ),
    Rule(
        "tools, tests, benchmarks and format_spec are not in the wheel. Such an import works in the repository, but "
        "not in an installation.",
        shipped_code_stands_alone,
    ),
    Rule(
        "format_spec shows that SPEC.md alone is enough to read a store. A reader that imports the library would only "
        "show that the library agrees with itself.",
        the_reference_reader_is_independent,
    ),
    Rule(
        "Modules in a cycle can only be read, tested and changed together. Imports inside functions and under "
        "TYPE_CHECKING count, because they only hide a cycle.",
        no_cycles,
    ),
)
