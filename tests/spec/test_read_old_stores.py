"""Test that stores of earlier versions, complete or torn, are readable bit for bit, and writable."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asymcheck
from asymcheck.events import COMMIT_ORDER
from asymcheck.format import layout, registry
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.pack import decode_pack_header
from asymcheck.fsck.verify import Severity
from tests.spec.corpus import FORMAT_SPEC
from tests.spec.frozen import STORES, Frozen, check_everything, found_tensors, torn_stores, whole_stores
from tools.vectors_stores import CONFIG, dump_catalog

# torch warns once in a process, when the first complex32 tensor is created.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

WHOLE, TORN = whole_stores(), torn_stores()
ALL = [*WHOLE, *TORN]
NEW_STATE = {"weight": torch.arange(40000, dtype=torch.int32), "epoch": 99}


def test_frozen_stores_exist() -> None:
    """Test that at least the first version exists, with a crash at every event of a save."""
    assert {"v1-by-0.1.0", "v1-by-0.1.0-shifted-payload"} <= {frozen.whole.name for frozen in WHOLE}
    for whole in WHOLE:
        assert {frozen.event for frozen in TORN if frozen.whole == whole.whole} >= set(COMMIT_ORDER)


@pytest.mark.parametrize("frozen", WHOLE, ids=str)
def test_frozen_store_restores_in_place(frozen: Frozen) -> None:
    """Test every bit without the catalog, and that no file is changed."""
    before = _fingerprint(frozen.whole)
    with asymcheck.Store.open(frozen.whole / "store", read_only=True) as store:
        check_everything(store, frozen)
        assert store.verify() == []
    assert _fingerprint(frozen.whole) == before


def _fingerprint(path: Path) -> list[tuple[str, int, int]]:
    return sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in path.rglob("*"))


@pytest.mark.slow(quick=["v1-by-0.1.0-shifted-payload-torn/08-manifest.written-rebuilt"])
@pytest.mark.parametrize("with_catalog", [False, True], ids=["rebuilt", "old catalog"])
@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_a_copy_restores(frozen: Frozen, store_path: Path, *, with_catalog: bool) -> None:
    """Test that exactly the committed checkpoints exist, bit for bit, and which one is newest."""
    frozen.copy_to(store_path, with_catalog=with_catalog)
    with asymcheck.Store.open(store_path, create=True) as store:
        check_everything(store, frozen)


@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_verify_finds_no_damage(frozen: Frozen, store_path: Path) -> None:
    """Test that leftovers of a crash are at most hints of files that a collection removes."""
    frozen.copy_to(store_path)
    with asymcheck.Store.open(store_path, read_only=True) as store:
        findings = store.verify()
    assert all(finding.severity is Severity.HINT for finding in findings), findings
    temporary = any(path.suffix == ".tmp" for path in (store_path / "packs").iterdir())
    assert ("stale-temporary" in {finding.kind for finding in findings}) == temporary


@pytest.mark.slow(quick=["v1-by-0.1.0-torn/03-pack.synced-rebuilt"], long=["*-torn/*-old catalog"])
@pytest.mark.parametrize("with_catalog", [False, True], ids=["rebuilt", "old catalog"])
@pytest.mark.parametrize("frozen", ALL, ids=str)
def test_a_copy_can_be_trained_on(frozen: Frozen, store_path: Path, *, with_catalog: bool) -> None:
    """Test a save that reuses data, and a collection that removes leftovers, without any other loss."""
    frozen.copy_to(store_path, with_catalog=with_catalog)
    with asymcheck.Store.open(store_path, config=CONFIG, create=True) as store:
        newest = store.restore()
        again = store.save(newest.state, step=newest.checkpoint.step + 1)
        assert again.written_bytes == 0
        saved = store.save(NEW_STATE, step=newest.checkpoint.step + 2, metrics={"loss": 0.25})
        assert saved.written_bytes > 0
        store.gc()
        after = store.restore()
        assert after.checkpoint.save_id == saved.save_id
        assert found_tensors(after.state) == found_tensors(NEW_STATE)
        store.delete(again.step)
        store.delete(saved.step)
        store.gc()
        check_everything(store, frozen)
        assert store.verify() == []
    assert not list(store_path.rglob("*.tmp"))
    pins = dump_catalog(store_path / "catalog")["pins"]
    assert not pins


@pytest.mark.parametrize("frozen", WHOLE, ids=str)
def test_rebuilt_catalog_equals_the_frozen_one(frozen: Frozen, store_path: Path) -> None:
    """Test equality byte for byte."""
    frozen.copy_to(store_path)
    with asymcheck.Store.open(store_path, create=True) as store:
        store.gc(dry_run=True)
    assert dump_catalog(store_path / "catalog") == frozen.catalog
    assert frozen.catalog["partitions"]
    assert frozen.catalog["manifests"]


@pytest.mark.parametrize("frozen", [frozen for frozen in TORN if frozen.event == "catalog.pinned"], ids=str)
def test_a_pin_of_a_dead_process_goes_with_its_pack(frozen: Frozen, store_path: Path) -> None:
    """Test a crash after the pin: a collection removes the pin and frees the unreferenced pack."""
    frozen.copy_to(store_path, with_catalog=True)
    assert len(frozen.catalog["pins"]) == 1
    with asymcheck.Store.open(store_path, create=True) as store:
        assert store.gc().freed_packs == 1
    assert not dump_catalog(store_path / "catalog")["pins"]


@pytest.mark.parametrize("frozen", WHOLE, ids=str)
def test_an_abandoned_checkpoint_restores(frozen: Frozen, store_path: Path) -> None:
    """Test that abandoned checkpoints still exist, bit for bit."""
    frozen.copy_to(store_path)
    abandoned = [facts for facts in frozen.checkpoints if not facts["on_line"]]
    assert abandoned
    for facts in abandoned:
        name = f"{facts['generation']:08d}-{facts['step']:012d}-{facts['save_id']}"
        for other in (store_path / "manifests" / facts["run"]).glob(f"*-{facts['step']:012d}-*"):
            if other.name != name:
                shutil.rmtree(other)
        with asymcheck.Store.open(store_path, read_only=True) as store:
            restored = store.restore(facts["step"], run=facts["run"])
        assert restored.checkpoint.save_id == facts["save_id"]
        assert found_tensors(restored.state) == (facts["tree"], facts["tensors"])


@pytest.mark.parametrize("frozen", WHOLE, ids=str)
def test_a_copy_without_its_empty_folders_works(frozen: Frozen, store_path: Path) -> None:
    """Test a copy by a tool that keeps only files, as git does: it can be read, written and collected."""
    frozen.copy_to(store_path)
    shutil.rmtree(store_path / "pool")
    shutil.rmtree(store_path / "heads")
    with asymcheck.Store.open(store_path, create=True) as store:
        values = store.restore(run="values")
        assert store.training.begin_generation(values.checkpoint, run="values") == 2
        store.save(NEW_STATE, step=1, run="values")
        store.delete(1, run="values")
        assert store.gc().freed_packs == 1
        assert store.restore(run="values").checkpoint.save_id == values.checkpoint.save_id


def _nodes(node: Any) -> Iterator[str]:  # noqa: ANN401 - as JSON has it
    """Return the kinds of all nodes of a tree; shapes are only followed in known nodes."""
    if not isinstance(node, list):
        yield type(node).__name__
        return
    yield node[0]
    if node[0] in "lt":
        for item in node[1]:
            yield from _nodes(item)
    elif node[0] in "dom":
        for key, item in node[1]:
            yield f"key {type(key).__name__}"
            yield from _nodes(item)
        for item in node[2:]:
            yield from _nodes(item)


@pytest.mark.parametrize("frozen", WHOLE, ids=str)
def test_the_store_has_everything(frozen: Frozen) -> None:
    """Test that every node and dtype of its version occurs, and every way to store bytes."""
    nodes = {node for facts in frozen.checkpoints for node in _nodes(facts["tree"])}
    assert nodes >= {*"ifcbltzdomTNnyv", "str", "int", "bool", "NoneType", "key str", "key int", "key list"}
    tensors = [tensor for facts in frozen.checkpoints for tensor in facts["tensors"]]
    frozen_registry = json.loads((frozen.whole / "registry.json").read_text("ascii"))
    assert {tensor["dtype"] for tensor in tensors} == set(frozen_registry["dtypes"])
    assert any(tensor["aliases"] for tensor in tensors)
    assert any(tensor["nbytes"] == 0 for tensor in tensors)
    rows = [row for path in frozen.whole.rglob("*.manifest") for row in _rows(path)]
    assert any(row.inline for row in rows)
    assert any(len(row.extents) >= 3 for row in rows)
    assert any(extent.length < extent.partition_length for row in rows for extent in row.extents)
    packs = sorted((frozen.whole / "store" / "packs").glob("*.pack"))
    headers = [decode_pack_header(path.read_bytes(), path.name) for path in packs]
    assert len(packs) >= 2
    assert any(header.frame_count > 1 for header in headers)
    assert any(path.stat().st_size > header.pack_length for path, header in zip(packs, headers, strict=True))
    lengths = [extent.partition_length for row in rows for extent in row.extents]
    assert max(lengths) >= registry.ALIGNED_PAYLOAD_MIN_BYTES
    assert {facts["generation"] for facts in frozen.checkpoints} >= {1, 2}
    assert len(list((frozen.whole / "store" / "pool").glob("*.pack"))) == 1


def _rows(path: Path) -> list[Any]:
    manifest = decode_manifest(path.read_bytes(), path.name)
    return list(manifest.rows())


@pytest.mark.parametrize("frozen", WHOLE, ids=str)
def test_the_registry_is_append_only(frozen: Frozen) -> None:
    """Test that numbers, names and limits keep their meaning; only reserved numbers may become used."""
    old = json.loads((frozen.whole / "registry.json").read_text("ascii"))
    new = json.loads((FORMAT_SPEC / "registry.json").read_text("ascii"))
    assert set(old) <= set(new)
    for table in ("digests", "frame_kinds", "codecs"):
        for number, entry in old[table].items():
            now = new[table][number]
            assert {**now, "status": entry["status"]} == entry
            assert entry["status"] in (now["status"], "reserved")
    for table in old.keys() - {"digests", "frame_kinds", "codecs", "roles", "format"}:
        assert old[table].items() <= new[table].items()
    assert new["roles"][: len(old["roles"])] == old["roles"]
    assert new["format"]["min_read"] <= old["format"]["write"] <= new["format"]["max_read"]


def test_frozen_stores_hold_no_lmdb() -> None:
    """Test that the catalog is frozen as JSON, because its binary form depends on the machine."""
    names = {path.name for path in STORES.rglob("*")}
    assert not names & {"data.mdb", "lock.mdb", layout.CATALOG}
