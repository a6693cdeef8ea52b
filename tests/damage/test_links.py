"""Symbolic links in the place of files and directories of a store: the target keeps its content."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asymcheck.checkpointer import Checkpointer
from asymcheck.convert.export_target import Draft
from asymcheck.errors import AsymcheckError, StorageError
from asymcheck.storage.process_identity import this_process
from asymcheck.store import Store
from tests.cli.conftest import run_command
from tests.damage.small_store import SmallStore, make_store, same, small_state

_HEX = "0123456789abcdef"
NAMES = [
    "asymcheck.store",
    "heads",
    "heads/default",
    "heads/default/00000002.head",
    f"heads/default/{_HEX}.tmp",
    "manifests",
    "manifests/default",
    "manifests/default/*-000000000003-*",
    "manifests/default/*-000000000003-*/*.manifest",
    "packs",
    "packs/*.pack",
    f"packs/{_HEX * 2}.tmp",
    "pool",
    "catalog",
    "catalog/data.mdb",
    "catalog/lock.mdb",
    "catalog/writer.lock",
    "catalog/open",
    "catalog/open/MARK",
    "catalog.damaged-1.tmp",
    "locks",
    "locks/other.lock",
    f"locks/{_HEX}.tmp",
    f"{_HEX}.tmp",
]
"""The names of SPEC.md §A3 and §B3.1."""
IGNORED = [f"pool/{_HEX * 2}.pack", "catalog/open/damaged"]
"""Names whose link causes no error, because it is passed over or removed."""
_STATE: dict[str, object] = {"x": torch.ones(3)}


@pytest.fixture
def small(tmp_path: Path) -> SmallStore:
    """Return a store in which a second run has a lock."""
    small = make_store(tmp_path / "store", steps=3)
    with small.open(read_only=False) as store, Checkpointer(store, _STATE, run="other", every=1) as checkpointer:
        checkpointer.restore()
    return small


def _replace_by_link(small: SmallStore, name: str) -> tuple[Path, Path]:
    """Replace a file or directory of the store by a link to it; return the link and its target."""
    owner = this_process()
    mark = f"{owner.pid}-{owner.start_ticks}-{owner.boot_id}-{owner.pid_namespace}"
    path = min(small.path.glob(name), default=small.path / name.replace("MARK", mark))
    victim = small.path.with_name("victim")
    if path.exists():
        path.rename(victim)
    elif "catalog." in name:
        victim.mkdir()
        (victim / "precious").write_bytes(b"precious")
    else:
        victim.write_bytes(b"precious" * 1024)
    path.symlink_to(victim)
    return path, victim


def _content(victim: Path) -> dict[Path, tuple[bytes, int]]:
    """Return content and time of change of a file, or of all files below a directory."""
    files = [path for path in (victim, *victim.rglob("*")) if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def _use(small: SmallStore) -> Iterator[str]:
    """Use the store in every way; yield errors and findings."""

    def resume(store: Store) -> None:
        with Checkpointer(store, _STATE, run="other", every=1) as checkpointer:
            checkpointer.restore()

    uses: list[Callable[[Store], object]] = [
        Store.gc,
        lambda store: store.save(small_state(3), step=4),
        resume,
        Store.verify,
        lambda store: store.repair().left,
        Store.load,
        Store.gc,
    ]
    for use in uses:
        try:
            with small.open(read_only=False) as store:
                yield str(use(store))
        except AsymcheckError as error:
            yield str(error)


@pytest.mark.slow(quick=["catalog/data.mdb", "catalog/writer.lock", "catalog.damaged-1.tmp"])
@pytest.mark.parametrize("name", NAMES + IGNORED)
def test_target_of_a_link_in_a_store_keeps_its_content(small: SmallStore, name: str) -> None:
    """Test that no call writes through a link, that an error names the link, and that its removal repairs the store."""
    link, victim = _replace_by_link(small, name)
    before = _content(victim)
    messages = " ".join(_use(small))
    assert _content(victim) == before
    assert (f"{link} is a symbolic link; a store has none: remove it" in messages) == (name in NAMES)
    link.unlink(missing_ok=True)
    if name not in IGNORED and "precious" not in str(before):
        victim.rename(link)
    with small.open(read_only=False) as store:
        store.gc()
        assert store.verify() == []
        assert all(same(store.load(step), state) for step, state in small.states.items())


def test_store_directory_may_be_a_link(small: SmallStore, tmp_path: Path) -> None:
    """Test that a store is used, repaired and collected through a link to its directory."""
    (tmp_path / "link").symlink_to(small.path)
    linked = SmallStore(tmp_path / "link", small.states)
    assert "symbolic link" not in " ".join(_use(linked))
    with linked.open() as store:
        assert same(store.load(2), small.states[2])


def test_commands_refuse_a_link_in_a_store(small: SmallStore) -> None:
    """Test that the exit status of commands that write is not 0."""
    _, victim = _replace_by_link(small, "catalog/writer.lock")
    before = _content(victim)
    source = small.path.with_name("weights.pt")
    torch.save(_STATE, source)
    for words in (("gc", small.path), ("verify", small.path, "--repair"), ("convert", source, small.path)):
        outcome = run_command(*words)
        assert outcome.status != 0
        assert "writer.lock is a symbolic link" in outcome.err
    assert _content(victim) == before


def test_export_writes_through_no_link(tmp_path: Path) -> None:
    """Test that a link in the place of a draft is refused."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    draft = Draft(tmp_path / "weights.pt", overwrite=False)
    draft.path.symlink_to(victim)
    with pytest.raises(StorageError, match="symbolic link"):
        draft.file()
    assert victim.read_bytes() == b"precious"
