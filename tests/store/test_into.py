"""Test restores in place: the same objects and memory, with the stored values."""

from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.errors import (
    InvalidInputError,
    StateDifferenceWarning,
    StateMismatchError,
    StorageError,
    UnsupportedValueError,
)
from tests.store.equality import assert_same, tensor_bytes


def _filled(store: Store, stored: torch.Tensor, target: torch.Tensor) -> None:
    """Save one tensor, fill another of the same shape from it, and check the values."""
    store.save({"x": stored}, step=1)
    address, strides = target.data_ptr(), target.stride()
    into = {"x": target}
    assert store.load(into=into) is into
    assert into["x"] is target
    assert (target.data_ptr(), target.stride()) == (address, strides)
    assert tensor_bytes(target) == tensor_bytes(stored)


SHAPE = (2, 6, 50, 40)
TARGETS = {
    "contiguous": torch.empty(SHAPE),
    "channels last": torch.empty(SHAPE).to(memory_format=torch.channels_last),
    "transposed": torch.empty(SHAPE[::-1]).permute(3, 2, 1, 0),
    "strided": torch.empty(2, 6, 100, 120)[:, :, ::2, ::3],
    "window": torch.empty(4, 8, 60, 60)[1:3, 2:, 5:55, 10:50],
    "contiguous part": torch.empty(5, 6, 50, 40)[2:4],
    "negative": torch.empty(SHAPE, dtype=torch.complex64).conj().imag,
    "parameter": torch.nn.Parameter(torch.empty(SHAPE)),
    "in use by autograd": torch.empty(SHAPE, requires_grad=True),
}


@pytest.mark.parametrize("name", TARGETS)
def test_tensors_of_any_layout_are_filled_in_place(store: Store, name: str) -> None:
    """Test that memory and strides stay, also of a strided tensor."""
    values = torch.randn(SHAPE)
    values[0, 0, 0, :2] = torch.tensor([-0.0, float("nan")])
    _filled(store, values, TARGETS[name])


def test_only_the_elements_of_a_view_are_written(store: Store) -> None:
    """Test that memory between the elements of a strided target is not written."""
    base = torch.zeros(1000, 6)
    store.save({"x": torch.ones(1000, 2)}, step=1)
    store.load(into={"x": base[:, 1:4:2]})
    assert base.sum(0).tolist() == [0, 1000, 0, 1000, 0, 0]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.bool, torch.uint16, torch.float8_e5m2])
def test_strided_targets_of_other_dtypes(store: Store, dtype: torch.dtype) -> None:
    """Test that bits are copied, not converted numbers."""
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    stored = torch.randint(high, (3000 * size,), dtype=torch.uint8).view(dtype).reshape(60, 50)
    _filled(store, stored, torch.empty(50, 60, dtype=dtype).t())


def test_a_conjugate_target_means_the_stored_numbers(store: Store) -> None:
    """Test a conjugate tensor, whose memory then has the conjugates of the stored numbers."""
    numbers = torch.randn(3000, dtype=torch.complex128)
    _filled(store, numbers, torch.empty(3000, dtype=torch.complex128).conj())


@pytest.mark.parametrize("target", [torch.zeros(3)[::3], torch.zeros(3, 5)[:1, 2], torch.zeros(2, 3, 4)[1:, 2:, 3]])
def test_targets_of_one_element_may_have_any_stride(store: Store, target: torch.Tensor) -> None:
    """Test tensors that torch calls contiguous with any strides."""
    _filled(store, torch.full(target.shape, 7.0), target)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 1)], ids=str)
def test_the_smallest_targets(store: Store, shape: tuple[int, ...]) -> None:
    """Test scalars and empty tensors."""
    _filled(store, torch.ones(shape), torch.zeros(shape))


def _objects(state: dict[str, Any]) -> list[object]:
    """Return the containers and tensors of a state."""
    return [state["model"], state["model"]["w"], state["history"], *state["history"], state["pair"][0]]


def test_nested_states_keep_their_objects(store: Store) -> None:
    """Test that containers and tensors keep their identity, plain values are replaced, and other entries stay."""
    stored = {
        "model": OrderedDict(w=torch.randn(4000), b=torch.randn(3)),
        "history": [torch.randn(3000), {"best": 0.5}],
        "pair": (torch.randn(2000), "text"),
        "epoch": 7,
        "seed": 1,
    }
    store.save(stored, step=1)
    into: dict[str, Any] = {
        "epoch": 0,
        "model": OrderedDict(w=torch.zeros(4000)),
        "history": [torch.zeros(3000), {"best": 0.0}],
        "pair": (torch.zeros(2000), None),
    }
    objects = _objects(into)
    assert store.load(into=into) is into
    assert all(one is other for one, other in zip(objects, _objects(into), strict=True))
    assert list(into) == ["epoch", "model", "history", "pair"]
    assert_same(into["model"], OrderedDict(w=stored["model"]["w"]))  # type: ignore[index]  # a mapping, as written above
    assert_same([into["history"], into["pair"], into["epoch"]], [stored["history"], stored["pair"], 7])


def test_entries_of_a_mapping_get_their_stored_order(store: Store) -> None:
    """Test a cache whose oldest entry is the first one."""
    store.save({"cache": OrderedDict(b=torch.ones(2), a=1, c=2)}, step=1)
    cache: OrderedDict[str, object] = OrderedDict(a=0, c=0, b=torch.zeros(2))
    store.load(into={"cache": cache})
    assert_same(cache, OrderedDict(b=torch.ones(2), a=1, c=2))


@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_items_outside_of_a_selection_are_not_replaced(store: Store, kind: type) -> None:
    """Test plain values beside a selected tensor. They became None."""
    store.save({"x": kind([torch.ones(3), 5])}, step=1)
    into: dict[str, Any] = {"x": kind([torch.zeros(3), 7])}
    with pytest.raises(StateMismatchError, match=r"x\.1: is not in the checkpoint, or not in the selection 'x\.0'"):
        store.load(into=into, tensors="x.0")
    assert_same([*into["x"]], [torch.zeros(3), 7])


@pytest.mark.parametrize("kind", [list, deque])
def test_objects_in_a_sequence_are_not_replaced_by_their_state(store: Store, kind: type) -> None:
    """Test fewer modules than stored. Of the others, only the state is known."""
    store.save({"models": kind([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])}, step=1)
    state = {"models": kind([torch.nn.Linear(2, 2)])}
    with Checkpointer(store, state) as checkpointer, pytest.raises(StateMismatchError, match="append 1 before"):
        checkpointer.restore()


def test_a_missing_value_is_created(store: Store) -> None:
    """Test that a plain value in the place of a tensor or a container is replaced by the stored value."""
    store.save({"t": torch.arange(3000), "c": {"x": [torch.ones(2), 1]}, "n": np.arange(3)}, step=1)
    into: dict[str, object] = {"t": None, "c": None, "n": 0}
    store.load(into=into)
    assert_same(into, {"t": torch.arange(3000), "c": {"x": [torch.ones(2), 1]}, "n": np.arange(3)})


def test_a_whole_state_can_be_a_tensor_a_list_or_a_tuple(store: Store) -> None:
    """Test that the tensors of a tuple are filled, and that an equal tuple is returned."""
    stored = torch.randn(3000)
    target = torch.zeros(3000)
    store.save(stored, step=1)
    assert store.load(into=target) is target
    store.save([stored, 1], step=2)
    into: list[object] = [target.zero_(), 0]
    assert store.load(into=into) is into
    assert into[1] == 1
    store.save((stored, 1), step=3)
    filled = store.load(into=(target.zero_(), 0))
    assert filled == (target, 1)
    assert torch.equal(target, stored)


ARRAYS = {
    "C order": np.empty((30, 50)),
    "Fortran order": np.empty((30, 50), order="F"),
    "strided": np.empty((60, 150))[::2, ::3],
    "0-d": np.empty(()),
    "empty": np.empty((0, 3)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_filled_in_place(store: Store, name: str) -> None:
    """Test that the array keeps its identity and its order."""
    target = ARRAYS[name]
    stored = np.random.default_rng(1).random(target.shape)
    store.save({"x": stored}, step=1)
    into = {"x": target}
    store.load(into=into)
    assert into["x"] is target
    assert np.array_equal(target, stored)


def test_an_array_can_be_filled_from_a_tensor_and_a_tensor_from_an_array(store: Store) -> None:
    """Test that the given object decides its type, because only bytes are stored."""
    values = torch.arange(3000, dtype=torch.int32)
    store.save({"tensor": values, "array": values.numpy()}, step=1)
    array, tensor = np.zeros(3000, dtype=np.int32), torch.zeros(3000, dtype=torch.int32)
    store.load(into={"tensor": array, "array": tensor})
    assert np.array_equal(array, values.numpy())
    assert torch.equal(tensor, values)


def test_error_names_the_part_that_a_given_object_fits(store: Store) -> None:
    """Test a module that is given instead of a dict with the module, and a key with another name."""
    model = torch.nn.Linear(3, 2)
    store.save({"model": model, "step": 1}, step=1)
    with pytest.raises(StateMismatchError, match=r"fits 'model': give \{'model': …\}"):
        store.load(into=model)
    with pytest.raises(StateMismatchError, match="network: is not in the checkpoint; stored are model, step"):
        store.load(into={"network": model})


def test_default_device_of_the_program_takes_no_part(store: Store) -> None:
    """Test a small strided tensor, whose bytes are gathered first, with a default device that has no memory."""
    stored, target = torch.arange(6.0).reshape(2, 3), torch.zeros(3, 2).T
    store.save({"x": stored}, step=1)
    with torch.device("meta"):
        store.load(into={"x": target})
    assert torch.equal(target, stored)


def test_modules_on_the_meta_device_are_refused(store: Store) -> None:
    """Test that a model without memory, which torch loads in silence, does not seem to be restored."""
    store.save({"model": torch.nn.Linear(3, 2)}, step=1)
    model = torch.nn.Linear(3, 2, device="meta")
    with pytest.raises(StateMismatchError, match=r"model.weight: is on the meta device.*call to_empty\(device=…\)"):
        store.load(into={"model": model})
    store.load(into={"model": model.to_empty(device="cpu")})
    assert_same(model.state_dict(), store.load()["model"])


def test_arrays_and_tensors_of_the_same_memory_are_filled(store: Store) -> None:
    """Test a buffer that the state has as an array, as a view of the array, and as a tensor."""

    def state(memory: np.ndarray) -> dict[str, object]:
        return {"array": memory, "same": memory, "view": memory[:], "tensor": torch.from_numpy(memory)}

    for size in (5, 5000):
        values, memory = np.arange(1.0 * size), np.zeros(size)
        store.save(state(values), step=size)
        store.load(into=state(memory))
        assert_same(memory, values)


def test_strings_and_containers_in_the_state_of_an_optimizer_are_restored(store: Store) -> None:
    """Test strings, of which torch makes the text of a generator object, and limits of containers, which it drops."""
    model = torch.nn.Linear(3, 2)
    optimizer, fresh = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    values = {"kind": "bias", "recent": deque([torch.ones(1)], 3), "counts": defaultdict(int, x=1)}
    optimizer.state[model.bias].update(values)
    store.save({"optimizer": optimizer}, step=1)
    store.load(into={"optimizer": fresh})
    restored = fresh.state[model.bias]
    assert (restored["kind"], restored["recent"].maxlen, restored["counts"].default_factory) == ("bias", 3, int)
    assert_same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_fresh", [True, False])
def test_state_of_an_optimizer_keeps_its_dtypes(store: Store, dtype: torch.dtype, *, is_fresh: bool) -> None:
    """Test float32 factors of NAdam, a float32 master and a counter, to which torch gives the dtype of the weights."""
    torch.manual_seed(0)
    model, other = (torch.nn.Linear(30, 20, dtype=dtype) for _ in range(2))
    optimizer, fresh = (torch.optim.NAdam(part.parameters()) for part in (model, other))
    for part, taker in ((model, optimizer),) if is_fresh else ((model, optimizer), (other, fresh)):
        part(torch.ones(30, dtype=dtype)).sum().backward()
        taker.step()
        taker.state[part.weight]["nested"] = {"master": torch.rand(20, 30), "counts": [torch.tensor(16_777_217)]}
    store.save({"optimizer": optimizer, "model": model}, step=1)
    store.load(into={"optimizer": fresh, "model": other})
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_state_of_an_optimizer_follows_a_model_of_another_dtype(store: Store) -> None:
    """Test that torch converts the state with the weights. Otherwise, the next step would fail."""
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer, fresh = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    store.save({"model": model, "optimizer": optimizer}, step=1)
    with pytest.warns(StateDifferenceWarning, match="2 tensors are converted from float32 to bfloat16"):
        store.load(into={"model": other, "optimizer": fresh})
    assert fresh.state[other.weight]["exp_avg"].dtype == torch.bfloat16
    other(torch.ones(3, dtype=torch.bfloat16)).sum().backward()
    fresh.step()


@pytest.mark.parametrize("fused", [True, False])
def test_state_of_a_fresh_optimizer_has_the_strides_of_its_parameters(store: Store, *, fused: bool) -> None:
    """Test weights in channels_last. A fused optimizer on the CPU would pair elements of different positions."""

    def train(model: torch.nn.Conv2d, optimizer: torch.optim.Optimizer) -> None:
        model(torch.linspace(0, 1, 300).reshape(1, 3, 10, 10)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    models = [torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), fused=fused) for model in models]
    train(models[0], optimizers[0])
    store.save({"model": models[0], "optimizer": optimizers[0]}, step=1)
    store.load(into={"model": models[1], "optimizer": optimizers[1]})
    for model, optimizer in zip(models, optimizers, strict=True):
        assert optimizer.state[model.weight]["exp_avg"].stride() == model.weight.stride() == (27, 1, 9, 3)
        train(model, optimizer)
    assert_same(models[1].state_dict(), models[0].state_dict())
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_a_fresh_optimizer_takes_over_the_tensors_that_were_read(store: Store) -> None:
    """Test an optimizer without state: the load creates its moments, and does not copy them again."""
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 100)).sum().backward()
    optimizer.step()
    store.save({"optimizer": optimizer}, step=1)
    fresh = torch.optim.AdamW(model.parameters())
    store.load(into={"optimizer": fresh})
    assert_same(fresh.state_dict(), optimizer.state_dict())
    moments = [state[name] for state in fresh.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len({moment.data_ptr() for moment in moments}) == len(moments) == 4


def test_a_loaded_state_is_independent_of_the_store(store: Store) -> None:
    """Test that a second load returns the stored values after a change of the first."""
    model = torch.nn.Linear(50, 50)
    store.save({"model": model}, step=1)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(3):
        with torch.no_grad():
            model.weight.mul_(0)
        store.load(into={"model": model})
        assert_same(dict(model.state_dict()), expected)


def test_parameters_keep_their_autograd_properties(store: Store) -> None:
    """Test gradients, and leaves that require gradients."""
    model = torch.nn.Linear(50, 50)
    store.save({"model": model}, step=1)
    model(torch.randn(2, 50)).sum().backward()
    assert model.weight.grad is not None
    gradient = model.weight.grad.clone()
    store.load(into={"model": model})
    assert model.weight.is_leaf
    assert model.weight.requires_grad
    assert torch.equal(model.weight.grad, gradient)


def test_new_tensors_are_made_on_the_device_asked_for(store: Store) -> None:
    """Test that filled tensors stay on their device, and new tensors are created on `device`."""
    store.save({"x": torch.ones(3), "large": torch.ones(5000), "array": np.ones(3)}, step=1)
    for device in ("cpu", torch.device("cpu")):
        loaded = store.load(device=device)
        assert isinstance(loaded, dict)
        assert loaded["x"].device == loaded["large"].device == torch.device("cpu")
        assert isinstance(loaded["array"], np.ndarray)


@pytest.mark.parametrize("device", ["xpu", "hpu", "mps", "cuda:99", "meta"])
def test_missing_device_is_an_error_of_the_package(store: Store, device: str) -> None:
    """Test that the error is independent of the reaction of torch."""
    store.save({"x": torch.ones(3)}, step=1)
    with pytest.raises((InvalidInputError, StorageError), match=device):
        store.load(device=device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_state_round_trip(store: Store) -> None:
    """Test saves from the GPU, and loads and restores in place on both devices, also strided."""
    stored = {"x": torch.randn(3_000_000, device="cuda"), "t": torch.randn(40, 50, device="cuda").t(), "n": np.ones(3)}
    store.save(stored, step=1)
    assert_same(store.load(device="cuda"), stored)
    into = {"x": torch.zeros(3_000_000, device="cuda"), "t": torch.zeros(40, 50, device="cuda").t()}
    store.load(into=into)
    assert torch.equal(into["x"], stored["x"])  # type: ignore[arg-type]  # a tensor, as written above
    assert torch.equal(into["t"], stored["t"])  # type: ignore[arg-type]  # as above
    loaded = store.load()
    assert isinstance(loaded, dict)
    assert torch.equal(loaded["x"], into["x"].cpu())


def lazy_model() -> torch.nn.Module:
    """Return a module whose parameters have no shape before the first call."""
    return torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())


def test_a_lazy_model_that_was_not_called_yet_gets_its_shapes_back(store: Store) -> None:
    """Test that shapes are restored as by torch's own load_state_dict."""
    model, fresh = lazy_model(), lazy_model()
    model(torch.randn(4, 5))
    store.save({"model": model}, step=1)
    store.load(into={"model": fresh})
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert fresh.eval()(torch.ones(2, 5)).shape == (2, 3)
    with pytest.raises(StateMismatchError, match=r"model\.0\.weight: has no shape yet; give the module"):
        store.load(tensors="model.0.weight", into={"model": {"0.weight": lazy_model()[0].weight}})
    with pytest.raises(UnsupportedValueError, match=r"model\.0\.weight: the tensor has no shape yet; call its module"):
        store.save({"model": lazy_model()}, step=2)
