"""Test a full disk: a small file system, filled to the last byte."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer
from asymcheck.config import StoreConfig
from asymcheck.errors import OutOfSpaceError, SkippedCheckpointWarning
from asymcheck.storage.shm.orphaned_rings import restore_command
from asymcheck.store import Store
from tests.checkpointer.loops import linear_loop, rings
from tests.crash.actions import open_store
from tests.crash.dead_rings import kill_when_ready
from tests.crash.states import CONFIG, Promises, fingerprint, make_state
from tests.crash.survival import check_goes_on, check_unrepaired, leftovers
from tests.crash.trainer import assert_restored, config_for, train
from tests.zygote import Zygote

SIZE_MIB = 8


def _mount(point: Path, kind: str, image: Path) -> None:
    point.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(point)]
    else:
        with image.open("wb") as file:
            file.truncate(SIZE_MIB << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
        command = ["mount", "-o", "loop", str(image), str(point)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr.strip()}")


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return a mounted file system of a few MiB."""
    kind = str(request.param)
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    if kind == "ext4" and not shutil.which("mkfs.ext4"):
        pytest.skip("there is no mkfs.ext4")
    point = tmp_path / "disk"
    _mount(point, kind, tmp_path / "image")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def _fill(disk: Path, leave: int = 0) -> Path:
    """Fill the disk except for ``leave`` bytes, with a file outside of the store."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    if leave:
        os.truncate(ballast, max(0, ballast.stat().st_size - leave))
    return ballast


def _save(store: Store, promised: Promises, step: int) -> None:
    state = make_state(step)
    promised.begun["default", step] = fingerprint(state)
    store.save(state, step=step)
    promised.durable["default", step] = promised.begun["default", step]


def _save_until_it_fails(store: Store, promised: Promises, first: int) -> None:
    for step in range(first, 10_000):
        _save(store, promised, step)


@pytest.mark.slow
def test_saving_until_the_disk_is_full(small_disk: Path) -> None:
    """Test that the failing save leaves nothing, earlier checkpoints stay, and deleting frees space again."""
    promised = Promises()
    path = small_disk / "store"
    with open_store(path) as store:
        with pytest.raises(OutOfSpaceError, match="free space, or delete checkpoints and run gc"):
            _save_until_it_fails(store, promised, 0)
        last = max(step for _, step in promised.durable)
        assert last >= 5
        del promised.begun["default", last + 1]
        check_unrepaired(path, promised)
        store.gc()
        assert leftovers(store) == []
        for step in range(last):
            store.delete(step)
            del promised.durable["default", step]
            promised.deleted.add(("default", step))
        store.gc()
        assert leftovers(store) == []
        _save(store, promised, last + 1)
    check_unrepaired(path, promised)
    check_goes_on(path, promised)


@pytest.mark.slow(quick=["tmpfs-0"], long=["tmpfs-8", "tmpfs-160", "ext4-8", "ext4-64"])
@pytest.mark.parametrize("leave_kib", [0, 8, 64, 160])
def test_a_disk_that_others_fill(small_disk: Path, leave_kib: int) -> None:
    """Test that saves fail while a foreign file fills the disk, and work after its removal."""
    promised = Promises()
    path = small_disk / "store"
    with open_store(path) as store:
        for step in (0, 1):
            _save(store, promised, step)
        ballast = _fill(small_disk, leave_kib * 1024)
        with pytest.raises(OutOfSpaceError):
            _save_until_it_fails(store, promised, 2)
        failed = max(step for _, step in promised.begun)
        del promised.begun["default", failed]
        check_unrepaired(path, promised)
        ballast.unlink()
        store.gc()
        assert leftovers(store) == []
        _save(store, promised, failed)
    check_unrepaired(path, promised)
    check_goes_on(path, promised)


@pytest.mark.slow(quick=["tmpfs"])
def test_deleting_and_collecting_on_a_full_disk(small_disk: Path) -> None:
    """Test that a collection returns freed packs to the file system while free space is short."""
    promised = Promises()
    path = small_disk / "store"
    config = dataclasses.replace(CONFIG, pool_bytes=1 << 30)
    with Store.open(path, config=config, create=True) as store:
        for step in range(13):
            _save(store, promised, step)
        _fill(small_disk)
        for step in range(12):
            store.delete(step)
            del promised.durable["default", step]
            promised.deleted.add(("default", step))
        store.gc()
        assert leftovers(store) == []
        pooled = store.resources.usage().pooled_bytes
        assert pooled <= shutil.disk_usage(small_disk).free, "the pool keeps what others need"
        _save(store, promised, 13)
        _save(store, promised, 14)
    check_unrepaired(path, promised)
    check_goes_on(path, promised)


def test_opening_on_a_full_disk(small_disk: Path) -> None:
    """Test that a new process can open and read the store, and that writes are refused without a crash."""
    promised = Promises()
    path = small_disk / "store"
    with open_store(path) as store:
        _save(store, promised, 0)
        _save(store, promised, 1)
    shutil.rmtree(path / "catalog")
    ballast = _fill(small_disk)
    check_unrepaired(path, promised)
    with open_store(path) as store, pytest.raises(OutOfSpaceError):
        store.save(make_state(2), step=2)
    check_unrepaired(path, promised)
    ballast.unlink()
    check_goes_on(path, promised)


def try_to_save(path: str, step: int) -> None:
    """Open a store and save; a full disk is not an error. Runs in a child."""
    try:
        with open_store(Path(path)) as store:
            store.save(make_state(step), step=step)
    except OutOfSpaceError:
        return


@pytest.mark.slow(long=["ext4-there", "tmpfs-lost"])
@pytest.mark.parametrize("catalog", ["there", "lost"])
def test_nearly_full(small_disk: Path, catalog: str, zygote: Zygote) -> None:
    """Test that a process that opens the store and saves is refused, and not killed by a signal.

    Writing to a mapped page without space on the disk raises SIGBUS.
    """
    promised = Promises()
    path = small_disk / "store"
    with open_store(path) as store:
        _save(store, promised, 0)
    promised.begun["default", 1] = fingerprint(make_state(1))
    for leave in (0, 4, 8, 12, 24, 48, 64, 80, 112, 160, 240, 320):
        if catalog == "lost":
            shutil.rmtree(path / "catalog", ignore_errors=True)
        ballast = _fill(small_disk, leave * 1024)
        child = zygote.start(try_to_save, path=str(path), step=1)
        status = child.wait()
        assert status == 0, f"with {leave} KiB left: ended with {status}: {child.output.read_text()}"
        steps = check_unrepaired(path, dataclasses.replace(promised, newest={})).steps["default"]
        ballast.unlink()
        if 1 in steps:
            return
        with open_store(path) as store:
            store.gc()
    raise AssertionError("no save succeeded, with all the room in the world")


def test_creating_a_store_on_a_full_disk(small_disk: Path) -> None:
    """Test that no store is created, and that the path can be used later."""
    ballast = _fill(small_disk)
    with pytest.raises(OutOfSpaceError):
        open_store(small_disk / "store")
    ballast.unlink()
    check_goes_on(small_disk / "store", Promises())


def test_freed_packs_make_space_for_a_larger_one(small_disk: Path) -> None:
    """Test that a save on a full disk with freed packs extends one of them."""
    path = small_disk / "store"
    sizes = StoreConfig(catalog_map_bytes=1 << 20, catalog_readers=16, pool_bytes=1 << 30)
    with Store.open(path, config=sizes, create=True) as store:
        for step in range(6):
            store.save({"own": torch.randn(100_000)}, step=step)
        store.save({"own": torch.zeros(1)}, step=6)
        for step in range(6):
            store.delete(step)
        _fill(small_disk, 3 << 20)
        store.gc()
        _fill(small_disk, 256 << 10)
        assert len(list((path / "pool").iterdir())) >= 4
        state = torch.randn(300_000)
        store.save({"own": state}, step=7)
        assert torch.equal(store.load()["own"], state)


@pytest.fixture(params=["catalog there", "catalog lost"])
def dead_with_capture(request: pytest.FixtureRequest, small_disk: Path, tmp_path: Path, zygote: Zygote) -> Path:
    """A killed training whose last capture is only in memory, and a disk that is full meanwhile."""
    folder = tmp_path / "training"
    folder.mkdir()
    (small_disk / "store").mkdir()
    (folder / "store").symlink_to(small_disk / "store")
    kill_when_ready(zygote.start(train, path=str(folder), steps=1, durable=1), folder)
    for ring in rings(folder):
        ring.unlink()
    zygote.start(train, path=str(folder), kill="capture.complete", number=1).wait_killed()
    if request.param == "catalog lost":
        shutil.rmtree(small_disk / "store" / "catalog")
    _fill(small_disk, 64 << 10)
    return folder


@pytest.mark.slow(long=["catalog there-ext4", "catalog lost-tmpfs"])
def test_capture_in_memory_is_not_lost_on_a_full_disk(
    dead_with_capture: Path, small_disk: Path, tmp_path: Path
) -> None:
    """Test the error with its ways on: the step goes to another drive, or into the store once there is space."""
    folder, (_, _, loop) = dead_with_capture, linear_loop()
    with (
        Store.open(folder / "store") as store,
        Checkpointer(store, loop.state, capture=config_for(folder)) as checkpointer,
        pytest.raises(OutOfSpaceError, match="step 1 of run 'default' is complete in memory, but the drive") as caught,
    ):
        checkpointer.restore()
    command = re.search(r"^  (asymcheck restore .*)$", str(caught.value), re.MULTILINE)
    assert command is not None
    argv = command[1].replace("FILE", str(tmp_path / "out.safetensors")).split()
    subprocess.run([sys.executable, "-m", *argv], check=True, capture_output=True)
    assert (tmp_path / "out.safetensors").is_file()
    (small_disk / "ballast").unlink()
    assert_restored(folder, 1, 1)


def test_command_that_saves_a_capture_names_run_and_folder(tmp_path: Path) -> None:
    """Test a run with another name, and paths that need quotes."""
    command = restore_command(tmp_path / "my store", "fine tuning", tmp_path / "my rings", 7)
    words = ["asymcheck", "restore", str(tmp_path / "my store"), "--tier", "memory", "--step", "7"]
    words += ["--run", "fine tuning", "--ring-folder", str(tmp_path / "my rings"), "--to", "FILE"]
    assert shlex.split(command) == words


@pytest.mark.slow(long=["catalog there-ext4", "catalog lost-tmpfs"])
def test_training_continues_on_a_full_disk_if_errors_are_warnings(dead_with_capture: Path, small_disk: Path) -> None:
    """Test that the newest durable checkpoint is restored, and that the capture stays in memory."""
    folder, (_, _, loop) = dead_with_capture, linear_loop()
    before = rings(folder)
    with (
        Store.open(folder / "store") as store,
        Checkpointer(store, loop.state, capture=config_for(folder), on_error="warn") as checkpointer,
        pytest.warns(SkippedCheckpointWarning, match="skipped step 1 of run 'default' in memory: .*the ring is kept"),
    ):
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.step == 0
    assert set(before) <= set(rings(folder))
