"""Test that small reads of a location overlap: head records, manifests, and indexes of packs."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

import pytest
import torch

from asymcheck import Store
from asymcheck.config import WRITER
from asymcheck.errors import MissingPartitionError, StorageError
from asymcheck.executor import begin
from asymcheck.format import layout
from asymcheck.format.digest import digest
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import encode
from asymcheck.format.record import HeadRecord
from asymcheck.fsck.verify import verify
from asymcheck.inspect.history import Known, read_history
from asymcheck.replication.collect_remote import RemoteSweep
from asymcheck.restore.lineage import read_line
from asymcheck.restore.partition_locator import PartitionLocator
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.pack_index import PackIndex
from asymcheck.storage.remote import RemoteTier, parse_location, tier
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.types import CheckpointRef, PackId, SaveId
from tests.damage.flips import flip
from tests.remote.conftest import CONFIG, REMOTE, config, save_steps

RANKS = 12
GENERATIONS = 8
CHECKPOINTS = 20
LATENCY_S = 0.02


class Overlap:
    """Slows down a function, and counts its calls and how many of them run at the same time."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self.calls = self.most = self._running = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Count one call."""
        with self._lock:
            self.calls += 1
            self._running += 1
            self.most = max(self.most, self._running)
        time.sleep(LATENCY_S)
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> Overlap:
    """Count the reads of small files."""
    overlap, read = Overlap(), RemoteFiles._read_small

    def counted(files: RemoteFiles, path: PurePosixPath, limit: int) -> bytes | None:
        with overlap.call():
            return read(files, path, limit)

    monkeypatch.setattr(RemoteFiles, "_read_small", counted)
    return overlap


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[RemoteTier]:
    """Return a location with one checkpoint of step 3."""
    save_steps(tmp_path / "store", 3)
    location = f"file://{tmp_path}/there"
    with Store.open(tmp_path / "store", config=CONFIG) as store:
        store.push(location)
    with contextlib.closing(RemoteTier(parse_location(location), CONFIG)) as opened:
        yield opened


def test_small_files_are_read_ahead(tmp_path: Path, small_reads: Overlap) -> None:
    """Test contents, a missing file, a failure, and files that nobody asks for."""
    files = RemoteFiles(parse_location(f"file://{tmp_path}"), REMOTE)
    paths = [files.top / f"{number}" for number in range(10)]
    for number in range(8):
        (tmp_path / f"{number}").write_bytes(b"x" * number)
    (tmp_path / "8").mkdir()
    with files.reading_ahead(paths, 5):
        assert [files.read_small(path, 5) for path in paths[:3]] == [b"", b"x", b"xx"]
        assert files.read_small(paths[7], 5) == b"x" * 6
        assert files.read_small(paths[9], 5) is None
        with pytest.raises(StorageError):
            files.read_small(paths[8], 5)
    assert small_reads.most >= REMOTE.reads
    assert not files._ahead
    (tmp_path / "4").write_bytes(b"new")
    assert files.read_small(paths[4], 5) == b"new"


def test_a_read_that_has_not_begun_is_not_waited_for(tmp_path: Path) -> None:
    """Test a thread that takes the read of another thread, which then ends and cancels its reads."""
    files = RemoteFiles(parse_location(f"file://{tmp_path}"), dataclasses.replace(REMOTE, reads=1))
    path = files.top / "file"
    (tmp_path / "file").write_bytes(b"x")
    released = threading.Event()
    files.readers.submit(released.wait, 60)
    with files.reading_ahead([path], 5):
        other = begin(partial(files.read_small, path, 5), "other")
        while files._ahead:
            time.sleep(0.001)
    assert other.result(60) == b"x"
    released.set()


def test_manifests_of_all_ranks_overlap(remote: RemoteTier, small_reads: Overlap) -> None:
    """Test a checkpoint of several ranks."""
    (listing,) = remote.manifests.checkpoints("default")
    manifest = remote.manifests.read("default", listing.ref, listing.manifests[0])
    ref = CheckpointRef(1, 4, SaveId(bytes(16)))
    names = []
    for rank in range(RANKS):
        data = encode(manifest, dataclasses.replace(manifest.header, ref=ref, rank=rank, world_size=RANKS))
        names.append(ManifestName(rank, RANKS, digest(data)))
        remote.manifests.publish("default", ref, names[-1], data)
    small_reads.calls = 0
    found = remote.manifests.read_all(CheckpointFiles("default", ref, tuple(names)))
    assert [one.header.rank for one in found] == [*range(RANKS)]
    assert small_reads.calls == RANKS
    assert small_reads.most > 2


@pytest.mark.parametrize(
    "reader", [lambda remote: RemoteSweep(remote).carry_out(), verify, partial(read_history, run="default")]
)
def test_manifests_of_many_checkpoints_overlap(
    remote: RemoteTier, small_reads: Overlap, reader: Callable[[RemoteTier], object]
) -> None:
    """Test that a collection, a check and a history read each manifest once, several at a time."""
    (listing,) = remote.manifests.checkpoints("default")
    manifest = remote.manifests.read("default", listing.ref, listing.manifests[0])
    for step in range(4, 4 + CHECKPOINTS):
        ref = CheckpointRef(1, step, SaveId(bytes(16)))
        data = encode(manifest, dataclasses.replace(manifest.header, ref=ref))
        remote.manifests.publish("default", ref, ManifestName(0, 1, digest(data)), data)
    small_reads.calls = small_reads.most = 0
    reader(remote)
    assert small_reads.calls <= CHECKPOINTS + 3
    assert small_reads.most > 2


def test_known_checkpoints_are_not_read_ahead(remote: RemoteTier, small_reads: Overlap) -> None:
    """Test a history that is followed."""
    known: Known = {}
    read_history(remote, "default", known=known)
    first, small_reads.calls = small_reads.calls, 0
    assert len(read_history(remote, "default", known=known).entries) == 1
    assert small_reads.calls == first - 1, "only head records are read again"


def test_head_records_overlap(remote: RemoteTier, small_reads: Overlap) -> None:
    """Test the line of a training that was restarted several times; each record is read once."""
    (listing,) = remote.manifests.checkpoints("default")
    refs = [listing.ref, *(CheckpointRef(number, number, SaveId(bytes(16))) for number in range(2, GENERATIONS))]
    records = [
        HeadRecord("default", number, None if number == 1 else refs[number - 2], time.time_ns(), WRITER)
        for number in range(1, GENERATIONS + 1)
    ]
    for record in records:
        remote.manifests.publish_head(record)
    small_reads.calls = 0
    assert [*read_line(remote, "default").limits] == [*range(GENERATIONS, 0, -1)]
    assert small_reads.calls == GENERATIONS
    assert small_reads.most > 2


def test_a_damaged_pack_is_scanned_once(remote: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a pack without a readable index, and searches for other copies, as after the damage of a frame."""
    damaged = next(iter(remote.pack_ids()))
    path = Path(remote.packs / layout.pack_name(damaged))
    flip(path, 8 * -4096)
    scans, read = [], tier.read_pack_index

    def noted(files: RemoteFiles, where: PurePosixPath, pack_id: PackId) -> PackIndex:
        scans.append(pack_id)
        return read(files, where, pack_id)

    monkeypatch.setattr(tier, "read_pack_index", noted)
    (listing,) = remote.manifests.checkpoints("default")
    manifests = remote.manifests.read_all(listing)
    with PartitionLocator.of_manifests(remote, manifests) as sources:
        for name in manifests[0].partitions():
            assert list(sources.other_copies(name, []))
    assert all(loading.exception(60) is None for loading in remote._loading.values())
    assert scans.count(damaged) == 1


@pytest.mark.filterwarnings("ignore::asymcheck.errors.RemoteCopyWarning")
@pytest.mark.parametrize("near", [False, True], ids=["location", "store with a location"])
def test_indexes_of_packs_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, near: bool) -> None:
    """Test a state whose tensors were pushed one by one, in packs of their own, in a store and directly."""
    overlap, read = Overlap(), tier.read_pack_index

    def counted(files: RemoteFiles, path: PurePosixPath, pack_id: PackId) -> PackIndex:
        with overlap.call():
            return read(files, path, pack_id)

    tensors = {f"t{number}": torch.zeros(4096) for number in range(12)}
    location = f"file://{tmp_path}/there"
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        for step, tensor in enumerate(tensors.values()):
            tensor.fill_(step)
            store.save(tensors, step=step)
            store.push(location)
    packs = len(list((tmp_path / "there" / layout.PACKS).iterdir()))
    assert packs >= 12
    monkeypatch.setattr(tier, "read_pack_index", counted)
    if near:
        with Store.open(tmp_path / "other", config=CONFIG, create=True, remote=location) as other:
            loaded = other.load()
    else:
        with Store.open(location, config=CONFIG, read_only=True) as there:
            loaded = there.load()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert overlap.calls <= packs
    assert overlap.most > 2


def test_a_pack_that_vanishes_after_it_was_expected_is_missing(remote: RemoteTier) -> None:
    """Test that a failed read ahead is the failure of the later open, and that the next open reads again."""
    (pack_id, *_) = remote.pack_ids()
    path = remote.packs / layout.pack_name(pack_id)
    hidden = Path(path).with_suffix(".away")
    Path(path).rename(hidden)
    remote.expect([pack_id])
    deadline = time.monotonic() + 30
    while not remote._loading[pack_id].done() and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(MissingPartitionError):
        remote.open_pack(pack_id)
    hidden.rename(path)
    remote.open_pack(pack_id).close()


def test_an_index_is_expected_while_another_thread_reads_all_of_them(remote: RemoteTier) -> None:
    """Test that the only reader thread does not wait for a read that comes after its own in the queue."""
    packs = remote.pack_ids()
    with contextlib.closing(RemoteTier(remote.location, config(reads=1))) as narrow:
        released = threading.Event()
        narrow.files.readers.submit(released.wait, 60)
        other = begin(partial(narrow.read_indexes, packs), "other")
        while len(narrow.files.readers._waiting) < len(packs):
            time.sleep(0.001)
        narrow.expect(packs)
        released.set()
        assert None not in other.result(10).values()
