"""Test the data that a rank reads: its own values, and tensors from any shards."""

import contextlib
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from asymcheck import Checkpointer, Store, StoreConfig, TensorShard
from asymcheck.errors import (
    InconsistentCheckpointError,
    InvalidInputError,
    PartialRestoreError,
    SkippedCheckpointWarning,
    StateDifferenceWarning,
    StateMismatchError,
)
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.fsck.verify import Severity
from asymcheck.types import CheckpointRef, PackId
from tests.damage.flips import flip
from tests.reshard.ranks import cut_in_grid, save_ranks
from tests.store.equality import assert_same
from tests.store.spies import frames_read

SMALL = StoreConfig(partition_bytes=4096, bundle_below_bytes=0, inline_bytes=64)


def _part(full: torch.Tensor, first: int, last: int) -> TensorShard:
    return TensorShard(full[first:last].clone(), tuple(full.shape), (first, *(0,) * (full.ndim - 1)))


def test_values_and_uncut_tensors_are_those_of_the_rank(store_path: Path) -> None:
    """Test also more ranks than saved, which begin again with the values of rank 0."""
    states = [
        {"rank": rank, "rng": torch.full((9,), rank), "array": np.full(3, rank), "list": [rank, {"x": float(rank)}]}
        for rank in range(3)
    ]
    with Store.open(store_path, create=True) as store:
        save_ranks(store, states)
        for rank in range(7):
            into = {"rank": None, "rng": torch.zeros(9, dtype=torch.int64), "array": np.zeros(3, int), "list": None}
            assert_same(store.load(into=into, rank=rank), states[rank % 3])
        for rank, state in enumerate(states):
            assert_same(store.load(rank=rank), state)
        assert_same(store.load(), states[0])
        with pytest.raises(InvalidInputError, match=r"was saved by 3 ranks, so rank 3 does not exist"):
            store.load(rank=3)


@pytest.mark.parametrize(
    ("given", "stored", "others"),
    [
        ([0], [1, 2, 3], [9]),
        ([], [1, 2, 3], []),
        ([torch.zeros(2)], [torch.ones(2), torch.ones(2)], [torch.full((2,), 9.0)]),
        (deque([0], maxlen=4), deque([1, 2, 3], maxlen=4), deque([9], maxlen=4)),
        (deque(), deque([{"a": 1}]), deque([{"b": 9}])),
        ({}, {"files": {"a": 1}}, {"files": {"b": 9}}),
        (None, {"a": 1}, {"b": 9}),
        (None, [{"a": 1}], [{"b": 9}]),
    ],
)
def test_values_of_the_own_rank_are_never_those_of_another(
    store_path: Path, given: object, stored: object, others: object
) -> None:
    """Test values of another length or with other keys on each rank, and a given state that fits only the other."""
    with Store.open(store_path, create=True) as store:
        save_ranks(store, [{"x": stored}, {"x": others}])
        assert_same(store.restore(into={"x": given}, rank=0, grows=True).state, {"x": stored})


def test_a_list_that_only_another_rank_has_in_this_length_is_refused(store_path: Path) -> None:
    """Test a load, which does not change the length of a list."""
    with Store.open(store_path, create=True) as store:
        save_ranks(store, [{"x": [1, 2, 3]}, {"x": [9]}])
        with pytest.raises(StateMismatchError, match="x: a list of 1 is given, but a list of 3 is stored"):
            store.load(into={"x": [0]}, rank=0)


def test_a_rank_may_have_nothing_to_save(store_path: Path) -> None:
    """Test that the rank restores its empty state, and that an empty state is refused where tensors were saved."""
    with Store.open(store_path, create=True) as store:
        save_ranks(store, [{"x": torch.ones(2)}, {}])
        assert store.restore(into={}, rank=1, grows=True, world_size=2).state == {}
        with pytest.warns(StateDifferenceWarning, match="stored, but not in the given state: x"):
            assert store.restore(into={}, rank=2, grows=True, world_size=3).state == {}
        with pytest.raises(InvalidInputError, match="give a state with tensors to fill"):
            store.load(into={}, rank=0)


@pytest.mark.parametrize(("world_size", "more"), [(4, {"e1": torch.ones(1)}), (2, {})])
def test_tensors_of_other_ranks_are_not_added_by_another_number_of_ranks(
    store_path: Path, world_size: int, more: dict[str, torch.Tensor]
) -> None:
    """Test that as many ranks get tensors that the given state lacks, and others only those that all ranks have."""
    with Store.open(store_path, create=True) as store:
        save_ranks(
            store,
            [{"x": {f"e{rank}": torch.full((1,), rank, dtype=torch.float32), "y": torch.ones(1)}} for rank in range(4)],
        )
        given = {"x": {"e3": torch.zeros(1)}}
        restored = store.restore(into=given, rank=1, grows=True, world_size=world_size)
        assert_same(restored.state, {"x": {"e3": torch.full((1,), 3.0), **more, "y": torch.ones(1)}})


@pytest.mark.parametrize("world_size", [0, 1.5, "2", True])
def test_invalid_number_of_ranks_is_refused(store_path: Path, world_size: object) -> None:
    """Test that the error names the argument."""
    with (
        Store.open(store_path, create=True) as store,
        pytest.raises(InvalidInputError, match=r"world_size .*: give an integer from 1, or None"),
    ):
        store.restore(world_size=world_size)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("rank", [-1, 1.5, "0", True, 10**9])
def test_invalid_rank_is_refused(store_path: Path, rank: object) -> None:
    """Test that the error is raised before anything is read."""
    with Store.open(store_path, create=True) as store, pytest.raises(InvalidInputError, match="rank"):
        store.load(rank=rank)  # type: ignore[arg-type]  # that is the point


def test_the_states_of_all_ranks_are_merged(store_path: Path) -> None:
    """Test mappings by key, sequences of one length by item, sharded tensors as a whole, and values of rank 0."""
    full = torch.randn(5, 3)
    with Store.open(store_path, create=True) as store:
        save_ranks(
            store,
            [
                {"w": _part(full, 0, 2), "step": 7, "items": [1, {"a": 1}], "short": [1], "only": {"zero": 0}},
                {
                    "w": _part(full, 2, 5),
                    "step": 8,
                    "items": [2, {"b": 2}],
                    "short": [1, 2],
                    "only": {"one": 1},
                    "z": 1,
                },
            ],
        )
        merged = {
            "w": full,
            "step": 7,
            "items": [1, {"a": 1, "b": 2}],
            "short": [1],
            "only": {"zero": 0, "one": 1},
            "z": 1,
        }
        assert_same(store.load(), merged)
        assert_same(store.load(tensors="w"), {"w": full})
        assert_same(store.load(tensors="only.one"), {"only": {"one": 1}})
        assert_same(store.load(tensors="z", into={"z": 0}, rank=0), {"z": 1})
        with pytest.raises(InvalidInputError, match=r"matches no name in the checkpoint; it has w, step"):
            store.load(tensors="nothing")
        with pytest.raises(InvalidInputError, match="matches no name"):
            store.load(tensors="nothing", into={"w": torch.zeros(5, 3)})
        assert store.restore().checkpoint.state_bytes == 60


def test_tensors_of_other_ranks_are_found_by_name(store_path: Path) -> None:
    """Test pipeline stages: a rank may read tensors of another rank, in containers and in modules."""
    stages = [torch.nn.Sequential(), torch.nn.Sequential()]
    for number, stage in enumerate(stages):
        stage.add_module(f"layer{number}", torch.nn.Linear(3, 3))
        stage.register_buffer("count", torch.tensor(number))
    with Store.open(store_path, create=True) as store:
        save_ranks(store, [{"model": stage, "stage": number} for number, stage in enumerate(stages)])
        layer = torch.zeros(3, 3)
        store.load(into={"model": {"layer1.weight": layer}}, rank=0)
        assert torch.equal(layer, stages[1].layer1.weight)

        model = torch.nn.Sequential()
        model.add_module("layer0", torch.nn.Linear(3, 3))
        model.add_module("layer1", torch.nn.Linear(3, 3))
        model.register_buffer("count", torch.tensor(-1))
        store.load(into={"model": model})
        assert torch.equal(model.layer0.weight, stages[0].layer0.weight)
        assert torch.equal(model.layer1.bias, stages[1].layer1.bias)
        assert model.count == 0

        stage = torch.nn.Sequential()
        stage.add_module("layer1", torch.nn.Linear(3, 3))
        store.load(into={"model": stage}, rank=0)
        assert torch.equal(stage.layer1.weight, stages[1].layer1.weight)

        unknown = torch.nn.Sequential()
        unknown.add_module("layer2", torch.nn.Linear(3, 3))
        with pytest.raises(StateMismatchError, match=re.escape("model.layer2.weight: is not in the checkpoint")):
            store.load(into={"model": unknown})


def test_missing_parts_are_named_before_anything_is_written(store_path: Path) -> None:
    """Test the tensor and the range, and that smaller requests succeed."""
    full = torch.randn(6, 2)
    with Store.open(store_path, create=True) as store:
        save_ranks(store, [{"a": torch.ones(2), "w": _part(full, 0, 2)}, {"a": torch.ones(2), "w": _part(full, 3, 6)}])
        into = {"a": torch.zeros(2), "w": torch.zeros(6, 2)}
        with pytest.raises(StateMismatchError, match=r"w: \[2:3, 0:2\] of \[6, 2\] is in none of the parts"):
            store.load(into=into)
        assert not into["a"].any()
        with pytest.raises(StateMismatchError, match=r"tensor w is incomplete in the checkpoint: \[2:3, 0:2\]"):
            store.load()
        there = _part(torch.zeros(6, 2), 3, 5)
        store.load(into={"w": there})
        assert torch.equal(there.local, full[3:5])


@pytest.mark.parametrize("older", [True, False])
def test_a_checkpoint_that_lacks_parts_is_not_blamed_on_the_state(store_path: Path, *, older: bool) -> None:
    """Test that the error names ranks that can restore it, and an older step, which is not restored instead."""
    full = torch.randn(8, 2)
    with Store.open(store_path, create=True) as store:
        if older:
            save_ranks(store, [{"w": _part(full, 0, 4)}, {"w": _part(full, 4, 8)}], step=1)
        parts = [{"w": _part(full, 0, 4)}, {"w": _part(full, 4, 7)}]
        save_ranks(store, parts, step=2)
        whole = {"w": torch.zeros(8, 2)}
        ways: list[Callable[[], object]] = [
            store.load,
            lambda: store.load(into=whole),
            Checkpointer(store, whole, ranks=None, every=1, keep=None).restore,
        ]
        for way in ways:
            with pytest.raises(StateMismatchError, match="none of the parts that 2 ranks saved") as caught:
                way()
            assert "has only the shards that its 2 ranks saved; as many ranks can" in str(caught.value)
            assert ("or ask for an older step, such as step=1" in str(caught.value)) == older
            assert "the given state does not fit" not in str(caught.value)
        assert not whole["w"].any()
        with pytest.raises(
            StateMismatchError, match=r"the given state does not fit(.|\n)*as many ranks can restore them"
        ):
            store.load(into={**whole, "other": torch.zeros(1)})
        for rank, part in enumerate(parts):
            own = _part(torch.zeros(8, 2), 4 * rank, 4 + 3 * rank)
            store.load(into={"w": own}, rank=rank)
            assert torch.equal(own.local, part["w"].local)


def test_single_rank_checkpoint_is_readable_by_rank(store_path: Path) -> None:
    """Test that it is like any other checkpoint."""
    full = torch.randn(4, 2)
    with Store.open(store_path, create=True) as store:
        store.save({"w": _part(full, 1, 3)}, step=0)
        found = store.load(rank=0)
        assert isinstance(found, dict)
        assert found["w"].box == _part(full, 1, 3).box
        assert torch.equal(found["w"].local, full[1:3])
        with pytest.raises(StateMismatchError, match="pass rank= to read the shard of one rank"):
            store.load()


def test_a_shard_that_fits_nowhere_is_refused(store_path: Path) -> None:
    """Test another shape, another dtype, a box beyond its whole, and a value that is no tensor."""
    with Store.open(store_path, create=True) as store:
        save_ranks(store, [{"w": shard, "n": 1} for shard in cut_in_grid(torch.zeros(4, 2), [[2], []])])
        for given, problem in [
            (TensorShard(torch.zeros(2, 2), (5, 2), (0, 0)), "float32 [5, 2] is given, but float32 [4, 2] is stored"),
            (TensorShard(torch.zeros(2, 2).half(), (4, 2), (0, 0)), "float16 [4, 2] is given, but float32 [4, 2]"),
            (TensorShard(torch.zeros(2, 2), (4, 2), (3, 0)), "[3:5, 0:2] of [4, 2] is not inside"),
            (torch.zeros(2, 2), "float32 [2, 2] is given, but float32 [4, 2] is stored"),
        ]:
            with pytest.raises(StateMismatchError, match=re.escape(problem)):
                store.load(into={"w": given}, rank=1)
        with pytest.raises(StateMismatchError, match="a tensor is given, but int is stored"):
            store.load(into={"n": TensorShard(torch.zeros(1), (1,), (0,))})


def test_a_name_that_stands_for_several_tensors_is_read_by_place(store_path: Path) -> None:
    """Test the saving rank, whose own tensors are complete; for other ranks the shards are ambiguous."""
    one, other = torch.randn(4), torch.randn(4)

    def state(first: int, last: int) -> dict[str, object]:
        return {"a": {"b": _part(one, first, last)}, "a.b": _part(other, first, last)}

    def empty(first: int, last: int) -> dict[str, object]:
        zero = torch.zeros(4)
        return {"a": {"b": _part(zero, first, last)}, "a.b": _part(zero, first, last)}

    with Store.open(store_path, create=True) as store:
        save_ranks(store, [state(0, 2), state(2, 4)])
        for rank, (first, last) in enumerate([(0, 2), (2, 4)]):
            into = empty(first, last)
            store.load(into=into, rank=rank)
            nested, dotted = into["a"], into["a.b"]
            assert isinstance(nested, dict)
            assert isinstance(dotted, TensorShard)
            assert torch.equal(nested["b"].local, one[first:last])
            assert torch.equal(dotted.local, other[first:last])
        less = {"a": {"b": _part(torch.zeros(4), 3, 4)}}
        store.load(into=less, rank=1)
        assert torch.equal(less["a"]["b"].local, one[3:4])
        with pytest.raises(StateMismatchError, match=r"the name a\.b is used for several tensors of one rank"):
            store.load(into=empty(0, 4))


def test_tied_tensors_are_found_by_any_of_their_names(store_path: Path) -> None:
    """Test a tensor that only one rank ties."""
    full = torch.randn(4, 2)
    first, second = _part(full, 0, 2), _part(full, 2, 4)
    with Store.open(store_path, create=True) as store:
        save_ranks(store, [{"a": first, "b": first}, {"b": second}])
        merged = store.load()
        assert isinstance(merged, dict)
        assert torch.equal(merged["a"], full)
        assert merged["a"] is merged["b"]


def test_rank_reads_only_its_needs(store_path: Path) -> None:
    """Test that a replicated tensor is read once, and a shard from the ranks that have it, by needed partitions."""
    full = torch.arange(16 * 1024, dtype=torch.float32).reshape(16, 1024)
    common = torch.randn(2048)
    with Store.open(store_path, config=SMALL, create=True) as store:
        save_ranks(store, [{"w": shard, "same": common.clone()} for shard in cut_in_grid(full, [[4, 8, 12], []])])
        shard = _part(torch.zeros_like(full), 3, 6)
        with frames_read() as seen:
            store.load(into={"w": shard}, rank=1)
        assert torch.equal(shard.local, full[3:6])
        assert seen.lengths == [4096] * 3
        same = torch.zeros(2048)
        with frames_read() as seen:
            store.load(into={"same": same}, rank=3)
        assert seen.total_bytes == 8192
        column = TensorShard(torch.zeros(16, 1), (16, 1024), (0, 1000))
        with frames_read() as seen:
            store.load(into={"w": column})
        assert torch.equal(column.local, full[:, 1000:1001])
        assert seen.count == 16


def _damage(store: Store, step: int, rank: int) -> str:
    """Flip a bit in the first partition of a tensor of one rank; return the name."""
    _, tensors = store.tensors(step)
    tensor = next(one for one in tensors if one.rank == rank and one.partitions)
    place = tensor.partitions[0]
    path = store.path / "packs" / f"{place.pack}.pack"
    with contextlib.closing(store.resources.nvme.open_pack(PackId(bytes.fromhex(str(place.pack))))) as pack:
        entry = pack.entries[place.frame]
        offset = int(entry["offset"]) + 4096
    flip(path, 8 * offset)
    return tensor.name


def _states(step: int) -> list[dict[str, object]]:
    full = torch.randn(8, 32 * 1024)
    return [{"w": shard, "step": step} for shard in cut_in_grid(full, [[4], []])]


def test_damage_of_one_rank_makes_the_older_checkpoint_the_newest(store_path: Path) -> None:
    """Test that the reason names tensor and rank; a fill in place lists overwritten tensors."""
    with Store.open(store_path, create=True) as store:
        for step in (1, 2):
            save_ranks(store, _states(step), step)
        name = _damage(store, 2, 1)
        with pytest.warns(SkippedCheckpointWarning, match=f"needed by tensor {name} of rank 1"):
            merged = store.load()
        assert isinstance(merged, dict)
        assert merged["step"] == 1
        # A rank that does not need the damaged shard gets no warning.
        assert store.load(2, into=_states(0)[0], rank=0)["step"] == 2  # type: ignore[index]  # a mapping, as given
        with pytest.raises(PartialRestoreError, match="restore step 1"):
            store.load(into={"w": torch.zeros(8, 32 * 1024)})
        into = {"w": torch.zeros(8, 32 * 1024), "step": 0}
        restored = store.restore(into=into, fall_back=True)
        assert restored.checkpoint.step == into["step"] == 1


def test_a_checkpoint_without_one_ranks_manifest_is_passed_over(store_path: Path) -> None:
    """Test every reading rank."""
    with Store.open(store_path, create=True) as store:
        for step in (1, 2):
            save_ranks(store, _states(step), step)
        newest = store.checkpoints()[-1]
        (folder,) = (store.path / "manifests" / "default").glob(f"*-{newest.save_id}")
        next(folder.glob("00001-of-00002-*")).unlink()
        for rank in (None, 0, 1):
            with pytest.warns(SkippedCheckpointWarning, match="the manifest of rank 1 is missing"):
                assert store.load(rank=rank)["step"] == 1  # type: ignore[index]  # a mapping, as saved
        with pytest.raises(InconsistentCheckpointError, match="the manifest of rank 1 is missing"):
            store.load(2, rank=0)


def test_parts_that_make_up_no_whole_are_found(store_path: Path) -> None:
    """Test that only the saving ranks get their shards back; under another name, the tensor may be whole."""
    with Store.open(store_path, config=SMALL, create=True) as store:
        full = torch.arange(12.0).reshape(4, 3)
        sound = [{"w": TensorShard(full[i : i + 2].clone(), (4, 3), (i, 0)), "own": torch.ones(i + 1)} for i in (0, 2)]
        save_ranks(store, sound, 1)
        # One rank has the whole tensor, or the other rank uses another name for its shard.
        save_ranks(store, [{"w": full}, {"w": TensorShard(full[:2], (4, 3), (0, 0))}], 2)
        tied = TensorShard(full[2:], (4, 3), (2, 0))
        save_ranks(store, [{"w": TensorShard(full[:2], (4, 3), (0, 0))}, {"v": tied, "w": tied}], 3)
        assert store.verify() == []
        broken = [{"w": TensorShard(full[:2] + rank, (4, 3), (0, 0)), "x": full} for rank in range(2)]
        save_ranks(store, broken, 4)
        (finding,) = store.verify()
        assert (finding.kind, finding.severity, finding.tensors) == ("partial-tensor", Severity.WARNING, ("w",))
        assert "tensor w " in finding.message
        assert "[2:4, 0:3] of [4, 3]" in finding.message
        assert store.verify(3) == []
        with pytest.raises(StateMismatchError):
            store.load(4)


def test_checkpoint_deleted_during_a_read_is_not_blamed(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the shard of one rank is not reported as an incomplete tensor."""
    full = torch.arange(12.0).reshape(4, 3)
    with (
        Store.open(store_path, config=SMALL, create=True) as store,
        Store.open(store_path, config=SMALL, create=True) as other,
    ):
        save_ranks(store, [{"w": _part(full, 0, 2)}, {"w": _part(full, 2, 4)}], 1)
        manifests = store.resources.tier.manifests
        read, seen = manifests.read, []

        def read_and_delete(run: str, ref: CheckpointRef, name: ManifestName) -> Manifest:
            if len(seen) == 1:
                other.delete(1)
            seen.append(name)
            return read(run, ref, name)

        monkeypatch.setattr(manifests, "read", read_and_delete)
        kinds = {finding.kind for finding in store.verify()}
        assert len(seen) > 1
        assert kinds <= {"no-checkpoint"}
