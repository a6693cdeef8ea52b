"""Test uploads: verified before the rename, in few large pieces, within time and rate limits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath, PurePosixPath

import pytest

from asymcheck import RemoteConfig, Store
from asymcheck.commit.save_request import new_save_id
from asymcheck.errors import InvalidInputError, RemoteUnreachableError, StorageError
from asymcheck.storage.remote.client_interface import Entry, OpenedFile
from asymcheck.storage.remote.deadline import within
from asymcheck.storage.remote.manifests import RemoteManifests
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.storage.slots import SlotPool
from asymcheck.storage.throughput import RateLimit
from asymcheck.types import CheckpointRef, Part
from tests.remote.conftest import CONFIG, check_location, check_state, config, state_of

Write = Callable[[RemoteFiles, PurePath, Iterable[bytes], "Callable[[], None] | None"], int]


def spoil_packs(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[list[bytes]], list[bytes]]) -> None:
    """Corrupt pieces written into packs, but count them as if they were right."""
    original: Write = RemoteFiles.write

    def write(
        self: RemoteFiles, path: PurePath, pieces: Iterable[bytes], written: Callable[[], None] | None = None
    ) -> int:
        data = [bytes(piece) for piece in pieces]
        changed = spoil(data) if path.parent.name == "packs" else data
        original(self, path, changed, written)
        return sum(map(len, data))

    monkeypatch.setattr(RemoteFiles, "write", write)


def flipped(piece: bytes, offset: int) -> bytes:
    """Return the piece with a flipped bit."""
    return piece[:offset] + bytes([piece[offset] ^ 1]) + piece[offset + 1 :]


@pytest.mark.slow(quick=["file-cut"])
@pytest.mark.parametrize(
    ("spoil", "settings"),
    [
        pytest.param(lambda pieces: pieces[:-1], {}, id="cut"),
        pytest.param(lambda pieces: [*pieces[:-1], pieces[-1][:-1]], {}, id="a-byte-short"),
        pytest.param(lambda pieces: [flipped(pieces[0], 20), *pieces[1:]], {}, id="header"),
        pytest.param(lambda pieces: [*pieces[:-1], flipped(pieces[-1], -70)], {}, id="index"),
        pytest.param(lambda pieces: [flipped(pieces[0], 4096 + 60), *pieces[1:]], {"read_back": True}, id="frame"),
    ],
)
def test_corrupted_upload_gets_no_name(
    store: Path,
    any_file_system: str,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[list[bytes]], list[bytes]],
    settings: dict[str, bool],
) -> None:
    """Test that the error names pack and attempt, and that neither pack nor checkpoint remains."""
    with (
        Store.open(store, config=config(attempts=2, **settings), create=True) as opened,
        monkeypatch.context() as patch,
    ):
        spoil_packs(patch, spoil)
        with pytest.raises(StorageError, match=r"upload of .*\.pack, attempt 2 of 2: "):
            opened.push(any_file_system)
    with Store.open(any_file_system, config=CONFIG, create=True) as remote:
        assert remote.resources.usage().packs == 0
        assert remote.checkpoints() == []
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(any_file_system)
    check_location(any_file_system, 2)


def test_pack_that_is_removed_during_its_check_is_uploaded_again(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a lost upload is no damage of the checkpoint in the store."""
    original, removed = RemoteFiles.stat, list[PurePath]()

    def stat(self: RemoteFiles, path: PurePath) -> Entry | None:
        entry = original(self, path)
        if path.parent.name == "packs" and not removed:
            removed.append(path)
            Path(path).unlink()
        return entry

    monkeypatch.setattr(RemoteFiles, "stat", stat)
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder)
    assert removed
    check_location(folder, 2)


def test_a_pack_is_written_while_others_are_being_completed(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test the limit of concurrent completions, and that none begins before twice as many were written."""
    original, lock = RemoteFiles.write, threading.Lock()
    writing, most, count = 0, 0, 0
    enough = threading.Event()

    def write(
        self: RemoteFiles, path: PurePath, pieces: Iterable[bytes], written: Callable[[], None] | None = None
    ) -> int:
        if written is None:
            return original(self, path, pieces)

        def watched() -> Iterator[bytes]:
            nonlocal writing, most
            with lock:
                writing += 1
                most = max(most, writing)
            yield from pieces

        def then() -> None:
            nonlocal writing, count
            with lock:
                writing -= 1
                count += 1
            written()
            if count >= 4:
                enough.set()
            assert enough.wait(60)

        return original(self, path, watched(), then)

    monkeypatch.setattr(RemoteFiles, "write", write)
    with Store.open(store, config=config(uploads=2, pack_bytes=8192, compression="off"), create=True) as opened:
        assert opened.push(folder).packs > 4
    assert most == 2
    check_location(folder, 2)


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", [None, 5])
def test_manifests_are_staged_by_a_few_threads(
    store_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch, spoilt: int | None
) -> None:
    """Test the number of threads for any number of ranks; if a manifest cannot be staged, all are removed."""
    original, threads = RemoteManifests.stage, list[int]()

    def stage(manifests: RemoteManifests, run: str, ref: CheckpointRef, data: bytes) -> PurePosixPath:
        threads.append(threading.get_ident())
        if len(threads) - 1 == spoilt:
            raise StorageError("it does not fit")
        return original(manifests, run, ref, data)

    monkeypatch.setattr(RemoteManifests, "stage", stage)
    save_id = new_save_id().hex()
    with Store.open(store_path, config=config(uploads=2), create=True) as opened:
        for rank in range(12):
            opened.save(state_of(rank), step=1, part=Part(rank, 12, save_id))
        with contextlib.nullcontext() if spoilt is None else pytest.raises(StorageError, match="it does not fit"):
            opened.push(folder)
    assert 0 < len(set(threads)) <= 2
    assert list(Path(folder.removeprefix("file://")).rglob("*.tmp")) == []
    with Store.open(folder, config=CONFIG, create=True) as remote:
        assert [one.complete for one in remote.checkpoints()] == ([True] if spoilt is None else [])


def test_failed_probe_blocks_nobody(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that other packs wait for the measurement of the first one."""
    monkeypatch.setattr("asymcheck.replication.pack_sender._PROBE_BYTES", 8192)
    spoil_packs(monkeypatch, lambda pieces: pieces[:-1])
    with (
        Store.open(store, config=config(attempts=2), create=True) as opened,
        pytest.raises(StorageError, match="attempt 2 of 2: "),
    ):
        opened.push(folder)


def test_a_restore_reads_neighbours_together(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the number of reads follows from the bytes, plus two for each pack, also for a partial restore."""
    with Store.open(store, config=config(pack_bytes=1 << 20), create=True) as opened:
        assert opened.push(folder).packs == 1
    reads: list[int] = []
    original = RemoteFiles.read_range

    def read(
        self: RemoteFiles, path: PurePosixPath, offset: int, length: int, *kept: OpenedFile | SlotPool | None
    ) -> tuple[memoryview, int]:
        if path.parent.name == "packs":
            reads.append(length)
        return original(self, path, offset, length, *kept)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(RemoteFiles, "read_range", read)
    with Store.open(folder, config=config(piece_bytes=1 << 20), create=True) as remote:
        check_state(remote.load(), 2)
        assert len(reads) == 3
        everything = sum(reads)
        reads.clear()
        remote.load(tensors="model.fixed")
        assert sum(reads) < everything / 2
        assert len(reads) == 1
    reads.clear()
    with Store.open(folder, config=config(piece_bytes=32 << 10), create=True) as remote:
        check_state(remote.load(), 2)
    assert 3 < len(reads) <= 2 + -(-everything // (16 << 10))
    assert max(reads) <= 32 << 10


def test_an_operation_that_does_not_end_is_left_behind() -> None:
    """Test that the deadline raises an error with the name of the operation; others return or raise as usual."""
    never = threading.Event()
    with pytest.raises(RemoteUnreachableError, match=r"read x: no answer in 0\.05 s"):
        within(0.05, "read x", never.wait)
    never.set()
    assert within(60, "read x", lambda: 7) == 7
    with pytest.raises(KeyError):
        within(60, "read x", lambda: {}["x"])


def test_a_limit_is_for_all_threads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test with a simulated clock: 30 bytes at 10 a second take 3 seconds, for any sizes."""
    now = [100.0]
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", slept.append)
    rate = RateLimit(10)
    for count in (10, 15, 5):
        rate.wait(count)
    assert slept == [1.0, 2.5, 3.0]
    RateLimit(None).wait(1 << 40)
    assert len(slept) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"client": "ftp"},
        {"options": {"a": 1}},
        {"deadline_s": 0},
        {"deadline_s": float("nan")},
        {"attempts": 0},
        {"pack_bytes": True},
        {"uploads": 0},
        {"reads": 1000},
        {"piece_bytes": 1},
        {"gap_bytes": -1},
        {"bytes_per_s": 0},
        {"grace_s": -1.0},
        {"retry_s": -1.0},
        {"encoded_bytes": 0},
        {"compression": "zip"},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object]) -> None:
    """Test that the error names the setting."""
    with pytest.raises(InvalidInputError, match=next(iter(settings))):
        RemoteConfig(**settings)  # type: ignore[arg-type]  # wrong on purpose
