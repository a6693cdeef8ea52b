"""Test any layout to any other: saved shards are read as other shards, bit for bit."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from asymcheck import Store, StoreConfig, TensorShard
from asymcheck.commit.save_request import new_save_id
from asymcheck.errors import StateMismatchError, UnsupportedValueError
from asymcheck.state.boxes import Box
from asymcheck.state.shards import locals_of, shard_of
from tests.reshard.ranks import as_rank, cut_in_grid, distributed, local_of, save_rank, save_ranks
from tests.store.equality import tensor_bytes

# Partitions so small that they begin and end within rows.
SMALL = StoreConfig(partition_bytes=4096, bundle_below_bytes=4096, inline_bytes=64, inline_total_bytes=1 << 20)

DTYPES = st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128])


def _numbered(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in which no two of some hundred elements are equal."""
    return torch.arange(math.prod(shape)).reshape(tuple(shape)).to(dtype)


@st.composite
def cuts(draw: st.DrawFn, shape: Sequence[int]) -> list[list[int]]:
    """Return a few positions at which each dimension is split."""
    return [draw(st.lists(st.integers(0, size), max_size=2)) for size in shape]


@pytest.mark.slow
@settings(max_examples=20)
@given(data=st.data(), dtype=DTYPES, large=st.booleans())
def test_parts_of_any_grid_are_read_as_those_of_any_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: torch.dtype, large: bool
) -> None:
    """Test uneven and empty shards, in place, in strided memory, and as a whole."""
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    shape = [size * 11 for size in shape] if large else shape
    full = _numbered(shape, dtype)
    saved = cut_in_grid(full, data.draw(cuts(shape)))
    wanted = cut_in_grid(torch.zeros_like(full), data.draw(cuts(shape)))
    if full.ndim and data.draw(st.booleans()):
        wanted = [TensorShard(_strided(one.local), one.global_shape, one.offset) for one in wanted]
    with Store.open(tmp_path_factory.mktemp("store"), config=SMALL, create=True) as store:
        save_ranks(store, [{"w": shard, "rank": rank} for rank, shard in enumerate(saved)])
        for rank, shard in enumerate(wanted):
            state = store.load(into={"w": shard, "rank": None}, rank=rank)
            assert state == {"w": shard, "rank": rank % len(saved)}
            part = full[tuple(slice(a, a + n) for a, n in zip(shard.offset, shard.local.shape, strict=True))]
            assert tensor_bytes(shard.local) == tensor_bytes(part)
        merged = store.load()
        assert isinstance(merged, dict)
        assert tensor_bytes(merged["w"]) == tensor_bytes(full)
        assert (merged["w"].shape, merged["rank"]) == (full.shape, 0)
        for rank, shard in enumerate(saved):
            own = store.load(rank=rank)
            assert isinstance(own, dict)
            assert _same_part(own["w"], shard)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]


def _same_part(found: object, shard: TensorShard) -> bool:
    if tuple(shard.local.shape) == shard.global_shape:
        return isinstance(found, torch.Tensor) and tensor_bytes(found) == tensor_bytes(shard.local)
    return (
        isinstance(found, TensorShard)
        and found.box == shard.box
        and tensor_bytes(found.local) == tensor_bytes(shard.local)
    )


MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1), (3, 2)]


@st.composite
def layouts(draw: st.DrawFn, dims: int) -> tuple[tuple[int, ...], list[Placement]]:
    """Return a mesh and placements for data, fully sharded and tensor parallelism."""
    mesh = draw(st.sampled_from(MESHES))
    shards = st.integers(0, dims - 1).map(Shard)
    if len(mesh) == 2 and draw(st.booleans()):
        # FSDP2 over tensor parallelism of the same dimension: split by the second dimension of the mesh first.
        dim = draw(st.integers(0, dims - 1))
        return mesh, [_StridedShard(dim, split_factor=mesh[1]), Shard(dim)]
    return mesh, [draw(st.one_of(st.just(Replicate()), shards)) for _ in mesh]


@pytest.mark.slow
@settings(max_examples=20)
@given(data=st.data(), dtype=DTYPES)
def test_dtensors_of_any_mesh_are_read_on_any_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: torch.dtype
) -> None:
    """Test the local shard of each rank in place, with sizes that the number of ranks does not divide."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    full = _numbered(shape, dtype)
    mesh, placements = data.draw(layouts(len(shape)))
    other, others = data.draw(layouts(len(shape)))
    with Store.open(tmp_path_factory.mktemp("store"), config=SMALL, create=True) as store:
        if not _save(store, full, mesh, placements):
            return
        for rank in range(math.prod(other)):
            with as_rank(rank, math.prod(other)):
                given_ = distributed(torch.zeros_like(full), other, others, rank)
                local = given_.to_local()
                if not _is_box(given_):
                    with pytest.raises(StateMismatchError, match="is no box"):
                        store.load(into={"w": given_}, rank=rank)
                    continue
                assert store.load(into={"w": given_}, rank=rank) == {"w": given_}
            place = [int(index) for index in torch.unravel_index(torch.tensor(rank), other)]
            assert tensor_bytes(local) == tensor_bytes(local_of(full, other, others, place))
        plain = torch.zeros_like(full)
        store.load(into={"w": plain})
        assert tensor_bytes(plain) == tensor_bytes(full)


def _is_box(part: DTensor) -> bool:
    try:
        shard_of(part, "x")
    except UnsupportedValueError:
        return False
    return True


def _save(store: Store, full: torch.Tensor, mesh: tuple[int, ...], placements: list[Placement]) -> bool:
    save_id = new_save_id()
    for rank in range(math.prod(mesh)):
        with as_rank(rank, math.prod(mesh)):
            try:
                save_rank(store, {"w": distributed(full, mesh, placements, rank)}, 0, rank, math.prod(mesh), save_id)
            except UnsupportedValueError:
                return False
    return True


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
@pytest.mark.parametrize("wanted", [1, 2, 3, 4])
def test_fully_sharded_state_moves_to_any_number_of_ranks(tmp_path: Path, saved: int, wanted: int) -> None:
    """Test 7 rows, one row, and a tensor that is whole on all ranks."""
    state = {"rows": torch.randn(7, 5), "one": torch.randn(1), "scalar": torch.tensor(3.0)}

    def held(rank: int, world_size: int, full: dict[str, torch.Tensor]) -> dict[str, object]:
        sharded = {name: distributed(full[name], (world_size,), [Shard(0)], rank) for name in ("rows", "one")}
        return {**sharded, "scalar": full["scalar"].clone()}

    with Store.open(tmp_path / "store", create=True) as store:
        save_id = new_save_id()
        for rank in range(saved):
            with as_rank(rank, saved):
                save_rank(store, held(rank, saved, state), 5, rank, saved, save_id)
        for rank in range(wanted):
            with as_rank(rank, wanted):
                found = held(rank, wanted, {name: torch.full_like(value, -1.0) for name, value in state.items()})
                restored = store.restore(into=found, rank=rank)
                expected = held(rank, wanted, state)
                for name, value in found.items():
                    local, right = (
                        one.to_local() if isinstance(one, DTensor) else one for one in (value, expected[name])
                    )
                    assert isinstance(local, torch.Tensor)
                    assert isinstance(right, torch.Tensor)
                    assert torch.equal(local, right)
                assert (restored.checkpoint.world_size, restored.checkpoint.step) == (saved, 5)


def test_rows_that_do_not_follow_each_other_are_refused() -> None:
    """Test two of eight rows that are not contiguous, which are no box, although their number is right."""
    with as_rank(0, 4):
        part = distributed(torch.arange(8), (2, 2), [_StridedShard(0, split_factor=2), Replicate()], 0)
        assert part.to_local().tolist() == [0, 1, 4, 5]
        with pytest.raises(
            UnsupportedValueError, match=r"cannot store state at x: .* \[8\] on this rank is not contiguous"
        ):
            shard_of(part, "x")


def test_shard_of_a_dtensor_matches_torch() -> None:
    """Test also two mesh dimensions that split one dimension; other shards are refused."""
    seen = 0
    for rows, (mesh, splits) in itertools.product(range(1, 13), [((2, 2), 2), ((3, 2), 2), ((2, 3), 3)]):
        full = torch.arange(rows)
        for rank in range(math.prod(mesh)):
            with as_rank(rank, math.prod(mesh)):
                part = distributed(full, mesh, [_StridedShard(0, split_factor=splits), Shard(0)], rank)
                if not _is_box(part):
                    continue
                shard = shard_of(part, "x")
                seen += 1
                first, count = shard.offset[0], shard.local.shape[0]
                assert shard.local.tolist() == full[first : first + count].tolist()
    assert seen > 100


@pytest.mark.parametrize("shape", [(4,), (4, 6), (2, 0, 3)])
def test_a_rank_outside_the_mesh_of_a_tensor_has_an_empty_part(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Test that the empty shard has as many dimensions as the tensor, is saved, and is read again."""
    full = _numbered(shape, torch.float32)
    save_id = new_save_id()
    with Store.open(tmp_path / "store", config=SMALL, create=True) as store:
        for rank in range(2):
            with as_rank(rank, 2):
                state = {"w": _on_first_rank(torch.zeros_like(full) if rank else full)}
                save_rank(store, state, 0, rank, 2, save_id)
                assert store.load(into=state, rank=rank) == state if rank else True
        plain = torch.zeros_like(full)
        store.load(into={"w": plain})
        assert tensor_bytes(plain) == tensor_bytes(full)


Class = type[torch.optim.Adam | torch.optim.Adagrad]


def _experts(
    ranks: Sequence[int], optimizer_class: Class = torch.optim.Adam
) -> tuple[torch.nn.ParameterList, torch.optim.Optimizer]:
    """Return parameters, each on one rank and trained for as many steps as its number, and their optimizer."""
    # torch would reuse the mesh of another rank if the names were equal.
    names = (f"rank{dist.get_rank()}",)
    meshes = [DeviceMesh("cpu", [rank], mesh_dim_names=names, _init_backend=False) for rank in ranks]
    experts = torch.nn.ParameterList(zeros(3, device_mesh=mesh, placements=[Replicate()]) for mesh in meshes)
    optimizer = optimizer_class(experts.parameters())
    for number, (mesh, expert) in enumerate(zip(meshes, experts, strict=True)):
        for _ in range(number if mesh.get_coordinate() is not None else 0):
            expert.grad = DTensor.from_local(torch.full((3,), 1.0 + number), mesh, [Replicate()], run_check=False)
            optimizer.step()
        expert.grad = None
    return experts, optimizer


def _moments(experts: torch.nn.ParameterList, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, list[float]]]:
    """Return the state of each parameter that has one."""
    return {
        number: {key: locals_of([value])[0].tolist() for key, value in optimizer.state[expert].items()}
        for number, expert in enumerate(experts)
        if expert in optimizer.state
    }


@pytest.mark.parametrize(
    ("saved", "world_size", "ranks"),
    [
        ((1, 0, 1), 3, (2, 0, 0)),
        ((1, 0, 1), 3, (1, 2, 0)),
        ((1, 0, 1), 3, (0, 1, 0)),
        ((1, 0, 1), 3, None),
        ((1, 0, 1), 2, (0, 1, 1)),
        ((1, 1, 1), 2, (0, 0, 0)),
        ((1, 0, 1), 2, (1, 0, 1)),
        ((1, 0, 1), 2, None),
    ],
)
@pytest.mark.parametrize("names", [("experts", "optimizer"), ("optimizer", "experts")])
@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.Adagrad])
def test_moments_move_with_parameters_on_a_part_of_the_ranks(
    tmp_path: Path,
    saved: Sequence[int],
    world_size: int,
    ranks: Sequence[int] | None,
    names: Sequence[str],
    optimizer_class: Class,
) -> None:
    """Test that each rank gets the state of its parameters, and no other; None is for plain parameters.

    Adagrad also has state, with outdated counters, on the other ranks.
    """
    with Store.open(tmp_path / "store", create=True) as store:
        save_id = new_save_id()
        for rank in range(2):
            with as_rank(rank, 2):
                objects = dict(zip(("experts", "optimizer"), _experts(saved, optimizer_class), strict=True))
                save_rank(store, {name: objects[name] for name in names}, 0, rank, 2, save_id)
        for rank in range(world_size):
            with as_rank(rank, world_size):
                trained = _moments(*_experts([rank] * 3, optimizer_class))
                experts = _experts(ranks)[0] if ranks else torch.nn.ParameterList(torch.zeros(3) for _ in range(3))
                optimizer = optimizer_class(experts.parameters())
                objects = {"experts": experts, "optimizer": optimizer}
                into = {name: objects[name] for name in names}
                store.restore(into=into, rank=rank, grows=True, world_size=world_size)
                here = [number for number in trained if not ranks or ranks[number] == rank]
                assert _moments(experts, optimizer) == {number: trained[number] for number in here}


@pytest.mark.parametrize("names", [("experts", "optimizer"), ("optimizer", "experts")])
def test_ranks_with_separate_experts_of_one_name_keep_their_moments(tmp_path: Path, names: Sequence[str]) -> None:
    """Test an expert that its rank has not trained yet: it gets no moments of another expert with the same name."""
    with Store.open(tmp_path / "store", create=True) as store:
        save_id = new_save_id()
        for rank in range(2):
            with as_rank(rank, 2):
                experts, optimizer = _experts([rank] * 3)
                if rank == 1:
                    optimizer.state.pop(experts[2])
                save_rank(store, {"experts": experts, "optimizer": optimizer}, 0, rank, 2, save_id)
        for rank in range(2):
            with as_rank(rank, 2):
                experts = _experts([rank] * 3)[0]
                optimizer = torch.optim.Adam(experts.parameters())
                objects = {"experts": experts, "optimizer": optimizer}
                store.restore(into={name: objects[name] for name in names}, rank=rank, grows=True, world_size=2)
                assert sorted(_moments(experts, optimizer)) == ([1] if rank else [1, 2])


def test_pipeline_stages_with_empty_shards_restore_their_own_moments(tmp_path: Path) -> None:
    """Test a parameter without moments, whose shard is empty on the second rank of each stage."""

    def stage(rank: int) -> tuple[torch.nn.ParameterDict, torch.optim.Optimizer]:
        number = rank // 2
        mesh = DeviceMesh("cpu", [2 * number, 2 * number + 1], mesh_dim_names=(f"rank{rank}",), _init_backend=False)
        layers = torch.nn.ParameterDict({f"stage{number}": zeros(1, device_mesh=mesh, placements=[Shard(0)])})
        return layers, torch.optim.Adam(layers.parameters())

    with Store.open(tmp_path / "store", create=True) as store:
        save_id = new_save_id()
        for rank in range(4):
            with as_rank(rank, 4):
                layers, optimizer = stage(rank)
                if rank >= 2:
                    layers["stage1"].grad = torch.ones_like(layers["stage1"])
                    optimizer.step()
                save_rank(store, {"layers": layers, "optimizer": optimizer}, 0, rank, 4, save_id)
        for rank in range(4):
            with as_rank(rank, 4):
                layers, optimizer = stage(rank)
                store.restore(into={"layers": layers, "optimizer": optimizer}, rank=rank, grows=True, world_size=4)
                assert len(optimizer.state) == rank // 2


def test_scalars_of_an_optimizer_keep_their_dtype_beside_an_empty_shard(tmp_path: Path) -> None:
    """Test NAdam with a parameter of bfloat16, whose scalars of float32 torch converts to bfloat16."""

    def layer(rank: int) -> tuple[torch.nn.ParameterList, torch.optim.Optimizer]:
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=(f"rank{rank}",), _init_backend=False)
        part = zeros(1, dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(0)])
        parameters = torch.nn.ParameterList([part])
        return parameters, torch.optim.NAdam(parameters)

    products = []
    with Store.open(tmp_path / "store", create=True) as store:
        save_id = new_save_id()
        for rank in range(2):
            with as_rank(rank, 2):
                parameters, optimizer = layer(rank)
                parameters[0].grad = torch.ones_like(parameters[0])
                optimizer.step()
                products.append(optimizer.state[parameters[0]]["mu_product"])
                save_rank(store, {"parameters": parameters, "optimizer": optimizer}, 0, rank, 2, save_id)
        for rank in range(2):
            with as_rank(rank, 2):
                parameters, optimizer = layer(rank)
                store.load(into={"parameters": parameters, "optimizer": optimizer}, rank=rank)
                restored = optimizer.state[parameters[0]]["mu_product"]
                assert (restored.dtype, restored) == (torch.float32, products[rank])


def test_a_scalar_on_a_mesh_without_this_rank_is_refused() -> None:
    """Test a scalar, which cannot be empty."""
    with as_rank(1, 2), pytest.raises(UnsupportedValueError, match=r"x: .*this rank is not in the mesh"):
        shard_of(_on_first_rank(torch.zeros(())), "x")


def test_a_box_that_is_none_has_a_name() -> None:
    """Test the name of an invalid box in an error."""
    assert str(Box((4, 6), (0, 0), (0,))) == "shape [0] at [0, 0] of [4, 6]"


def _on_first_rank(full: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", [0], _init_backend=False)
    part = zeros(full.shape, dtype=full.dtype, device_mesh=mesh, placements=[Replicate()])
    if mesh.get_coordinate() is not None:
        part.to_local().copy_(full)
    return part
