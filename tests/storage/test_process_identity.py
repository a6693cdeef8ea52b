"""Test that a process is identified by more than its pid, and is dead only if that is certain."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asymcheck.errors import StorageError, TooManyFilesError
from asymcheck.storage import process_identity
from asymcheck.storage.process_identity import describe, is_dead, is_exiting, this_process
from asymcheck.types import Owner


def test_this_process_is_alive() -> None:
    """Test that repeated queries return the same identity."""
    me = this_process()
    assert me == this_process()
    assert me.pid == os.getpid()
    assert me.start_ticks > 0
    assert not is_dead(me)


def test_a_process_that_has_ended_is_dead() -> None:
    """Test also a zombie, which writes nothing more although its parent has not waited for it."""
    code = "from asymcheck.storage.process_identity import this_process; import dataclasses, json\n"
    code += "print(json.dumps(dataclasses.astuple(this_process())), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        line = child.stdout.readline().decode()
        owner = dataclasses.replace(this_process(), pid=child.pid, start_ticks=int(line.split(",")[1]))
        assert not is_dead(owner)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_dead(owner)
    assert is_dead(owner)


def test_a_number_that_was_given_away_again_is_another_process() -> None:
    """Test that the start time distinguishes processes with a reused pid."""
    assert is_dead(dataclasses.replace(this_process(), start_ticks=this_process().start_ticks + 1))


def test_nothing_survives_a_reboot() -> None:
    """Test that another boot id means dead, even in another namespace and with an existing pid."""
    assert is_dead(dataclasses.replace(this_process(), boot_id="another"))
    assert is_dead(dataclasses.replace(this_process(), boot_id="another", pid_namespace="pid:[1]"))


def test_a_process_that_cannot_be_seen_counts_as_alive() -> None:
    """Test a process in another container, about which this process has no information."""
    hidden = dataclasses.replace(this_process(), pid=999_999_999, start_ticks=1, pid_namespace="pid:[1]")
    assert not is_dead(hidden)


class Refused:
    """A process table that cannot be read."""

    def __init__(self, number: int) -> None:
        """Refuse with the given error."""
        self.number = number

    def __truediv__(self, _name: str) -> Refused:
        """Return this object for any path."""
        return self

    def read_bytes(self) -> bytes:
        """Raise the error."""
        raise OSError(self.number, os.strerror(self.number))


def test_unreadable_process_table_declares_nobody_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a lack of descriptors, and hidden processes."""
    me = this_process()
    boot_id = me.boot_id
    monkeypatch.setattr(process_identity, "_boot_id", lambda: boot_id)
    for number, error in ((errno.EMFILE, TooManyFilesError), (errno.EIO, StorageError)):
        monkeypatch.setattr(process_identity, "_PROC", Refused(number))
        with pytest.raises(error):
            is_dead(me)
    monkeypatch.setattr(process_identity, "_PROC", Refused(errno.EACCES))
    assert not is_dead(me)
    for number in (errno.ENOENT, errno.ESRCH):
        monkeypatch.setattr(process_identity, "_PROC", Refused(number))
        assert is_dead(me)


def test_a_process_that_the_mount_option_hidepid_hides_counts_as_alive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Test a process of another user, which is missing in the process table, and does not accept a signal."""
    other = dataclasses.replace(this_process(), pid=1)

    def refuse(*_arguments: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    boot_id = other.boot_id
    monkeypatch.setattr(process_identity, "_boot_id", lambda: boot_id)
    monkeypatch.setattr(process_identity, "_PROC", tmp_path)
    monkeypatch.setattr(os, "kill", refuse)
    assert not is_dead(other)
    assert not is_exiting(other)


def test_a_command_with_odd_characters_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Test that spaces and parentheses in a process name do not affect the fields after the name."""
    fields = " ".join(["S", *map(str, range(4, 22)), "4711", "23"])

    class Table:
        def __truediv__(self, name: str) -> Table:
            return self

        def read_bytes(self) -> bytes:
            return f"7 (a) Z (b c) {fields}".encode()

    monkeypatch.setattr(process_identity, "_PROC", Table())
    assert process_identity._start_ticks(7) == 4711


def test_an_owner_is_named_in_messages() -> None:
    """Test that messages name the command, if it is visible."""
    assert str(os.getpid()) in describe(this_process())
    assert "python" in describe(this_process()) or "pytest" in describe(this_process())
    assert describe(dataclasses.replace(this_process(), pid=999_999_999)) == "process 999999999"


def test_a_process_of_another_container_is_named_without_a_command() -> None:
    """Test that a process here with the same number is not taken for the one to stop."""
    other = dataclasses.replace(this_process(), pid_namespace="pid:[1]")
    assert describe(other) == f"process {os.getpid()} of another container"
    assert describe(dataclasses.replace(other, boot_id="another")) == f"process {os.getpid()}"


def test_a_long_command_is_shortened_visibly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Test that an ellipsis marks the cut, because the rest of a number would read as another number."""
    monkeypatch.setattr(process_identity, "_PROC", tmp_path)
    folder = tmp_path / str(os.getpid())
    folder.mkdir()
    for command, shown in (("x" * 80, "x" * 80), ("x" * 79 + " --steps", "x" * 79 + " …")):
        (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
        assert describe(Owner(os.getpid(), 0, "", "")) == f"process {os.getpid()} ({shown})"
