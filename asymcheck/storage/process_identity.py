"""Identity and liveness of the processes that own pins, locks and rings (SPEC.md §B3.2)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from asymcheck.storage.local_files import translated
from asymcheck.types import Owner

_PROC = Path("/proc")
_HIDDEN = -1
_COMMAND_CHARACTERS = 80
_PF_EXITING = 4
_held: set[bytes] = set()


def this_process() -> Owner:
    """Return the identity of the calling process."""
    pid = os.getpid()
    return Owner(pid, _start_ticks(pid) or 0, _boot_id(), _pid_namespace())


def is_dead(owner: Owner) -> bool:
    """Tell whether a process is certainly dead. A process in another PID namespace of this boot counts as alive."""
    if not is_of_this_boot(owner):
        return True
    return is_visible(owner) and _start_ticks(owner.pid) not in (owner.start_ticks, _HIDDEN)


def has_ended(owner: Owner) -> bool:
    """Tell whether a process that may still hold a lock is certainly dead.

    Another boot id alone does not show that, because some containers (systemd, LXC) have a separate boot id.
    """
    return is_visible(owner) and is_dead(owner)


def is_exiting(owner: Owner) -> bool:
    """Tell whether a process was killed, and keeps its locks until the system has freed its memory."""
    fields = _stat(owner.pid) if is_visible(owner) else None
    if not fields or int(fields[19]) != owner.start_ticks:
        return False
    return bool(int(fields[6]) & _PF_EXITING)


def is_visible(owner: Owner) -> bool:
    """Tell whether a process is of this boot and in this PID namespace, so that its state is known."""
    return is_of_this_boot(owner) and owner.pid_namespace == _pid_namespace()


def is_of_this_boot(owner: Owner) -> bool:
    """Tell whether a process belongs to this machine, and to the time since its last boot."""
    return owner.boot_id == _boot_id()


def hold(pin: bytes) -> None:
    """Record that a save of this process uses the pin with this key, until :func:`let_go`."""
    _held.add(pin)


def let_go(pin: bytes) -> None:
    """Record that the save of a pin has ended. Nothing more is committed under this pin."""
    _held.discard(pin)


def holds_pins() -> bool:
    """Tell whether a save of this process is in progress, in any store."""
    return bool(_held)


def is_let_go(pin: bytes, owner: Owner) -> bool:
    """Tell whether a pin belongs to an ended save of this process. A save that ran out of space may leave its pin."""
    return owner == this_process() and pin not in _held


def describe(owner: Owner) -> str:
    """Return the PID and command line of a process for a message. Another container has a PID table of its own."""
    if owner.pid_namespace and not is_visible(owner):
        return f"process {owner.pid}" + (" of another container" if is_of_this_boot(owner) else "")
    command = b""
    with contextlib.suppress(OSError):
        command = (_PROC / str(owner.pid) / "cmdline").read_bytes().replace(b"\0", b" ")
    text = command.decode(errors="replace").strip()
    shown = text if len(text) <= _COMMAND_CHARACTERS else f"{text[:_COMMAND_CHARACTERS]}…"
    return f"process {owner.pid}" + (f" ({shown})" if shown else "")


def _start_ticks(pid: int) -> int | None:
    """Return the start time of a process; None if it is dead, ``_HIDDEN`` if this user may not see it."""
    fields = _stat(pid)
    if fields is None:
        return _HIDDEN
    # A zombie holds no locks and writes nothing more.
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def _stat(pid: int) -> list[bytes] | None:
    """Return the state of a process and the fields after it; none if it is dead, None if this user may not see it."""
    path = _PROC / str(pid) / "stat"
    # Any other error must propagate: without a free descriptor, every process would seem to be dead.
    with translated("access", path):
        try:
            return path.read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None if _is_of_another_user(pid) else []
        except PermissionError:
            return None


def _is_of_another_user(pid: int) -> bool:
    """Tell whether another user has a process of this number, which hidepid=2 removes from ``/proc``."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        pass
    return False


def _boot_id() -> str:
    path = _PROC / "sys/kernel/random/boot_id"
    with translated("read", path):
        return path.read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
