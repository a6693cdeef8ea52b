"""Simulate a disk that loses power: it records syncs, and chooses which unsynced data survives.

The simulation allows more losses than any real file system. Of an unsynced file, any subset of its 4 KiB blocks may
have reached the disk. Of the names in an unsynced directory, any subset of the changes may have reached it. Only a
rename is one change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asymcheck.format import layout
from asymcheck.storage.local_files import FILE_MODE, Files
from asymcheck.storage.nvme.catalog import Catalog, Populate
from tests.crash.states import Journal, Promises, promises

BLOCK = 4096
Entry = tuple[Any, ...]
"""One line of the log: an operation and its arguments."""


class RecordingFiles(Files):
    """Runs all operations, and logs the operations that change the disk."""

    def __init__(self, log: list[Entry]) -> None:
        """Append to ``log``."""
        self.log = log

    def open_new(self, path: Path, mode: int = FILE_MODE) -> int:
        """Create and log."""
        descriptor = super().open_new(path, mode)
        self.log.append(("create", path))
        return descriptor

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        """Write and log, block by block."""
        super().pwrite(descriptor, buffers, offset, path)
        data, start = b"".join(buffers), 0
        while start < len(data):
            end = min(len(data), (offset + start) // BLOCK * BLOCK + BLOCK - offset)
            self.log.append(("write", path, offset + start, data[start:end]))
            start = end

    def truncate(self, descriptor: int, length: int, path: Path) -> None:
        """Truncate and log."""
        super().truncate(descriptor, length, path)
        self.log.append(("truncate", path, length))

    def sync(self, descriptor: int, path: Path) -> None:
        """Sync and log."""
        super().sync(descriptor, path)
        self.log.append(("sync", path))

    def sync_directory(self, path: Path) -> None:
        """Sync and log."""
        super().sync_directory(path)
        self.log.append(("sync_directory", path))

    def rename(self, source: Path, target: Path) -> None:
        """Rename and log."""
        super().rename(source, target)
        self.log.append(("rename", source, target))

    def link(self, source: Path, target: Path) -> bool:
        """Link and log."""
        done = super().link(source, target)
        if done:
            self.log.append(("link", source, target))
        return done

    def unlink(self, path: Path) -> None:
        """Unlink and log."""
        exists = path.exists()
        super().unlink(path)
        if exists:
            self.log.append(("unlink", path))

    def make_directory(self, path: Path) -> bool:
        """Create and log."""
        done = super().make_directory(path)
        if done:
            self.log.append(("mkdir", path))
        return done

    def remove_directory(self, path: Path) -> bool:
        """Remove and log."""
        done = super().remove_directory(path)
        if done:
            self.log.append(("unlink", path))
        return done


class LoggedJournal(Journal):
    """A journal whose lines are also in the log, in order with the operations."""

    def __init__(self, log: list[Entry]) -> None:
        """Append to ``log``."""
        self._log = log

    def note(self, word: str, **fields: object) -> None:
        """Add a line."""
        self._log.append(("note", {"word": word, **fields}))


@contextlib.contextmanager
def recorded_catalog(log: list[Entry]) -> Iterator[None]:
    """Log the catalog file after every transaction and at every sync, because LMDB does its own I/O."""
    write, begin, close = Catalog.write, Catalog._open, Catalog.close

    def keep(self: Catalog, *, synced: bool = False) -> None:
        log.append(("catalog", (self.path / "data.mdb").read_bytes(), synced))

    @contextlib.contextmanager
    def recording_write(self: Catalog, **options: bool) -> Iterator[Any]:
        with write(self, **options) as transaction:
            yield transaction
        keep(self)

    def recording_open(self: Catalog, populate: Populate) -> None:
        begin(self, populate)
        keep(self)

    def recording_close(self: Catalog) -> None:
        # LMDB syncs before it removes the mark.
        keep(self, synced=True)
        close(self)

    changed = recording_write, recording_open, recording_close
    Catalog.write, Catalog._open, Catalog.close = changed  # type: ignore[method-assign, assignment]  # taken back below
    try:
        yield
    finally:
        Catalog.write, Catalog._open, Catalog.close = write, begin, close  # type: ignore[method-assign]  # as above


@dataclasses.dataclass(eq=False)
class Node:
    """A file (``names`` is None) or a directory, with its synced content and its pending changes."""

    data: bytearray = dataclasses.field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = dataclasses.field(default_factory=list)
    names: dict[str, Node] | None = None
    seen: dict[str, Node] = dataclasses.field(default_factory=dict)
    changes: list[Change] = dataclasses.field(default_factory=list)

    def flush(self, keep: Callable[[], bool] = lambda: True) -> None:
        """Write the chosen pending blocks to the disk."""
        for offset, block in self.pending:
            if not keep():
                continue
            if block is None:
                self.data = (self.data + bytes(max(0, offset - len(self.data))))[:offset]
            else:
                self.data.extend(bytes(max(0, offset - len(self.data))))
                self.data[offset : offset + len(block)] = block
        self.pending.clear()


@dataclasses.dataclass(eq=False)
class Change:
    """An atomic change of names: each name in a directory refers to a node, or is removed."""

    parts: list[tuple[Node, str, Node | None]]

    def apply(self) -> None:
        """Write the change to the disk, after earlier changes of the same names."""
        for directory, name, _ in self.parts:
            for earlier in directory.changes[: directory.changes.index(self)]:
                if any(part[0] is directory and part[1] == name for part in earlier.parts):
                    earlier.apply()
        for directory, name, node in self.parts:
            assert directory.names is not None
            directory.names.pop(name, None)
            if node is not None:
                directory.names[name] = node
        self.drop()

    def drop(self) -> None:
        """Discard the pending change."""
        for directory in {id(part[0]): part[0] for part in self.parts}.values():
            directory.changes.remove(self)


class Disk:
    """The disk below a folder, after a log of operations."""

    def __init__(self, base: Path, log: list[Entry], *, whole_renames: bool = True) -> None:
        """Start with an empty, synced ``base`` and replay ``log``.

        With ``whole_renames``, a rename between directories is one change. Otherwise, a file may have both names
        afterwards, or none.
        """
        self._base = base
        self._root = Node(names={})
        self._whole_renames = whole_renames
        for kind, *arguments in log:
            if kind not in ("note", "catalog"):
                getattr(self, f"_{kind}")(*arguments)

    def _node(self, path: Path) -> Node:
        node = self._root
        for name in path.relative_to(self._base).parts:
            node = node.seen[name]
        return node

    def _file(self, path: Path) -> Node:
        """Return a file or directory, or a new one if another process has removed the name of an open one."""
        try:
            return self._node(path)
        except KeyError:
            return Node()

    def _change(self, *parts: tuple[Path, Node | None]) -> None:
        change = Change([(self._node(path.parent), path.name, node) for path, node in parts])
        for directory, name, node in change.parts:
            directory.seen.pop(name, None)
            if node is not None:
                directory.seen[name] = node
            if change not in directory.changes:
                directory.changes.append(change)

    def _create(self, path: Path) -> None:
        self._change((path, Node()))

    def _mkdir(self, path: Path) -> None:
        self._change((path, Node(names={})))

    def _write(self, path: Path, offset: int, block: bytes) -> None:
        self._file(path).pending.append((offset, block))

    def _truncate(self, path: Path, length: int) -> None:
        self._file(path).pending.append((length, None))

    def _sync(self, path: Path) -> None:
        self._file(path).flush()

    def _sync_directory(self, path: Path) -> None:
        # Directories above the watched directory are durable.
        if path.is_relative_to(self._base):
            directory = self._file(path)
            while directory.changes:
                directory.changes[0].apply()

    def _rename(self, source: Path, target: Path) -> None:
        node = self._node(source)
        if self._whole_renames or source.parent == target.parent:
            self._change((source, None), (target, node))
        else:
            self._change((target, node))
            self._change((source, None))

    def _link(self, source: Path, target: Path) -> None:
        self._change((target, self._node(source)))

    def _unlink(self, path: Path) -> None:
        self._change((path, None))

    def lose_power(self, names: Callable[[], bool], blocks: Callable[[], bool]) -> None:
        """Decide for each pending change of names, and for each pending block, whether it reached the disk."""
        for node in self._all(self._root, set()):
            for change in tuple(node.changes):
                if change in node.changes and not names():
                    change.drop()
                elif change in node.changes:
                    change.apply()
        for node in self._all(self._root, set()):
            node.flush(blocks)

    def _all(self, node: Node, known: set[int]) -> Iterator[Node]:
        if id(node) not in known:
            known.add(id(node))
            yield node
            for below in [*node.seen.values(), *(node.names or {}).values()]:
                yield from self._all(below, known)

    def write_to(self, folder: Path) -> None:
        """Write the content of the disk to ``folder``, which must not exist."""
        self._write_node(self._root, folder, {})

    def _write_node(self, node: Node, path: Path, written: dict[int, Path]) -> None:
        if node.names is not None:
            path.mkdir()
            for name, below in node.names.items():
                self._write_node(below, path / name, written)
        elif id(node) in written:
            os.link(written[id(node)], path)
        else:
            path.write_bytes(node.data)
            written[id(node)] = path


LOSSES: dict[str, Callable[[random.Random], tuple[Callable[[], bool], Callable[[], bool]]]] = {
    "names and data": lambda _dice: (lambda: False, lambda: False),
    "data": lambda _dice: (lambda: True, lambda: False),
    "names": lambda _dice: (lambda: False, lambda: True),
    "half": lambda dice: (lambda: dice.random() < 0.5, lambda: dice.random() < 0.5),
    "little": lambda dice: (lambda: dice.random() < 0.9, lambda: dice.random() < 0.9),
    "nearly all": lambda dice: (lambda: dice.random() < 0.1, lambda: dice.random() < 0.1),
}
"""Ways to lose unsynced data. Each decides whether a change of names, and whether a block, has reached the disk."""

CATALOGS = ("as it was", "one transaction older", "torn", "missing")
"""Ways to lose parts of the catalog. Transactions are not synced, so any block may come from an earlier one."""


def after_power_loss(
    base: Path, log: list[Entry], target: Path, *, loss: str, catalog: str, seed: int = 0, whole_renames: bool = True
) -> Promises:
    """Write a possible state of ``base`` after a power loss at the end of ``log`` to ``target``; return promises."""
    disk = Disk(base, log, whole_renames=whole_renames)
    disk.lose_power(*LOSSES[loss](random.Random(seed)))
    disk.write_to(target)
    catalog_bytes = _catalog_after_loss(
        [tuple(arguments) for kind, *arguments in log if kind == "catalog"], catalog, seed
    )
    for descriptor in (entry[2] for entry in log if entry[0] == "link" and entry[2].name == layout.DESCRIPTOR_NAME):
        store = target / descriptor.parent.relative_to(base)
        if catalog_bytes is not None and (store / layout.CATALOG).exists():
            (store / layout.CATALOG / "data.mdb").write_bytes(catalog_bytes)
    return promises([arguments[0] for kind, *arguments in log if kind == "note"])


def _catalog_after_loss(states: list[tuple[bytes, bool]], choice: str, seed: int) -> bytes | None:
    """Return ``data.mdb`` as a power loss leaves it after these states, oldest first; None for no such file."""
    if not states or choice == "missing":
        return None
    newest, synced = states[-1]
    if synced or choice == "as it was" or len(states) == 1:
        return newest
    if choice == "one transaction older":
        return states[-2][0]
    dice = random.Random(seed)
    blocks = []
    for start in range(0, len(newest), BLOCK):
        older = [state[start : start + BLOCK] for state, _ in states[-4:]]
        blocks.append(dice.choice([block for block in older if block] or [newest[start : start + BLOCK]]))
    return b"".join(blocks)
