"""Processes as owners of pins and locks: who holds something, and is it still alive (SPEC.md §7.5)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from asymcheck.storage.local_files import translated
from asymcheck.types import Owner

_PROC = Path("/proc")
_HIDDEN = -1
_held: set[bytes] = set()


def this_process() -> Owner:
    """Return the calling process as an owner."""
    pid = os.getpid()
    return Owner(pid, _start_ticks(pid) or 0, _boot_id(), _pid_namespace())


def is_dead(owner: Owner) -> bool:
    """Tell whether an owner is certainly dead; one in another PID namespace of this boot counts as alive."""
    if owner.boot_id != _boot_id():
        return True
    return is_near(owner) and _start_ticks(owner.pid) not in (owner.start_ticks, _HIDDEN)


def is_near(owner: Owner) -> bool:
    """Tell whether an owner of this boot can be seen from here, dead or alive: it is of this PID namespace."""
    return owner.pid_namespace == _pid_namespace()


def hold(pin: bytes) -> None:
    """Say that a save of this process uses the pin with this key, until :func:`let_go`."""
    _held.add(pin)


def let_go(pin: bytes) -> None:
    """Say that the save has ended, well or not: nothing more will be committed under this pin."""
    _held.discard(pin)


def is_let_go(pin: bytes, owner: Owner) -> bool:
    """Tell whether a pin is of this process, and its save has ended: one that fails for want of space may leave it."""
    return owner == this_process() and pin not in _held


def describe(owner: Owner) -> str:
    """Name an owner in a message."""
    command = b""
    with contextlib.suppress(OSError):
        command = (_PROC / str(owner.pid) / "cmdline").read_bytes().replace(b"\0", b" ")
    text = command.decode(errors="replace").strip()
    return f"process {owner.pid}" + (f" ({text[:80]})" if text else "")


def _start_ticks(pid: int) -> int | None:
    """Return when a process began; None when there is none, ``_HIDDEN`` when it is not shown to this user."""
    path = _PROC / str(pid) / "stat"
    # Any other error says nothing of the process: without a free descriptor all would seem to be dead.
    with translated("look at", path):
        try:
            fields = path.read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        except PermissionError:
            return _HIDDEN
    # A zombie has ended: its locks are gone, and it will write nothing more.
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _boot_id() -> str:
    path = _PROC / "sys/kernel/random/boot_id"
    with translated("read", path):
        return path.read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
