"""Limits of the operating system: clear warnings, no durable checkpoint is lost, and the training continues."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asymcheck import Store
from asymcheck.errors import ReadOnlyStoreError, StorageError
from asymcheck.fsck.verify import Severity
from asymcheck.measurement import ring_limits
from tests.crash.limited_child import state_of
from tests.crash.test_preloaded_faults import library
from tests.zygote import Zygote

__all__ = ["library"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a store that has step 0, and with a folder for rings."""
    with Store.open(tmp_path / "store", create=True) as store:
        store.save({"weight": state_of(0)}, step=0)
    (tmp_path / "rings").mkdir()
    return tmp_path


def _train(folder: Path, limit: str, value: int = 0, status: int = 0, **variables: str) -> dict[str, Any]:
    """Train in a new process; return its results, or an empty dict if it was killed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.limited_child", str(folder), limit, str(value)],
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout or "{}")
    return found


def _steps(folder: Path) -> list[int]:
    """Return the steps of an undamaged store, after a check of every state."""
    with Store.open(folder / "store") as store:
        assert [str(finding) for finding in store.verify() if finding.severity is Severity.ERROR] == []
        steps = [checkpoint.step for checkpoint in store.checkpoints()]
        for step in steps:
            assert torch.equal(store.load(step)["weight"], state_of(step))  # type: ignore[index]  # a dict
        assert torch.equal(store.load()["weight"], state_of(steps[-1]))  # type: ignore[index]  # a dict
        return steps


def _train_without_limits(zygote: Zygote, folder: Path) -> dict[str, Any]:
    """Train in a new process; return its results."""
    output = folder / "output.json"
    words = [folder, "none", 0]
    zygote.start_program("tests.crash.limited_child", words, dict(os.environ), output).finish()
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def _check_goes_on(zygote: Zygote, folder: Path) -> None:
    """Check that a training without limits continues."""
    before = _steps(folder)
    found = _train_without_limits(zygote, folder)
    assert (found["error"], found["warnings"]) == ("", [])
    after = _steps(folder)
    # Captures may have stayed in memory.
    assert after[: len(before)] == before
    assert after[-4:] == list(range(after[-4], after[-4] + 4))


@pytest.mark.slow(quick=["files-13-limit of open files"])
@pytest.mark.parametrize(
    ("limit", "value", "problem"),
    [
        ("files", 13, "limit of open files"),
        ("memory", 64, "raise the limit (ulimit -v)"),
        ("size", 1, "raise the limit of file sizes (ulimit -f)"),
    ],
)
def test_low_limit_costs_no_durable_checkpoint(
    zygote: Zygote, folder: Path, limit: str, value: int, problem: str
) -> None:
    """Test RLIMIT_NOFILE, RLIMIT_AS and RLIMIT_FSIZE: each step that cannot be saved is named with the way out."""
    found = _train(folder, limit, value)
    assert (found["trained"], found["error"]) == (4, "")
    lost = [text for text in found["warnings"] if "was not saved" in text or "were not saved" in text]
    assert lost
    assert all(problem in text for text in lost), lost
    assert _steps(folder)[0] == 0
    _check_goes_on(zygote, folder)


@pytest.mark.slow
def test_clock_that_is_set_back_keeps_the_order(zygote: Zygote, folder: Path, library: Path) -> None:
    """Test a clock that is set back by a day during a training, and before the next one."""
    preload = {"LD_PRELOAD": str(library)}
    assert _train(folder, "clock", **preload)["error"] == ""
    assert _steps(folder) == [0, 1, 2, 3, 4]
    assert _train(folder, "none", **preload, FAULT_CLOCK_S=str(-2 * 86_400))["warnings"] == []
    assert _steps(folder) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    _check_goes_on(zygote, folder)


@pytest.mark.slow
def test_capture_after_the_clock_was_set_back_is_recovered(zygote: Zygote, folder: Path, library: Path) -> None:
    """Test a kill: the capture must not count as one from before its generation."""
    assert _train(folder, "killed", status=-9, LD_PRELOAD=str(library)) == {}
    assert _train_without_limits(zygote, folder)["warnings"] == []
    assert _steps(folder)[:2] == [0, 1]


def _mounted(point: Path, *words: str) -> Iterator[Path]:
    """Mount a file system, or skip the test."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    point.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *words, str(point)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield point
    subprocess.run(["umount", str(point)], check=True)


@pytest.fixture
def full_memory(folder: Path) -> Iterator[Path]:
    """Return the folder; its rings are on a full file system in memory."""
    for point in _mounted(folder / "rings", "-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        (point / "ballast").write_bytes(bytes(60 << 10))
        yield folder


def test_full_file_system_of_rings_costs_no_training(zygote: Zygote, full_memory: Path) -> None:
    """Test a full /dev/shm, on a small file system of the same kind."""
    found = _train_without_limits(zygote, full_memory)
    assert (found["trained"], found["error"]) == (4, "")
    assert found["warnings"]
    assert all("free" in text for text in found["warnings"]), found["warnings"]
    (full_memory / "rings" / "ballast").unlink()
    assert _steps(full_memory)[0] == 0


@pytest.fixture
def unlimited_memory(folder: Path) -> Iterator[Path]:
    """Return the folder; its rings are on a file system in memory without a limit, as of ``podman --shm-size=0``."""
    for _ in _mounted(folder / "rings", "-t", "tmpfs", "-o", "size=0", "tmpfs"):
        yield folder


def test_file_system_of_rings_without_a_limit(zygote: Zygote, unlimited_memory: Path) -> None:
    """Test a file system that reports no blocks: only the memory limits the ring."""
    assert min(ring_limits(unlimited_memory / "rings")) > 0
    found = _train_without_limits(zygote, unlimited_memory)
    assert (found["trained"], found["error"], found["warnings"]) == (4, "", [])


@pytest.fixture
def aborted(folder: Path) -> Iterator[Path]:
    """Return the folder; its store is on a file system that becomes read-only while the store is open."""
    if not shutil.which("mkfs.ext4"):
        pytest.skip("there is no mkfs.ext4")
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    shutil.move(folder / "store", folder / "copy")
    for point in _mounted(folder / "store", "-o", "loop", str(image)):
        shutil.rmtree(point / "lost+found")
        shutil.copytree(folder / "copy", point, dirs_exist_ok=True)
        yield folder


def test_store_that_becomes_read_only_costs_no_durable_checkpoint(aborted: Path) -> None:
    """Test a file system that Linux remounts read-only, as after an error of the drive."""
    store = Store.open(aborted / "store")
    store.save({"weight": state_of(1)}, step=1)
    subprocess.run(["mount", "-o", "remount,abort", str(aborted / "store")], check=True)
    with pytest.raises(StorageError, match="Read-only file system"):
        store.save({"weight": state_of(2)}, step=2)
    with pytest.raises(ReadOnlyStoreError, match="check the drive"):
        store.close()
    with Store.open(aborted / "store", read_only=True) as store:
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0, 1]
        assert torch.equal(store.load()["weight"], state_of(1))  # type: ignore[index]  # a dict
