"""Test ten thousand checkpoints: resolving the newest takes about as many operations as with one checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path, PurePosixPath

import pytest

from asymcheck import Store
from asymcheck.format import layout
from asymcheck.format.digest import digest
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import encode
from asymcheck.format.record import HeadRecord
from asymcheck.replication.checkpoint_cache import CheckpointCache
from asymcheck.replication.head_records import publish_heads
from asymcheck.restore.partition_locator import PartitionLocator
from asymcheck.storage.nvme.manifests import ManifestFiles
from asymcheck.storage.pack_index import PackIndex
from asymcheck.storage.remote import RemoteTier, clients, pack_reader, parse_location, tier
from asymcheck.storage.remote.client_interface import Entry
from asymcheck.storage.remote.readers import Readers
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.types import CheckpointRef, PackId, SaveId
from tests.remote.conftest import CONFIG, check_state, save_steps

COUNT = 10_000


@pytest.fixture(scope="module")
def locations(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return a location with one checkpoint, and one with ten thousand older checkpoints in addition."""
    base = tmp_path_factory.mktemp("many")
    save_steps(base / "store", COUNT)
    with Store.open(base / "store", config=CONFIG, create=True) as store:
        for name in ("one", "many"):
            store.push(f"file://{base}/{name}")
    remote = RemoteTier(parse_location(f"file://{base}/many"), CONFIG)
    (listing,) = remote.manifests.checkpoints("default")
    manifest = remote.manifests.read("default", listing.ref, listing.manifests[0])
    remote.close()
    for step in range(COUNT):
        ref = CheckpointRef(1, step, SaveId(step.to_bytes(8, "big") + bytes(8)))
        data = encode(manifest, dataclasses.replace(manifest.header, ref=ref))
        folder = base / "many" / layout.MANIFESTS / "default" / layout.checkpoint_name(ref)
        folder.mkdir()
        (folder / str(ManifestName(0, 1, digest(data)))).write_bytes(data)
        pack = base / "many" / layout.PACKS / layout.pack_name(step.to_bytes(16, "big"))  # type: ignore[arg-type]  # an id
        pack.touch()
        os.utime(pack, (step, step))
    return f"file://{base}/one", f"file://{base}/many"


@pytest.mark.slow
def test_push_does_not_list_all_checkpoints(locations: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the listed folders, because each of them is a request to HDFS."""
    listed: list[str] = []
    original = clients._LocalClient.children

    def children(client: clients._LocalClient, path: str) -> list[Entry]:
        listed.append(path)
        return original(client, path)

    monkeypatch.setattr(clients._LocalClient, "children", children)
    counts = []
    with Store.open(Path(locations[0].removeprefix("file://")).with_name("store"), config=CONFIG) as store:
        for location in locations:
            listed.clear()
            assert store.push(location).present == 1
            counts.append(len(listed))
    assert counts[0] == counts[1] < 10


@pytest.mark.slow
def test_restore_does_not_depend_on_the_number_of_checkpoints(
    locations: tuple[str, str], operations: list[str]
) -> None:
    """Test that every listing is one operation, and that only needed packs and a few more are opened."""
    counts = []
    for location in locations:
        operations.clear()
        with Store.open(location, config=CONFIG, create=True) as remote:
            check_state(remote.load(), COUNT)
        counts.append(len(operations))
    assert counts[0] < 40
    # Header and first frame of the packs whose indexes are read ahead in vain.
    assert counts[1] - counts[0] <= 2 * CONFIG.remote.reads


@pytest.mark.slow
def test_a_push_of_nothing_does_as_little(locations: tuple[str, str], operations: list[str]) -> None:
    """Test that only the newest packs are read to see that the newest checkpoint is complete."""
    with Store.open(Path(locations[0].removeprefix("file://")).parent / "store", config=CONFIG, create=True) as store:
        for location in locations:
            operations.clear()
            assert store.push(location).present == 1
            assert len(operations) < 60


@pytest.mark.slow
def test_a_push_of_all_reads_every_index_once(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that no index is read twice, for any number of checkpoints."""
    save_steps(tmp_path / "store", *range(20))
    read: list[PackId] = []

    def read_pack_index(files: RemoteFiles, path: PurePosixPath, pack_id: PackId) -> PackIndex:
        read.append(pack_id)
        return pack_reader.read_pack_index(files, path, pack_id)

    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        store.push(folder, everything=True)
        monkeypatch.setattr(tier, "read_pack_index", read_pack_index)
        assert store.push(folder, everything=True).present == 20
    assert len(read) == len(set(read)) > 20


def test_a_push_of_all_lists_the_packs_once(tmp_path: Path, folder: str, operations: list[str]) -> None:
    """Test that the packs are not listed for each checkpoint that the location has."""
    save_steps(tmp_path / "store", *range(5))
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        store.push(folder, 4)
        operations.clear()
        assert store.push(folder, 4).present == 1
        of_one = operations.count("list")
        store.push(folder, everything=True)
        operations.clear()
        assert store.push(folder, everything=True).present == 5
    # The folder of each checkpoint, the packs once, and the head records.
    assert operations.count("list") == of_one + 4


def test_a_push_reads_only_new_head_records(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a training that was restarted a thousand times does not read a thousand records for each push."""
    read: list[int] = []
    original = ManifestFiles.read_head

    def counted(self: ManifestFiles, run: str, generation: int) -> tuple[HeadRecord, int] | None:
        read.append(generation)
        return original(self, run, generation)

    save_steps(tmp_path / "store", 0)
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        (parent,) = store.checkpoints()
        generations = [store.training.begin_generation(parent) for _ in range(6)]
        tier = store.resources.tier
        with contextlib.closing(RemoteTier(parse_location(folder), CONFIG, create=True)) as remote:
            monkeypatch.setattr(ManifestFiles, "read_head", counted)
            for expected in (generations, generations[-1:]):
                read.clear()
                publish_heads(tier, remote, "default")
                assert read == expected
            assert remote.manifests.heads("default") == generations


@pytest.mark.slow
def test_push_lists_only_changes(locations: tuple[str, str], operations: list[str]) -> None:
    """Test that the first refresh lists all folders, and the next one only names."""
    remote = RemoteTier(parse_location(locations[1]), CONFIG)
    known = CheckpointCache(remote, "default", metrics=False)
    for bound in (4, 2):
        operations.clear()
        assert len(known.refresh()) == COUNT + 1
        assert len(operations) <= bound
    remote.close()


@pytest.mark.slow
def test_a_directory_is_one_listing(locations: tuple[str, str], operations: list[str]) -> None:
    """Test that the number of checkpoints in a folder causes no further request."""
    remote = RemoteTier(parse_location(locations[1]), CONFIG)
    operations.clear()
    assert len(remote.manifests.checkpoints("default")) == COUNT + 1
    assert len(remote.pack_ids()) > COUNT
    assert len(operations) <= 3
    remote.close()


def test_a_pull_of_all_lists_the_packs_once(tmp_path: Path, folder: str, operations: list[str]) -> None:
    """Test that neither the packs are listed, nor all of them searched, for each checkpoint."""
    save_steps(tmp_path / "store", *range(6))
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        store.push(folder, everything=True)
    counts = []
    for count in (1, 6):
        with Store.open(tmp_path / f"pulled {count}", config=CONFIG, create=True) as store:
            operations.clear()
            assert len(store.pull(folder, everything=count > 1).committed) == count
            counts.append(operations.count("list"))
            check_state(store.load(), 5)
    # The runs and their head records.
    assert counts[1] <= counts[0] + 2


def test_known_packs_are_not_searched_in_vain(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a push opens only packs that may hold a partition, because a location may have thousands."""
    save_steps(tmp_path / "store", *range(4))
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        store.push(folder, everything=True)
    remote = RemoteTier(parse_location(folder), CONFIG)
    opened: list[PackId] = []
    original = RemoteTier.open_pack

    def open_pack(location: RemoteTier, pack_id: PackId) -> pack_reader.RemotePack:
        opened.append(pack_id)
        return original(location, pack_id)

    monkeypatch.setattr(RemoteTier, "open_pack", open_pack)
    # The unchanged tensor of the newest checkpoint is in the oldest pack, so every index is known afterwards.
    for listing in reversed(remote.manifests.checkpoints("default")):
        manifest = remote.manifests.read("default", listing.ref, listing.manifests[0])
        opened.clear()
        with PartitionLocator.of_manifests(remote, [manifest]) as sources:
            needed = {sources.copy(name).pack.header.pack_id for name in manifest.partitions()}
    assert len(opened) == len(needed) < len(remote.pack_ids())
    remote.close()


def test_known_indexes_need_no_thread(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a push starts no thread for each pack of the location whose index it has read before."""
    save_steps(tmp_path / "store", *range(4))
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        store.push(folder, everything=True)
    remote = RemoteTier(parse_location(folder), CONFIG)
    packs = remote.pack_ids()
    indexes = remote.read_indexes(packs)
    monkeypatch.setattr(Readers, "submit", None)
    assert remote.read_indexes(packs) == indexes
    assert len(indexes) == len(packs) > 1
    remote.close()
