"""Test that forked processes do not inherit descriptors that hold locks."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

from asymcheck.storage.local_files import DESCRIPTORS, try_lock
from tests.zygote import Zygote


def _opened_slowly(path: str, is_open: threading.Event) -> int:
    """Open a file, and let another thread fork before the caller has the descriptor."""
    descriptor = os.open(path, os.O_RDWR)
    is_open.set()
    time.sleep(0.2)
    return descriptor


def fork_while_opening(path: str) -> None:
    """Fork between the open system call and the registration of the descriptor. Runs in a child."""
    is_open, found = threading.Event(), list[int]()
    opener = threading.Thread(target=lambda: found.append(DESCRIPTORS.open(_opened_slowly, path, is_open)))
    opener.start()
    is_open.wait()
    pid = os.fork()
    if pid == 0:
        inherited = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        os._exit(path in inherited)
    opener.join()
    assert os.waitpid(pid, 0)[1] == 0, "the forked process has inherited the descriptor"
    DESCRIPTORS.close(found[0])


def test_a_fork_waits_until_a_descriptor_that_is_being_opened_is_known(zygote: Zygote, tmp_path: Path) -> None:
    """Test that the child does not keep the lock of a descriptor that it does not know."""
    (tmp_path / "file").touch()
    zygote.start(fork_while_opening, path=str(tmp_path / "file")).finish()


def fork_natively(path: str) -> None:
    """Fork without the handlers of Python, close a locked descriptor, and lock the file again. Runs in a child."""
    descriptor = DESCRIPTORS.open(os.open, path, os.O_RDWR)
    assert try_lock(descriptor, exclusive=True)
    library = ctypes.PyDLL(None)
    pid = library.fork()
    if pid == 0:
        library.pause()
        library._exit(0)
    try:
        DESCRIPTORS.close(descriptor)
        other = DESCRIPTORS.open(os.open, path, os.O_RDWR)
        assert try_lock(other, exclusive=True), "the forked process keeps the lock"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_native_fork_keeps_no_lock_of_a_descriptor_that_is_closed(zygote: Zygote, tmp_path: Path) -> None:
    """Test a fork by a C library, which closes nothing in its child."""
    (tmp_path / "file").touch()
    zygote.start(fork_natively, path=str(tmp_path / "file")).finish()


def test_a_child_that_closes_its_copies_keeps_the_locks_of_its_parent(zygote: Zygote, tmp_path: Path) -> None:
    """Test that a child only closes its copies, because unlocking them would unlock the file for the parent, too."""
    (tmp_path / "file").touch()
    zygote.start(fork_while_locked, path=str(tmp_path / "file")).finish()


def fork_while_locked(path: str) -> None:
    """Fork while a lock is held; the lock outlives the child. Runs in a child."""
    descriptor = DESCRIPTORS.open(os.open, path, os.O_RDWR)
    assert try_lock(descriptor, exclusive=True)
    pid = os.fork()
    if pid == 0:
        DESCRIPTORS.close(descriptor)
        os._exit(0)
    os.waitpid(pid, 0)
    assert not try_lock(os.open(path, os.O_RDWR), exclusive=True)


def fork_in_a_handler(path: str) -> None:
    """Fork on the thread that opens a file, as a signal handler may. Runs in a child."""

    def opened() -> int:
        pid = os.fork()
        if pid == 0:
            DESCRIPTORS.close(DESCRIPTORS.open(os.open, path, os.O_RDWR))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        return os.open(path, os.O_RDWR)

    DESCRIPTORS.close(DESCRIPTORS.open(opened))


def test_a_handler_that_forks_while_a_file_is_opened_waits_for_nothing(zygote: Zygote, tmp_path: Path) -> None:
    """Test that a thread that forks while it opens a file does not wait for itself."""
    (tmp_path / "file").touch()
    child = zygote.start(fork_in_a_handler, path=str(tmp_path / "file"))
    assert child.has_ended(20.0)
    child.finish()
