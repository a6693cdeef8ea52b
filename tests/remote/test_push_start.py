"""Test the start of a push process, failed starts, and its environment."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck import Push, Store
from asymcheck.errors import GivenUpError, InvalidInputError, StorageError, UnreachableRemoteWarning
from asymcheck.replication import background_push as module
from tests.remote.conftest import CONFIG, by_process, check_location, save_steps
from tests.zygote import REPOSITORY, wait_until


@pytest.mark.slow
def test_a_store_that_cannot_be_opened(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the process reports the reason, and is restarted until it succeeds."""
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    aside = store.with_name("aside")
    with Store.open(store, config=CONFIG, create=True) as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreachableRemoteWarning)
        store.rename(aside)
        with by_process(opened, folder) as pushing:
            wait_until(lambda: pushing.statistics().failures > 1, "it to be tried again")
            assert pushing.statistics().problem.startswith("StoreNotFoundError: ")
            aside.rename(store)
            wait_until(lambda: pushing.statistics().pushed == 2, "the checkpoints to be pushed")
    check_location(folder, 1, 2)


@pytest.mark.slow
def test_a_process_that_cannot_be_begun(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the training continues, and that the start is tried again."""
    original: Callable[..., object] = subprocess.Popen
    left = [2]

    def begin(*arguments: object, **more: object) -> object:
        if left[0]:
            left[0] -= 1
            raise OSError("Cannot allocate memory")
        return original(*arguments, **more)

    monkeypatch.setattr(module, "RETRY_S", 0.05)
    monkeypatch.setattr(subprocess, "Popen", begin)
    with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
        with pytest.raises(GivenUpError, match=r"cannot start the process .*: Cannot allocate memory"):
            pushing.wait()
        wait_until(lambda: pushing.statistics().pushed == 2, "the checkpoints to be pushed")
        assert pushing.statistics().failures == 2
    check_location(folder, 1, 2)


def test_limit_of_threads_is_an_error_of_the_package(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a thread that cannot be started: the error names the limit, and the push can be closed."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Store.open(store, config=CONFIG) as opened:
        pushing = opened.training.push_in_background(Push(folder))
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StorageError, match="cannot start thread asymcheck-pushing"):
            pushing.start()
        pushing.close()


def test_program_without_an_interpreter_is_refused(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test Python embedded in another program, where the command of an interpreter is unknown."""
    monkeypatch.setattr(sys, "executable", "")
    with (
        Store.open(store, config=CONFIG, create=True) as opened,
        pytest.raises(InvalidInputError, match=f"asymcheck push {store} {folder} --follow"),
    ):
        opened.training.push_in_background(Push(folder))


def test_a_relative_path_is_that_of_the_training(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a training that changes its directory before the process has started."""
    monkeypatch.chdir(tmp_path)
    save_steps(Path("relative"), 1)
    with Store.open("relative", config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
        pushing.wait()
    check_location(folder, 1)


@pytest.mark.slow
def test_process_imports_what_the_training_imports(
    store: Path, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the working directory is not imported from, and that path entries that are no strings are skipped."""
    monkeypatch.syspath_prepend(str(REPOSITORY))
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "signal.py").write_text("raise SystemExit(3)")
    (tmp_path / "asymcheck").mkdir()
    (tmp_path / "asymcheck/__init__.py").touch()
    with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
        pushing.wait()
    check_location(folder, 1, 2)
