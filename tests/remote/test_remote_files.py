"""Test the contract of every file system of a location, for folders and HDFS."""

from __future__ import annotations

import dataclasses
import errno
import gc
import io
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath, PurePosixPath
from unittest.mock import Mock

import hdfs_native as hdfs_native_client
import pytest

from asymcheck import Store
from asymcheck.errors import RemoteUnreachableError, StorageError
from asymcheck.storage.remote import clients, deadline, hdfs_native, remote_files
from asymcheck.storage.remote.client_interface import Entry, FileSystem
from asymcheck.storage.remote.location import parse_location
from asymcheck.storage.remote.remote_files import RemoteFiles
from tests.remote.conftest import REMOTE, config
from tests.zygote import wait_until


@pytest.fixture
def files(any_location: str) -> RemoteFiles:
    """Return the location, with a folder in it."""
    found = RemoteFiles(parse_location(any_location), REMOTE)
    found.make_directory(top(found))
    return found


@pytest.fixture
def file_system(any_file_system: str) -> RemoteFiles:
    """Return a location that can rename files, with a folder in it."""
    found = RemoteFiles(parse_location(any_file_system), REMOTE)
    found.make_directory(top(found))
    return found


def top(files: RemoteFiles) -> PurePosixPath:
    """Return the folder."""
    return PurePosixPath(files.location.path)


def test_a_location_that_never_answers_occupies_few_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a long outage leaves a bounded number of threads, and that the location is used again afterwards."""
    monkeypatch.setattr(deadline, "_OVERDUE_MAX", 3)
    location, answers = parse_location(f"file://{tmp_path}"), threading.Event()
    called: list[str] = []

    def stat(client: FileSystem, path: str) -> None:
        called.append(path)
        answers.wait(60)

    monkeypatch.setattr(clients._LocalClient, "stat", stat)
    path, impatient = PurePosixPath(location.path), dataclasses.replace(REMOTE, deadline_s=0.01)

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(RemoteUnreachableError, match="answer"):
                RemoteFiles(location, impatient).stat(path)

    fail(10)
    assert len(called) == 3
    # As if the next attempt is due.
    remote_files._overdue[str(location)]._next_s = 0.0
    fail(10)
    assert len(called) == 4
    answers.set()
    wait_until(lambda: all(call.done() for call in remote_files._overdue[str(location)]._calls), "the answers")
    assert RemoteFiles(location, REMOTE).stat(path) is None
    assert len(called) == 5


def test_each_answer_of_a_listing_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a listing that takes longer than the deadline, because the location has many folders."""
    for number in range(4):
        (tmp_path / f"{number}" / "below").mkdir(parents=True)
    children, never = clients._LocalClient.children, threading.Event()

    def slowly(client: clients._LocalClient, path: str) -> list[Entry]:
        never.wait(10 if path.endswith("hangs") else 0.1)
        return children(client, path)

    monkeypatch.setattr(clients._LocalClient, "children", slowly)
    files = RemoteFiles(parse_location(f"file://{tmp_path}"), dataclasses.replace(REMOTE, deadline_s=0.3))
    assert len(files.walk(top(files), recursive=True)) == 8
    (tmp_path / "hangs").mkdir()
    with pytest.raises(RemoteUnreachableError, match=r"no answer in 0\.3 s"):
        files.walk(top(files), recursive=True)
    never.set()


def test_missing_entries_are_none(files: RemoteFiles) -> None:
    """Test a file, a folder and a listing."""
    nowhere = top(files) / "no" / "where"
    assert files.stat(nowhere) is None
    assert files.read_small(nowhere, 10) is None
    assert files.list(nowhere) == files.walk(nowhere, recursive=True) == []
    # Object stores do not say whether a deleted object existed.
    assert not files.delete(nowhere) or not files.renames
    with pytest.raises(FileNotFoundError):
        files.read_range(nowhere, 0, 1)


def test_a_file_is_read_by_ranges(file_system: RemoteFiles) -> None:
    """Test ranges within written pieces, across them, at the end, and beyond it."""
    path = top(file_system) / "a.tmp"
    assert file_system.write(path, [b"0123", memoryview(b"456"), b"789"]) == 10
    for offset, length in ((0, 10), (2, 4), (8, 2), (8, 100), (10, 1), (11, 5), (0, 0)):
        data, size = file_system.read_range(path, offset, length)
        assert (bytes(data), size) == (b"0123456789"[offset : offset + length], 10)
    assert file_system.read_small(path, 3) == b"0123"
    found = file_system.stat(path)
    assert found is not None
    assert (found.is_file, found.size) == (True, 10)
    assert found.mtime_ns > 0


@pytest.mark.slow
def test_listings_name_files_and_folders(files: RemoteFiles) -> None:
    """Test the order, and that subfolders are listed only on request."""
    files.make_directory(top(files) / "b" / "c")
    files.make_directory(top(files) / "b" / "c")
    for name in ("b/c/two", "one"):
        assert files.put_small(top(files) / name, name.encode())
    assert files.list(top(files)) == ["b", "one"]
    walked = {str(entry.path.relative_to(top(files))): entry.size for entry in files.walk(top(files), recursive=True)}
    assert {name: size for name, size in walked.items() if size} == {"b/c/two": 7, "one": 3}


@pytest.mark.slow
def test_folder_removed_during_a_listing_affects_no_other(hdfs_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a checkpoint that another process deletes at the same time."""
    files = RemoteFiles(parse_location(f"{hdfs_url}/tests/{uuid.uuid4().hex}"), REMOTE)
    for name in ("a", "b", "c"):
        assert files.put_small(top(files) / name / "one", b"1")
    original = hdfs_native_client.Client.list_status

    def delete_one(self: hdfs_native_client.Client, path: str, recursive: bool = False) -> Iterator[object]:
        for number, found in enumerate(original(self, path, recursive)):
            yield found
            if number == 0 and path == str(top(files)):
                files.delete(top(files) / "b" / "one")
                files.delete_empty(top(files) / "b")

    monkeypatch.setattr(hdfs_native_client.Client, "list_status", delete_one)
    names = [entry.path.parent.name for entry in files.walk(top(files), recursive=True) if entry.is_file]
    assert names == ["a", "c"]


@pytest.mark.slow
def test_a_name_that_is_taken_is_refused(files: RemoteFiles) -> None:
    """Test that the existing file is not changed."""
    assert files.put_small(top(files) / "name", b"first") is True
    assert files.put_small(top(files) / "name", b"second") is False
    assert files.read_small(top(files) / "name", 10) == b"first"
    assert files.list(top(files)) == ["name"]


def test_one_of_racing_writers_wins(files: RemoteFiles) -> None:
    """Test eight threads and one name."""
    if files.kind in ("libhdfs", "other"):
        pytest.skip("through pyarrow and fsspec it replaces files: two may win, as docs/hdfs.md says")
    won: list[bytes] = []

    def put(data: bytes) -> None:
        if files.put_small(top(files) / "name", data):
            won.append(data)

    racers = [threading.Thread(target=put, args=(bytes([number]),)) for number in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert won == [files.read_small(top(files) / "name", 10)]


def test_rename_reports_whether_the_file_existed(file_system: RemoteFiles) -> None:
    """Test that the bytes are renamed, too."""
    file_system.put_small(top(file_system) / "old", b"bytes")
    assert file_system.rename(top(file_system) / "old", top(file_system) / "new") is True
    assert file_system.rename(top(file_system) / "old", top(file_system) / "newer") is False
    assert file_system.read_small(top(file_system) / "new", 10) == b"bytes"


def test_a_folder_that_is_not_empty_any_more_stays(files: RemoteFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a file that another program has created since the folder was listed."""
    files.make_directory(top(files) / "empty")
    files.put_small(top(files) / "full" / "name", b"committed")
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFiles, "walk", lambda *_, **__: [])
        for name in ("full", "empty", "none"):
            files.delete_empty(top(files) / name)
    assert files.read_small(top(files) / "full" / "name", 10) == b"committed"
    assert files.list(top(files)) == (["empty", "full"] if files.kind in ("libhdfs", "other") else ["full"])


Write = Callable[[RemoteFiles, PurePath, list[bytes]], int]


def test_a_folder_that_was_taken_back_is_made_again(file_system: RemoteFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a folder that was removed before its file was created."""
    taken: list[PurePath] = []
    write: Write = RemoteFiles.write

    def take_back(self: RemoteFiles, path: PurePath, pieces: list[bytes], _: object) -> int:
        if not taken:
            taken.append(path)
            self.delete_empty(path.parent)
        return write(self, path, pieces)

    monkeypatch.setattr(RemoteFiles, "write", take_back)
    assert file_system.put_small(top(file_system) / "folder" / "name", b"whole") is True
    assert taken
    assert file_system.read_small(top(file_system) / "folder" / "name", 10) == b"whole"


@pytest.mark.parametrize("refused", [errno.EPERM, errno.ENOTSUP], ids=errno.errorcode.get)
def test_without_hard_links_files_are_renamed(folder: str, monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    """Test that an existing name is detected."""

    def link(*_: object) -> None:
        raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(os, "link", link)
    files = RemoteFiles(parse_location(folder), REMOTE)
    assert files.put_small(top(files) / "name", b"first") is True
    assert files.put_small(top(files) / "name", b"second") is False
    assert files.read_small(top(files) / "name", 10) == b"first"
    assert files.list(top(files)) == ["name"]


@pytest.mark.parametrize("links", [True, False], ids=["links", "renames"])
def test_a_name_that_is_taken_is_durable(folder: str, monkeypatch: pytest.MonkeyPatch, *, links: bool) -> None:
    """Test a name from a failed attempt: the writer that finds it relies on its durability."""
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, "no links")))
    files = RemoteFiles(parse_location(folder), REMOTE)
    files.make_directory(top(files))
    for name in ("first", "second"):
        files.write(top(files) / name, [b"bytes"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "no sync")))
        for name in ("first", "second"):
            with pytest.raises(StorageError, match=r"rename .*no sync"):
                files.publish(top(files) / name, top(files) / "name")
    assert files.publish(top(files) / "second", top(files) / "name") is False


def test_another_name_in_a_folder_is_durable(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a pack that a push relies on does not reappear under the name that announces its removal."""
    files = RemoteFiles(parse_location(folder), REMOTE)
    files.put_small(top(files) / "old", b"bytes")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "no sync")))
        with pytest.raises(StorageError, match=r"rename .*no sync"):
            files.rename(top(files) / "old", top(files) / "new")


def test_a_server_that_does_not_sync_a_folder(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the sync has a deadline, like every operation."""
    released = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: released.wait(30))
    files = RemoteFiles(parse_location(folder), dataclasses.replace(REMOTE, deadline_s=0.5))
    began = time.monotonic()
    with pytest.raises(RemoteUnreachableError, match=r"create directory .*remote: no answer in 0\.5 s"):
        files.make_directory(top(files))
    assert time.monotonic() - began < 10
    released.set()


def test_each_piece_is_durable_before_the_next(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that all pieces are durable before the upload of the file ends."""
    sizes: list[int] = []
    sync = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        sync(descriptor)

    def written() -> None:
        assert sizes == [4, 7, 10]

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    files = RemoteFiles(parse_location(folder), REMOTE)
    files.make_directory(top(files))
    assert files.write(top(files) / "a.tmp", [b"0123", memoryview(b"456"), b"789"], written) == 10
    assert files.read_small(top(files) / "a.tmp", 10) == b"0123456789"


def test_the_pace_of_a_folder_is_not_that_of_the_cache(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the measured rate is that of a slow drive."""
    monkeypatch.setattr(os, "fdatasync", lambda _: time.sleep(0.2))
    files = RemoteFiles(parse_location(folder), REMOTE)
    files.make_directory(top(files))
    files.write(top(files) / "a.tmp", [bytes(16 << 20)])
    assert files.pace.writing.bytes_per_s is not None
    assert files.pace.writing.bytes_per_s <= (16 << 20) / 0.2


def test_a_drive_that_does_not_write_a_piece(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that each piece has its own deadline."""
    released = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: released.wait(30))
    files = RemoteFiles(parse_location(folder), dataclasses.replace(REMOTE, deadline_s=0.5))
    files.make_directory(top(files))
    with pytest.raises(RemoteUnreachableError, match=r"write to .*a\.tmp: no answer in 0\.5 s"):
        files.write(top(files) / "a.tmp", [b"0123"])
    released.set()


def test_another_attempt_takes_another_name(file_system: RemoteFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the file of the failed attempt is never renamed, and is removed."""
    names: list[str] = []
    original: Write = RemoteFiles.write

    def first_fails(self: RemoteFiles, path: PurePath, pieces: list[bytes], _: object) -> int:
        names.append(path.name)
        if len(names) == 1:
            original(self, path, [b"half"])
            raise RemoteUnreachableError("the wire was cut")
        return original(self, path, pieces)

    monkeypatch.setattr(RemoteFiles, "write", first_fails)
    assert file_system.put_small(top(file_system) / "name", b"whole") is True
    assert len(set(names)) == 2
    assert file_system.read_small(top(file_system) / "name", 10) == b"whole"
    assert file_system.list(top(file_system)) == ["name"]


@pytest.mark.slow
def test_mismatch_after_read_back_is_never_renamed(file_system: RemoteFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the error names file and attempt."""
    original: Write = RemoteFiles.write
    monkeypatch.setattr(RemoteFiles, "write", lambda self, path, *_: original(self, path, [b"other"]))
    with pytest.raises(StorageError, match=rf"upload of .*/name, attempt {REMOTE.attempts} of {REMOTE.attempts}: "):
        file_system.put_small(top(file_system) / "name", b"whole")
    assert file_system.list(top(file_system)) == []


@pytest.mark.parametrize("client", ["hdfs-native"])
def test_unreachable_server_is_not_an_empty_location(client: str) -> None:
    """Test that a closed port raises its own error, not "not found"."""
    quick = {"dfs.client.failover.max.attempts": "1"}
    with pytest.raises(RemoteUnreachableError, match=r"hdfs://127\.0\.0\.1:1/x: no NameNode is at host"):
        Store.open("hdfs://127.0.0.1:1/x", config=config(client=client, options=quick, deadline_s=20.0))


@pytest.mark.slow
def test_a_file_that_could_not_be_closed_is_not_closed_again() -> None:
    """Test the client's objects, which close themselves when they are collected, and would wait for dead servers."""
    closed: list[str] = []

    class Inner(io.RawIOBase):
        def close(self) -> None:
            closed.append("once more")
            raise OSError("nobody is there")

    writer = hdfs_native._Writer(Inner())
    with pytest.raises(OSError, match="nobody"):
        writer.close()
    del writer
    gc.collect()
    assert closed == ["once more"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_lets_go_of_a_client_without_waiting(hdfs_url: str) -> None:
    """Test a data loader worker that collects garbage, in which the threads of the client do not exist."""
    holder = [RemoteFiles(parse_location(f"{hdfs_url}/forked"), REMOTE)]
    holder[0].list(top(holder[0]))
    child = os.fork()
    if not child:
        holder.clear()
        gc.collect()
        os._exit(0)
    deadline = time.monotonic() + 20
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
