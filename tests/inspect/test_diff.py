"""Test differences of two checkpoints, compared with a computation in torch."""

from __future__ import annotations

import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import asymcheck
from asymcheck.errors import (
    CheckpointNotFoundError,
    DamagedPartitionError,
    InvalidInputError,
    SkippedCheckpointWarning,
)
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.inspect import diff
from asymcheck.inspect.diff import CheckpointDiff, NormSums, TensorChange, TensorNorms
from asymcheck.restore import frame_reader
from asymcheck.types import Part
from tests.damage.flips import flip

CONFIG = asymcheck.StoreConfig(partition_bytes=8192, bundle_below_bytes=4096, inline_bytes=64)


def saved(path: Path, *states: object) -> asymcheck.Store:
    """Return a store with the states as steps 0, 1, …."""
    store = asymcheck.Store.open(path, config=CONFIG, create=True)
    for step, state in enumerate(states):
        store.save(state, step=step)
    return store


def changes(found: CheckpointDiff) -> dict[str, str]:
    """Return the changes by name."""
    return {change.name: change.change for change in found.tensors}


def norms_of(change: TensorChange) -> TensorNorms:
    """Return the norms, which must exist."""
    assert change.norms is not None
    return change.norms


def test_every_kind_of_change_is_listed(store_path: Path) -> None:
    """Test added, removed and unchanged tensors, and changes of shape, dtype and value."""
    big = torch.arange(5000.0)
    before = {"same": big, "gone": torch.ones(3), "shape": torch.ones(6), "dtype": torch.ones(9), "value": big * 2}
    after = {
        "same": big,
        "new": torch.ones(3),
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(9).half(),
        "value": big * 3,
    }
    with saved(store_path, before, after) as store:
        found = store.diff(0, 1)
    assert changes(found) == {"gone": "removed", "new": "added", "shape": "shape", "dtype": "dtype", "value": "value"}
    assert (found.unchanged_tensors, found.unchanged_bytes) == (1, 20_000)
    by_name = {change.name: change for change in found.tensors}
    assert (by_name["dtype"].dtype_a, by_name["dtype"].dtype_b) == ("float32", "float16")
    assert norms_of(by_name["dtype"]).differing == 0
    assert (by_name["shape"].shape_a, by_name["shape"].shape_b) == ((6,), (2, 3))
    assert by_name["shape"].norms is None
    assert (by_name["gone"].bytes_a, by_name["gone"].bytes_b) == (12, 0)
    assert found.bytes_a == 20_000 + 12 + 24 + 36 + 20_000
    assert found.shared_bytes == 20_000 + 12 + 24  # Include the tensors that are in both manifests.


def test_equal_dotted_names_are_distinguished(store_path: Path) -> None:
    """Test that each tensor is compared with its counterpart, with any glob that matches the name."""
    same = {"a.b": torch.ones(3), "a": {"b": torch.zeros(3)}, 1: torch.ones(4), "1": torch.ones(5), "n": {1: 1, "1": 2}}
    first = {**same, "a.b": torch.full((3,), 2.0), "n": {1: 3, "1": 2}}
    second = {**same, "a": {"b": torch.full((3,), 2.0)}, "n": {1: 1, "1": 3}}
    with saved(store_path, same, first, second) as store:
        assert changes(store.diff(0, 1)) == {"a.b": "value"}
        assert changes(store.diff(0, 2)) == {"a.b (2)": "value"}
        assert changes(store.diff(0, 2, tensors="a.b")) == {"a.b (2)": "value"}
        assert store.diff(0, 1).unchanged_tensors == 3
        assert [one.name for one in store.diff(0, 1).values] == ["n.1"]
        assert [one.name for one in store.diff(0, 2).values] == ["n.1 (2)"]
        assert [(one.name, one.text) for one in store.values(0)[1]] == [("n.1", "1"), ("n.1 (2)", "2")]
        assert len(store.values(0, "n.1")[1]) == 2


@pytest.mark.slow(quick=["uint8"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int16", "uint8", "complex64"])
def test_norms_are_those_of_the_whole_tensors(store_path: Path, dtype: str) -> None:
    """Test norms over many partitions and blocks against torch."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(150_000, generator=generator) * 50 for _ in range(2))
    a, b = (one.abs().to(getattr(torch, dtype)) for one in (a, b))
    b[:70_000] = a[:70_000]
    with saved(store_path, {"x": a}, {"x": b}) as store:
        (change,) = store.diff(0, 1).tensors
    wide = torch.complex128 if dtype.startswith("complex") else torch.float64
    x, y = a.to(wide), b.to(wide)
    found = norms_of(change)
    assert found.l2_a == pytest.approx(float(torch.linalg.vector_norm(x)), rel=1e-12)
    assert found.l2_difference == pytest.approx(float(torch.linalg.vector_norm(y - x)), rel=1e-12)
    assert found.relative == pytest.approx(float(found.l2_difference or 0) / float(found.l2_a or 1), rel=1e-12)
    assert found.largest == float((y - x).abs().max())
    assert found.differing == int((a != b).sum())
    assert found.elements == 150_000
    assert 0 < change.shared_bytes < 70_000 * a.element_size()
    assert change.shared_bytes % 4096 == 0


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_of_the_format_is_compared(dtype: str) -> None:
    """Test all 256 bytes as elements: differences are counted, and norms are numbers or reported as missing."""
    a = np.arange(256, dtype=np.uint8)
    b = a.copy()
    b[: DTYPE_BYTES[dtype]] ^= 1
    sums = NormSums(dtype, dtype, "weights")
    sums.add(a, b)
    found = sums.result()
    assert (found.differing, found.elements) == (1, 256 // DTYPE_BYTES[dtype])
    if dtype == "float4_e2m1fn_x2":
        assert (found.l2_a, found.largest) == (None, None)
        assert "two numbers" in found.note
    elif hasattr(torch, dtype):
        assert not found.note
        assert found.l2_a is not None
        assert found.largest is not None
        assert found.largest > 0


def test_non_finite_values_are_counted_separately(store_path: Path) -> None:
    """Test that they do not affect the norms."""
    a = torch.tensor([3.0, 4.0, math.inf, 1.0, math.nan])
    b = torch.tensor([3.0, 6.0, 1.0, math.nan, math.nan])
    with saved(store_path, {"x": a}, {"x": b}) as store:
        (change,) = store.diff(0, 1).tensors
    found = norms_of(change)
    assert (found.nonfinite_a, found.nonfinite_b) == (2, 2)
    assert found.l2_a == pytest.approx(math.sqrt(26))
    assert (found.l2_difference, found.largest, found.differing) == (2.0, 2.0, 3)


def test_squares_neither_overflow_nor_vanish(store_path: Path) -> None:
    """Test values whose squares exceed float64."""
    huge, tiny = torch.full((4,), 1e200, dtype=torch.float64), torch.full((4,), 1e-200, dtype=torch.float64)
    with saved(store_path, {"h": huge, "t": tiny}, {"h": huge * 2, "t": tiny * 2}) as store:
        found = [norms_of(change) for change in store.diff(0, 1).tensors]
    assert [one.l2_a for one in found] == pytest.approx([2e200, 2e-200], rel=1e-12)
    assert [one.l2_difference for one in found] == pytest.approx([2e200, 2e-200], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_wide_integers_are_subtracted_exactly(store_path: Path, dtype: torch.dtype) -> None:
    """Test two integers near 2^62 that differ by one."""
    a = torch.tensor([1 << 62, 7], dtype=torch.int64).to(dtype)
    b = torch.tensor([(1 << 62) + 1, 2], dtype=torch.int64).to(dtype)
    with saved(store_path, {"x": a}, {"x": b}) as store:
        (change,) = store.diff(0, 1).tensors
    found = norms_of(change)
    assert (found.largest, found.l2_difference) == (5.0, pytest.approx(math.sqrt(26)))


def test_the_state_of_a_random_number_generator_has_no_norms(store_path: Path) -> None:
    """Test that differing elements of a bit pattern are counted."""
    a = torch.zeros(500, dtype=torch.uint8)
    b = a.clone()
    b[3] = 9
    with saved(store_path, {"rng": {"cpu": a}}, {"rng": {"cpu": b}}) as store:
        (change,) = store.diff(0, 1).tensors
    assert (norms_of(change).l2_a, norms_of(change).differing) == (None, 1)
    assert "random" in norms_of(change).note


def test_unchanged_tensors_in_a_changed_partition_are_unchanged(store_path: Path) -> None:
    """Test a partition with several tensors; without reading, the output reports them as undecided."""
    a = {name: torch.ones(100) for name in "pqr"}
    b = {**a, "q": torch.zeros(100)}
    with saved(store_path, {"model": a}, {"model": b}) as store:
        assert changes(store.diff(0, 1)) == {"model.q": "value"}
        assert store.diff(0, 1).unchanged_tensors == 2
        undecided = dict.fromkeys(["model.p", "model.q", "model.r"], "undecided")
        assert changes(store.diff(0, 1, norms=False)) == undecided


def test_without_norms_nothing_is_read(store_path: Path) -> None:
    """Test lost packs: digests show the changes."""
    big = torch.arange(5000.0)
    with saved(store_path, {"x": big, "y": big + 1}, {"x": big, "y": big + 2}) as store:
        for pack in (store_path / "packs").iterdir():
            pack.unlink()
        found = store.diff(0, 1, norms=False)
        assert changes(found) == {"y": "value"}
        assert found.tensors[0].norms is None
        with pytest.raises(asymcheck.errors.MissingPartitionError, match="needed by tensor y"):
            store.diff(0, 1)


def test_equal_digests_are_not_read(store_path: Path) -> None:
    """Test damage in an unchanged tensor, and in a changed one, whose error names the tensor."""
    big = torch.arange(5000.0)
    with saved(store_path, {"x": big}, {"x": big, "y": big + 7}, {"x": big + 1}) as store:
        (first, *_) = [item["pack"] for item in _packs_of(store, 0, "x")]
        pack = store_path / "packs" / f"{first}.pack"
        flip(pack, 8 * (4096 + 200))
        assert changes(store.diff(0, 1)) == {"y": "added"}
        with pytest.raises(DamagedPartitionError, match="needed by tensor x of step 0"):
            store.diff(0, 2)


def _packs_of(store: asymcheck.Store, step: int, name: str) -> list[dict[str, str | None]]:
    (tensor,) = store.tensors(step, name)[1]
    return [{"pack": partition.pack} for partition in tensor.partitions]


def test_memory_is_bounded_by_a_few_partitions(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the number of partitions in memory is constant for any number of them, and blocks have one size."""
    used, most = 0, 0

    def release() -> None:
        nonlocal used
        used -= 1

    class CountedSlot(frame_reader.Slot):
        def __init__(self, payload_bytes: int) -> None:
            nonlocal used, most
            super().__init__(payload_bytes)
            used, most = used + 1, max(most, used + 1)
            weakref.finalize(self._map, release)

    monkeypatch.setattr(frame_reader, "Slot", CountedSlot)
    a, b = torch.zeros(200_000), torch.ones(200_000)
    seen: list[tuple[int, int]] = []
    with saved(store_path, {"x": a, "y": a + 2}, {"x": b, "y": b + 2}) as store:
        found = store.diff(0, 1, progress=lambda done, total: seen.append((done, total)))
    assert [norms_of(change).differing for change in found.tensors] == [200_000, 200_000]
    assert most == 4
    assert seen[-1] == (3_200_000, 3_200_000)
    assert seen[0][0] == 2 * 4 * diff._BLOCK_ELEMENTS


def test_tied_tensors_are_matched_by_any_of_their_names(store_path: Path) -> None:
    """Test a removed tie, which shows the moved name, not a removed and an added tensor."""
    weight = torch.arange(3000.0)
    with saved(store_path, {"a": weight, "b": weight}, {"a": weight, "b": weight + 1}) as store:
        assert changes(store.diff(0, 1)) == {"b": "value"}
        assert changes(store.diff(1, 0)) == {"b": "value"}
        assert store.diff(0, 0).tensors == ()


def test_a_further_name_of_a_tensor_is_added_without_bytes(store_path: Path) -> None:
    """Test that the tensor itself is unchanged."""
    weight = torch.arange(3000.0)
    with saved(store_path, {"a": weight}, {"a": weight, "b": weight}) as store:
        (added,) = store.diff(0, 1).tensors
        (removed,) = store.diff(1, 0).tensors
        assert store.diff(0, 1).unchanged_tensors == 1
    assert (added.name, added.change, added.bytes_b) == ("b", "added", 0)
    assert (removed.name, removed.change, removed.bytes_a) == ("b", "removed", 0)


def test_plain_values_are_listed(store_path: Path) -> None:
    """Test old and new values with types; shortened long values never look equal."""
    before = {"lr": 0.1, "n": 1, "same": "x", "long": "y" * 500, "list": [1, 2], "shape": torch.Size([2])}
    after = {"lr": 0.2, "n": 1.0, "same": "x", "long": "y" * 501, "list": [1], "shape": torch.Size([3]), "new": {}}
    with saved(store_path, before, after) as store:
        found = store.diff(0, 1)
        values = {change.name: (change.a, change.b) for change in found.values}
        assert [change.name for change in store.diff(0, 1, tensors="l*").values] == ["list.1", "long", "lr"]
    assert values["lr"] == ("0.1", "0.2")
    assert values["n"] == ("1", "1.0")
    assert values["list.1"] == ("2", None)
    assert values["new"] == (None, "{}")
    assert values["shape"] == ("shape [2]", "shape [3]")
    assert "(502 characters)" in str(values["long"][0])
    assert "(503 characters)" in str(values["long"][1])
    assert set(values) == {"lr", "n", "list.1", "new", "shape", "long"}
    assert found.unchanged_values == 2


def test_values_of_every_type_have_a_text(store_path: Path) -> None:
    """Test values that Python refuses to print in decimal, and values of torch and numpy."""
    before = {"i": 10**5000, "d": torch.float32, "v": torch.device("cpu"), "s": np.float32(1.5), "c": 1j, "b": b"x"}
    after = {"i": 10**5000 + 1, "d": torch.float16, "v": None, "s": np.float32(2.5), "c": 2j, "b": b"y"}
    with saved(store_path, before, after) as store:
        values = {change.name: (change.a, change.b) for change in store.diff(0, 1).values}
    assert values["d"] == ("dtype float32", "dtype float16")
    assert values["v"] == ("device cpu", "None")
    assert values["s"] == ("float32 1.5", "float32 2.5")
    assert values["c"] == ("1j", "2j")
    assert values["b"] == ("b'x'", "b'y'")
    assert str(values["i"][0]).startswith("0x")


def test_step_means_the_restorable_one(store_path: Path) -> None:
    """Test the save on the line; the save id selects the abandoned one."""
    with asymcheck.Store.open(store_path, config=CONFIG, create=True) as store:
        first = store.save({"x": torch.zeros(2)}, step=1)
        old = store.save({"x": torch.ones(2)}, step=2)
        generation = store.training.begin_generation(first)
        new = store.save({"x": torch.ones(2) * 2}, step=2, generation=generation)
        store.save({"x": torch.ones(2) * 3}, step=2, run="other")
        found = store.diff(1, 2)
        assert (found.b.save_id, found.other_saves_b) == (new.save_id, (old.save_id,))
        assert norms_of(found.tensors[0]).largest == 2.0
        assert store.diff("1", f"save:{old.save_id}").b.save_id == old.save_id
        others = (new.save_id, first.save_id)
        digits = next(n for n in range(1, 33) if not any(other.startswith(old.save_id[:n]) for other in others))
        assert store.diff(1, f"default@save:{old.save_id[:digits]}").b.save_id == old.save_id
        assert norms_of(store.diff(1, "other@2").tensors[0]).largest == 3.0
        with pytest.raises(InvalidInputError, match=f"save:{old.save_id[:1]} matches 3 checkpoints"):
            store.diff(1, f"save:{old.save_id[:1]}")


def test_step_means_a_finished_save(store_path: Path) -> None:
    """Test a step whose newest save was killed before its second rank: a restore would choose the save before it."""
    with asymcheck.Store.open(store_path, config=CONFIG, create=True) as store:
        store.save({"x": torch.zeros(2)}, step=1)
        whole = store.save({"x": torch.ones(2)}, step=2)
        killed = store.save({"x": torch.ones(2)}, step=2, part=Part(0, 2, f"{'f' * 16}{'0' * 16}"))
        with pytest.warns(SkippedCheckpointWarning, match="the manifest of rank 1 is missing"):
            found = store.diff(1, 2)
        assert (found.b.save_id, found.other_saves_b) == (whole.save_id, (killed.save_id,))


def test_a_glob_selects_values_of_several_ranks(store_path: Path) -> None:
    """Test that the number of the rank is no part of the name."""
    with asymcheck.Store.open(store_path, config=CONFIG, create=True) as store:
        for step in range(2):
            for rank in range(2):
                state = {"optimizer": {"lr": step * rank + 1}, "step": step}
                store.save(state, step=step, part=Part(rank, 2, f"{step + 1:032x}"))
        found = store.diff(0, 1, tensors="optimizer.*")
    assert [(value.name, value.a, value.b) for value in found.values] == [("rank 1: optimizer.lr", "1", "2")]
    assert found.unchanged_values == 1


def test_a_selection_that_is_no_glob_is_refused(store_path: Path) -> None:
    """Test a list of names."""
    with saved(store_path, {"x": 1}) as store, pytest.raises(InvalidInputError, match="give one glob"):
        store.diff(0, 0, tensors=["x"])  # type: ignore[arg-type]  # refused


@pytest.mark.parametrize("name", ["", "x", "-1", "save:", "save:XY", "1.0", "save:" + "0" * 33, "a b@1", "@1"])
def test_invalid_checkpoint_name_is_refused(store_path: Path, name: str) -> None:
    """Test that the message shows the syntax."""
    with saved(store_path, {}) as store, pytest.raises(InvalidInputError):
        store.diff(0, name)


@pytest.mark.parametrize("name", ["7", 8, "nobody@0", "save:ffff"])
def test_missing_checkpoint(store_path: Path, name: int | str) -> None:
    """Test that the error is CheckpointNotFoundError."""
    with saved(store_path, {}) as store, pytest.raises(CheckpointNotFoundError):
        store.diff(0, name)


def test_a_checkpoint_shares_all_of_itself(store_path: Path) -> None:
    """Test also data in the manifest."""
    with saved(store_path, {"small": torch.ones(3), "big": torch.arange(5000.0)}) as store:
        found = store.diff(0, 0)
    assert found.shared_bytes == found.bytes_b == 20_012


def test_names_are_in_the_order_of_their_numbers(store_path: Path) -> None:
    """Test layer 10 after layer 9, for tensors and values."""
    before = {"layers": [torch.zeros(2) for _ in range(12)], "epochs": list(range(12))}
    after = {"layers": [torch.ones(2) for _ in range(12)], "epochs": [-1] * 12}
    with saved(store_path, before, after) as store:
        found = store.diff(0, 1)
    assert [change.name for change in found.tensors] == [f"layers.{number}" for number in range(12)]
    assert [change.name for change in found.values] == [f"epochs.{number}" for number in range(12)]


def test_a_glob_that_matches_nothing_is_refused(store_path: Path) -> None:
    """Test a match in only one checkpoint, and a match of a plain value."""
    with saved(store_path, {"a": torch.ones(2)}, {"a": torch.ones(2), "b": 3}) as store:
        assert store.diff(0, 1, tensors="b").values != ()
        with pytest.raises(InvalidInputError, match=r"'c' matches no name in either checkpoint; they have a, b"):
            store.diff(0, 1, tensors="c")
