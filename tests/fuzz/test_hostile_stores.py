"""Test files with valid checksums and hostile content: every call raises a named error."""

import dataclasses
from pathlib import Path

import pytest
import torch

from asymcheck.errors import AsymcheckError, InconsistentCheckpointError
from asymcheck.format.manifest import Extent, TensorRow
from asymcheck.format.tree import Node
from asymcheck.fsck.verify import Severity
from asymcheck.types import PackId, Part
from tests.fuzz.hostile_stores import PACK_ID, STATE, new_store, put_manifest
from tests.fuzz.manifests import row
from tests.zygote import Zygote

ROW: Node = ["T", 0]


@pytest.mark.parametrize(
    "node",
    [
        ["v", "bogus"],
        ["v", ""],
        ["v", "cuda:99999"],
        ["v", "cpu:300"],
        ["v", "\0"],
        ["y", "complex32"],
        ["n", "bfloat16", "0000"],
        ["n", "float8_e4m3fn", "00"],
        ["n", "bool", "07"],
        ["z", [-1]],
        ["z", [["i", "9" * 30]]],
        ["d", [[1, 0], ["1", 0]]],
        ["m", [], ["d", []]],
        ["m", [["a", 1]], 5],
    ],
    ids=str,
)
def test_a_value_that_this_program_cannot_make(tmp_path: Path, node: Node) -> None:
    """Test devices, dtypes and sizes of other machines: the exact state, or a named error."""
    with new_store(tmp_path / "store") as store:
        put_manifest(store, ["l", [ROW, node]])
        try:
            state = store.load()
        except AsymcheckError:
            return
        assert isinstance(state, list)
        assert torch.equal(state[0], STATE["w"])
        if node[0] == "v":  # type: ignore[index]  # JSON or a stand-in, untyped on purpose
            assert str(state[1]) == node[1]  # type: ignore[index]  # JSON or a stand-in, untyped on purpose
        # The restored state can be stored again.
        store.save(state, step=2)
        store.load(2)


@pytest.mark.parametrize(
    "changed",
    [
        row("x", (0, 1 << 62, 1 << 62), "float32"),
        row("x", (1 << 62, 0), "complex128"),
        row("x", (0,) * 64, "bool"),
        row("", (1,), "float4_e2m1fn_x2"),
        row("x" * 70_000, (2,), "complex32"),
    ],
    ids=lambda changed: f"{changed.dtype} {str(changed.shape)[:30]}",
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", ["T", "N"])
def test_a_tensor_that_this_program_cannot_make(tmp_path: Path, changed: TensorRow, kind: str) -> None:
    """Test overflowing strides, and dtypes that numpy lacks: a tensor, or a named error."""
    with new_store(tmp_path / "store") as store:
        put_manifest(store, [kind, 0], [changed])
        try:
            state = store.load()
        except AsymcheckError:
            return
        assert tuple(state.shape) == changed.shape  # type: ignore[attr-defined]  # JSON or a stand-in, untyped on purpose


def test_trees_that_no_writer_makes_are_found_by_verify_and_refused_by_load(tmp_path: Path) -> None:
    """Test that a manifest is only intact if its tree is (§A11.2): the load falls back, verify names the checkpoint."""
    for number, node in enumerate((["l", []], ["l", [ROW, ["T", 1]]], ["d", [["a", ROW], ["a", 1]]], ["q"])):
        with new_store(tmp_path / f"store{number}") as store:
            put_manifest(store, node)
            with pytest.raises(InconsistentCheckpointError):
                store.load()
            findings = store.verify()
            assert [finding.severity for finding in findings] == [Severity.ERROR]
            assert findings[0].checkpoints


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("deep", [True, False])
def test_partition_with_a_wrong_length_is_missing_to_both(tmp_path: Path, ranks: int, deep: bool) -> None:
    """Test also another rank with the right length: no unstored bytes are returned."""
    state = {"w": torch.arange(3000.0)}
    save_id = (1 << 60).to_bytes(8, "big").hex() + "0123456789abcdef"
    for rank in range(ranks):
        with new_store(tmp_path / f"store{rank}") as store:
            for part in range(ranks):
                store.save(state, step=2, part=Part(part, ranks, save_id) if ranks > 1 else None)
            listing = store.resources.tier.manifests.checkpoints("default")[-1]
            tensor = store.resources.tier.manifests.read_all(listing)[rank].rows()[0]
            ((name, _, length, whole),) = map(dataclasses.astuple, tensor.extents)
            extents = (Extent(name, whole, length, 2 * whole),)
            put_manifest(store, ["d", [["w", ROW]]], [dataclasses.replace(tensor, extents=extents)], rank)
            for of_rank in (None, *range(ranks)):
                with pytest.raises(InconsistentCheckpointError):
                    store.load(2, rank=of_rank)
            (finding,) = store.verify(deep=deep)
            assert (finding.kind, finding.severity) == ("missing-partition", Severity.ERROR)
            assert "another length" in finding.message
            assert [" step 2 " in name for name in finding.checkpoints] == [True]


@pytest.mark.slow
def test_error_names_few_of_thousands_of_missing_packs(tmp_path: Path) -> None:
    """Test a manifest with thousands of hints."""
    with new_store(tmp_path / "store") as store:
        hints = tuple(PackId(number.to_bytes(16, "big")) for number in range(2000))
        put_manifest(store, ["d", [["w", ROW]]], packs=hints)
        assert torch.equal(store.load()["w"], STATE["w"])  # type: ignore[index]  # the state of the store
        for path in (tmp_path / "store" / "packs").glob("*.pack"):
            path.unlink()
        with pytest.raises(InconsistentCheckpointError, match="and so with 1992 more packs") as caught:
            store.load()
        assert len(str(caught.value)) < 4000


def test_a_pack_that_claims_more_than_its_file_has_costs_no_memory(zygote: Zygote, tmp_path: Path) -> None:
    """Test an index of 256 MiB and offsets beyond 2^63, in a file of 68 KiB, with 16 MiB of memory."""
    with new_store(tmp_path / "store"):
        pass
    outcome = zygote.call("tests.fuzz.hostile_stores:open_large_claims", path=str(tmp_path / "store"))
    assert outcome.returned, str(outcome)
    assert len(outcome.value) == 6
    for refused in outcome.value:
        assert refused.startswith(("TruncatedError: ", "StructureError: ", "LimitError: ")), refused
        assert PACK_ID.hex() in refused
