"""Pipes, devices and sparse files in the place of files of a store: no call waits, reads or allocates without end."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asymcheck.config import CATALOG_READERS_MAX, StoreConfig
from asymcheck.errors import AsymcheckError, LockTimeoutError, StorageError
from asymcheck.storage.nvme import pack_reader
from asymcheck.store import Store
from tests.damage.memory_limit import limit_memory
from tests.damage.small_store import CONFIG, make_store, small_state
from tests.zygote import Zygote

_ID = "0123456789abcdef"
FILES = [
    *("asymcheck.store", "heads/default/00000002.head", "manifests/*/*/*.manifest", "packs/*.pack"),
    *("catalog/data.mdb", "catalog/lock.mdb", "catalog/writer.lock", f"packs/{_ID}{_ID}.tmp", f"{_ID}.tmp"),
]
"""Files whose replacement an error or a finding names."""
OTHERS = [f"pool/{_ID}{_ID}.pack", "catalog/open/damaged", "locks/default.lock"]


def use(path: str) -> list[str]:
    """Use a store in every way; return findings and errors."""

    def save(store: Store) -> object:
        return store.save({"w": torch.ones(500)}, step=9)

    uses: list[Callable[[Store], object]] = [Store.verify, Store.load, save, Store.gc, Store.repair, Store.disk_usage]
    texts = []
    for call in uses:
        try:
            with Store.open(path, config=CONFIG) as store:
                texts.append(str(call(store)))
        except AsymcheckError as error:
            texts.append(str(error))
    return texts


def _zeros(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # as /dev/zero
    except PermissionError:
        pytest.skip("only root may create a device")


@pytest.mark.slow(quick=["pipe-catalog/data.mdb"])
@pytest.mark.parametrize("name", FILES + OTHERS)
@pytest.mark.parametrize("replace", [os.mkfifo, _zeros], ids=["pipe", "device"])
def test_no_call_reads_a_pipe_or_device(
    zygote: Zygote, tmp_path: Path, name: str, replace: Callable[[Path], None]
) -> None:
    """Test that each call ends, and that the path of a file of the store is in an error or a finding."""
    store = tmp_path / "store"
    make_store(store)
    path = min(store.glob(name), default=store / name)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    replace(path)
    outcome = zygote.call("tests.damage.test_special_files:use", timeout_s=60.0, path=str(store))
    assert outcome.returned, str(outcome)
    assert (f"{path}: it is neither a file nor a directory; remove it" in "\n".join(outcome.value)) == (name in FILES)


def verify_with_little_memory(path: str) -> list[str]:
    """Verify a store with 256 MiB of memory; return the findings."""
    limit_memory(256 << 20)
    with Store.open(path, config=CONFIG, read_only=True) as store:
        return [*map(str, store.verify()), str(store.restore().checkpoint.step)]


def test_sparse_manifest_costs_no_memory(zygote: Zygote, tmp_path: Path) -> None:
    """Test a file of a tebibyte that needs a block of the drive."""
    make_store(tmp_path / "store", steps=2)
    newest = max((tmp_path / "store" / "manifests").glob("*/*/*.manifest"))
    os.truncate(newest, 1 << 40)
    outcome = zygote.call("tests.damage.test_special_files:verify_with_little_memory", path=str(tmp_path / "store"))
    assert outcome.returned, str(outcome)
    assert "the file has more than 1073741824 bytes" in outcome.value[0]
    assert outcome.value[-1] == "1"


def test_sparse_lock_file_does_not_fill_the_drive(tmp_path: Path) -> None:
    """Test a file that is larger than any program makes it: no block is allocated until the file is removed."""
    small = make_store(tmp_path / "store")
    lock = small.path / "catalog" / "lock.mdb"
    os.truncate(lock, 128 * CATALOG_READERS_MAX)
    before = lock.stat().st_blocks
    with small.open(read_only=False) as store:
        with pytest.raises(StorageError, match=r"lock\.mdb has .* bytes, but needs at most .*: remove it"):
            store.save(small_state(3), step=3)
        assert lock.stat().st_blocks == before
        lock.unlink()
        store.save(small_state(3), step=3)


def test_a_mount_with_changing_inode_numbers_is_no_endless_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a read of a pack that seems to be another file whenever it is locked."""
    make_store(tmp_path / "store")
    monkeypatch.setattr(pack_reader, "is_same_file", lambda *_: False)
    config = StoreConfig(read_lock_timeout_s=0.1)
    with (
        Store.open(tmp_path / "store", config=config, read_only=True) as store,
        pytest.raises(LockTimeoutError, match=r"was locked .* for 0\.1 s"),
    ):
        store.load(1)
