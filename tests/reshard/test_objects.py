"""Test that modules and optimizers with distributed tensors receive shards of the same kind."""

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from asymcheck import Store, TensorShard
from asymcheck.commit.save_request import new_save_id
from asymcheck.errors import StateDifferenceWarning, StateMismatchError
from tests.reshard.ranks import as_rank, distributed, save_rank, save_ranks

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw in groups": lambda parameters: torch.optim.AdamW([{"params": [one]} for one in parameters], lr=0.1),
}
SHAPES = {"weight": (7, 3), "bias": (5,), "scale": (1,)}


class Model(torch.nn.Module):
    """A model with parameters sharded by row, and a replicated one."""

    def __init__(self, values: dict[str, torch.Tensor], rank: int, world_size: int) -> None:
        super().__init__()
        self.plain = torch.nn.Parameter(values["plain"].clone())
        for name in SHAPES:
            placement = Replicate() if name == "scale" else Shard(0)
            part = distributed(values[name], (world_size,), [placement], rank) if world_size else values[name].clone()
            setattr(self, name, torch.nn.Parameter(part))
        self.register_buffer("count", values["count"].clone())


def _values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {**SHAPES, "plain": (2, 2), "count": (3,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _stepped(kind: str, model: Model, steps: int) -> torch.optim.Optimizer:
    """Return an optimizer after some steps with gradients that follow from the values."""
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5 + 1.0
        optimizer.step()
    return optimizer


def _full(kind: str, steps: int) -> tuple[Model, torch.optim.Optimizer]:
    """Return the state of one process, because elementwise optimizers treat shards and whole tensors alike."""
    model = Model(_values(0), 0, 0)
    return model, _stepped(kind, model, steps)


def _save(store: Store, kind: str, world_size: int) -> None:
    save_id = new_save_id()
    for rank in range(world_size):
        with as_rank(rank, world_size):
            model = Model(_values(0), rank, world_size)
            optimizer = _stepped(kind, model, 3)
            save_rank(store, {"model": model, "optimizer": optimizer}, 3, rank, world_size, save_id)


def _assert_part(value: torch.Tensor, full: torch.Tensor, rank: int, world_size: int) -> None:
    if isinstance(value, DTensor):
        rows = full.chunk(world_size, 0) if value.placements[0].is_shard() else [full] * world_size
        expected = rows[rank] if rank < len(rows) else full[:0]
        value = value.to_local()
    else:
        expected = full
    assert torch.equal(value, expected)


@pytest.mark.slow(quick=["1-4-False-adamw in groups"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(("saved", "wanted"), [(4, 4), (4, 2), (2, 3), (3, 1), (1, 4)])
def test_training_goes_on_at_another_number_of_ranks(
    store_path: Path, kind: str, fresh: bool, saved: int, wanted: int
) -> None:
    """Test a new optimizer without state, and one with state; the next step is equal."""
    full, full_optimizer = _full(kind, 4)
    with Store.open(store_path, create=True) as store:
        _save(store, kind, saved)
        for rank in range(wanted):
            with as_rank(rank, wanted):
                model = Model(_values(1), rank, wanted)
                optimizer = _stepped(kind, model, 0 if fresh else 1)
                locals_ = {name: one.to_local() for name, one in model.named_parameters() if isinstance(one, DTensor)}
                store.load(into={"model": model, "optimizer": optimizer}, rank=rank)
                for name, local in locals_.items():
                    assert model.get_parameter(name).to_local().data_ptr() == local.data_ptr()
                for parameter in model.parameters():
                    parameter.grad = parameter.detach() * 0.5 + 1.0
                optimizer.step()
                for name, parameter in full.named_parameters():
                    mine = model.get_parameter(name)
                    _assert_part(mine.detach(), parameter.detach(), rank, wanted)
                    for key, value in full_optimizer.state[parameter].items():
                        found = optimizer.state[mine][key]
                        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                            assert type(found) is type(mine.detach())
                        _assert_part(found, value, rank, wanted)
                assert torch.equal(model.count, _values(0)["count"])


def test_shards_of_another_dtype_are_converted(store_path: Path) -> None:
    """Test that a module with distributed tensors accepts another dtype with a warning, as a plain module does."""
    full, full_optimizer = _full("adamw", 3)
    with Store.open(store_path, create=True) as store:
        _save(store, "adamw", 3)
        for rank in range(2):
            with as_rank(rank, 2):
                model = Model(_values(1), rank, 2).bfloat16()
                optimizer = _stepped("adamw", model, 0)
                with pytest.warns(StateDifferenceWarning, match="converted from float32 to bfloat16"):
                    store.load(into={"model": model, "optimizer": optimizer}, rank=rank)
                for name, parameter in full.named_parameters():
                    mine, moment = model.get_parameter(name), full_optimizer.state[parameter]["exp_avg"]
                    _assert_part(mine.detach(), parameter.detach().bfloat16(), rank, 2)
                    _assert_part(optimizer.state[mine]["exp_avg"], moment.bfloat16(), rank, 2)


def test_optimizer_state_of_offloaded_shards_stays_in_host_memory(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test shards in host memory on a mesh of GPUs, as with the CPU offload of FSDP2. The mesh is simulated."""
    full, full_optimizer = _full("adamw", 3)
    with Store.open(store_path, create=True) as store:
        _save(store, "adamw", 2)
        with as_rank(0, 2):
            model = Model(_values(1), 0, 2)
            optimizer = _stepped("adamw", model, 0)
            with monkeypatch.context() as offloading:
                # Without a GPU, any move of a tensor to the device of the mesh is an error.
                offloading.setattr(DeviceMesh, "device_type", "cuda")
                store.load(into={"model": model, "optimizer": optimizer}, rank=0)
            for name, parameter in full.named_parameters():
                for key, value in full_optimizer.state[parameter].items():
                    found = optimizer.state[model.get_parameter(name)][key]
                    _assert_part(found, value, 0, 2)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_many_ranks_are_merged_for_one_process(store_path: Path, kind: str) -> None:
    """Test plain tensors, in a module and in an optimizer."""
    full, full_optimizer = _full(kind, 3)
    with Store.open(store_path, create=True) as store:
        _save(store, kind, 3)
        for fresh in (True, False):
            model = Model(_values(1), 0, 0)
            optimizer = _stepped(kind, model, 0 if fresh else 1)
            store.load(into={"model": model, "optimizer": optimizer})
            for name, parameter in full.named_parameters():
                mine = model.get_parameter(name)
                assert torch.equal(mine, parameter)
                for key, value in full_optimizer.state[parameter].items():
                    assert torch.equal(optimizer.state[mine][key], value)


def test_one_process_is_split_for_many_ranks(store_path: Path) -> None:
    """Test the reverse direction."""
    full, full_optimizer = _full("adamw", 3)
    with Store.open(store_path, create=True) as store:
        store.save({"model": full, "optimizer": full_optimizer}, step=3)
        for rank in range(3):
            with as_rank(rank, 3):
                model = Model(_values(1), rank, 3)
                optimizer = _stepped("adamw", model, 0)
                store.load(into={"model": model, "optimizer": optimizer}, rank=rank)
                for name, parameter in full.named_parameters():
                    mine = model.get_parameter(name)
                    _assert_part(mine.detach(), parameter.detach(), rank, 3)
                    for key, value in full_optimizer.state[parameter].items():
                        _assert_part(optimizer.state[mine][key], value, rank, 3)


def test_a_module_of_another_shape_is_refused(store_path: Path) -> None:
    """Test that the whole shape is compared before a byte is written."""
    with Store.open(store_path, create=True) as store:
        _save(store, "sgd", 2)
        with as_rank(0, 2):
            values = {**_values(1), "weight": torch.randn(8, 3)}
            model = Model(values, 0, 2)
            before = model.bias.to_local().clone()
            with pytest.raises(StateMismatchError, match=r"model.weight: .*\[8, 3\] is given, but float32 \[7, 3\]"):
                store.load(into={"model": model}, rank=0)
            assert torch.equal(model.bias.to_local(), before)


class Holder:
    """An object with its own kind of state."""

    def __init__(self, value: object) -> None:
        self.value = value
        self.loaded: object = None

    def state_dict(self) -> dict[str, object]:
        """Return the state."""
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Keep the types of the state."""
        self.loaded = state_dict["value"]


def test_objects_receive_their_own_kind(store_path: Path) -> None:
    """Test that a shard is filled in place, and that a whole tensor is created without a target."""
    full = torch.randn(4, 2)
    with Store.open(store_path, create=True) as store:
        save_ranks(store, [{"x": Holder(TensorShard(full[i : i + 1].clone(), (4, 2), (i, 0)))} for i in range(4)])
        shard = TensorShard(torch.zeros(2, 2), (4, 2), (1, 0))
        holder = Holder(shard)
        store.load(into={"x": holder}, rank=1)
        assert holder.loaded is shard
        assert torch.equal(shard.local, full[1:3])
        empty = Holder(None)
        store.load(into={"x": empty}, rank=1)
        assert torch.equal(empty.loaded, full)  # type: ignore[arg-type]  # a tensor, as stored
