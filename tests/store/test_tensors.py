"""Test that tensors of every dtype and layout are restored bit for bit, as dense tensors."""

import numpy as np
import pytest
import torch

from asymcheck import Store, StoreConfig
from asymcheck.format.registry import DTYPE_BYTES
from tests.store.equality import assert_same, tensor_bytes

# torch warns when a complex32 tensor is created.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [name for name in DTYPE_BYTES if hasattr(torch, name)]
RANDOM = np.random.default_rng(7)


def _bytes_of(name: str, count: int) -> bytes:
    """Return every possible bit pattern in random order; a bool has only two."""
    raw = RANDOM.integers(0, 2 if name == "bool" else 256, count * DTYPE_BYTES[name], dtype=np.uint8)
    return raw.tobytes()


def _tensor(name: str, raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, name))


@pytest.mark.parametrize("count", [1, 33, 5_000, 1_000_003], ids=["inline", "odd", "bundled", "partitioned"])
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_keeps_every_bit(store: Store, name: str, count: int) -> None:
    """Test NaN payloads, denormals and signed zeros, with sizes for each way of storing."""
    raw = _bytes_of(name, count)
    store.save({"x": _tensor(name, raw)}, step=1)
    loaded = store.load()
    assert isinstance(loaded, dict)
    assert loaded["x"].dtype == getattr(torch, name)
    assert tuple(loaded["x"].shape) == (count,)
    assert loaded["x"].view(torch.uint8).numpy().tobytes() == raw


def test_every_dtype_of_the_format_that_torch_has_was_tried() -> None:
    """Test that a dtype that is added to the registry is tested, too."""
    assert {"bfloat16", "float8_e4m3fn", "float8_e5m2", "complex32", "uint16", "uint32", "uint64"} <= set(DTYPES)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_can_be_0_dimensional_or_empty(store: Store, name: str) -> None:
    """Test that shapes without elements keep their other dimensions."""
    one = _tensor(name, _bytes_of(name, 1))
    state = {
        "scalar": one.reshape(()),
        "empty": torch.empty(0, dtype=one.dtype),
        "empty matrix": torch.empty(3, 0, 2, dtype=one.dtype),
        "ones": one.reshape(1, 1, 1, 1),
    }
    store.save(state, step=1)
    assert_same(store.load(), state)


def _layouts() -> dict[str, torch.Tensor]:
    plain = torch.arange(2 * 3 * 8 * 10, dtype=torch.float32).reshape(2, 3, 8, 10)
    large = torch.arange(300_000, dtype=torch.int64).reshape(500, 600)
    numbers = torch.complex(torch.randn(40, 50), torch.randn(40, 50))
    numbers[0, 0] = complex(-0.0, 0.0)
    return {
        "transposed": plain.transpose(0, 3),
        "large and transposed": large.t(),
        "large and strided": large[::3, 5::7],
        "strided": plain[:, :, ::3, 1::4],
        "with an offset": plain[1:, 1:, 3:],
        "expanded": plain[:, :1, :1].expand(2, 5, 6, 10),
        "expanded from a number": torch.tensor(3.0).expand(100, 100),
        "channels last": plain.to(memory_format=torch.channels_last),
        "channels last 3d": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "overlapping windows": torch.arange(2_000.0).unfold(0, 100, 1),
        "conjugate": numbers.conj(),
        "conjugate transpose": numbers.mH,
        "negative": numbers.conj().imag,
        "real part": numbers.real,
        "diagonal": large.diagonal(),
        "reversed": plain.flip(0).rot90(),
        "row of a matrix": large[3],
        "one of every three": torch.arange(3.0)[::3],
        "a column of one row": large[:1, 5],
        "one element of a large stride": plain[1:, 2:, 7:, 9:],
        "column of a matrix": large[:, 3],
        "with a gradient": torch.randn(10, requires_grad=True),
        "in a graph": torch.randn(10, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.randn(3, 4).t()),
        "buffer": torch.nn.Buffer(torch.randn(3)) if hasattr(torch.nn, "Buffer") else torch.randn(3),
    }


@pytest.mark.parametrize("name", _layouts())
def test_every_layout_keeps_its_values(store: Store, name: str) -> None:
    """Test that strides are not stored: a dense tensor with equal values is restored."""
    tensor = _layouts()[name]
    before = tensor_bytes(tensor)
    store.save({"x": tensor}, step=1)
    loaded = store.load()
    assert isinstance(loaded, dict)
    assert_same(loaded["x"], tensor)
    assert loaded["x"].is_contiguous()
    assert not loaded["x"].requires_grad
    assert tensor_bytes(tensor) == before


def test_tensors_of_inference_mode_can_be_saved_and_loaded(store: Store) -> None:
    """Test tensors of evaluation code."""
    with torch.inference_mode():
        state = {"x": torch.randn(2000), "y": torch.randn(3, 4).t()}
        store.save(state, step=1)
        assert_same(store.load(), state)


def test_loaded_tensors_are_the_callers_own(store: Store) -> None:
    """Test that writing to a loaded tensor changes neither a second load nor the source."""
    source = torch.zeros(2_000_000)
    store.save({"x": source, "inline": torch.zeros(3)}, step=1)
    first, second = store.load(), store.load()
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    for name in ("x", "inline"):
        first[name].fill_(7)
        assert second[name].count_nonzero() == 0
    assert source.count_nonzero() == 0


@pytest.mark.parametrize("shape", [(1,) * 64, (2,) * 12, (0,) * 64], ids=["64 ones", "12 twos", "64 zeros"])
def test_many_dimensions(store: Store, shape: tuple[int, ...]) -> None:
    """Test 64 dimensions, the maximum of torch and the format."""
    state = {"x": torch.ones(shape)}
    store.save(state, step=1)
    assert_same(store.load(), state)


@pytest.mark.parametrize(
    "size", [1, 4095, 4096, 4097, 65_535, 65_536, 65_537, 8 << 20, (8 << 20) + 1, (16 << 20) + 4095]
)
def test_sizes_around_every_boundary(store: Store, size: int) -> None:
    """Test sizes on both sides of each limit: inline, header block, aligned payload, one and several partitions."""
    state = {"x": torch.from_numpy(RANDOM.integers(0, 256, size, dtype=np.uint8))}
    store.save(state, step=1)
    assert_same(store.load(), state)


@pytest.mark.slow(quick=["a pack for each frame"])
@pytest.mark.parametrize(
    "config",
    [
        StoreConfig(partition_bytes=4096, bundle_below_bytes=0, inline_bytes=0),
        StoreConfig(partition_bytes=4096, bundle_below_bytes=4096, inline_bytes=4096, inline_total_bytes=5000),
        StoreConfig(partition_bytes=1 << 30, bundle_below_bytes=1 << 30, inline_bytes=0),
        StoreConfig(slots=1, pack_bytes=1),
        StoreConfig(slots=32, partition_bytes=65_536, bundle_below_bytes=1024, pack_bytes=1 << 20),
    ],
    ids=["tiny pieces", "tiny bundles", "one bundle", "a pack for each frame", "many threads"],
)
def test_every_configuration_stores_the_same_state(store: Store, store_path: object, config: StoreConfig) -> None:
    """Test that a reader with other settings gets the same state."""
    layouts = _layouts()
    state = {"a": layouts, "b": [torch.zeros(size, dtype=torch.uint8) for size in (0, 1, 4096, 70_000)], "c": 1}
    with Store.open(store.path, config=config, create=True) as writer:
        writer.save(state, step=1)
    assert_same(store.load(), state)


@pytest.mark.slow
def test_reader_with_small_partitions_reads_large_ones(store: Store) -> None:
    """Test also the reverse: the reader follows the stored partitions."""
    state = {"x": torch.from_numpy(RANDOM.integers(0, 256, 70 << 20, dtype=np.uint8))}
    large = StoreConfig(partition_bytes=64 << 20, slots=2)
    small = StoreConfig(partition_bytes=4096, bundle_below_bytes=4096, slots=1)
    with Store.open(store.path, config=large, create=True) as writer:
        writer.save(state, step=1)
    for config in (small, large):
        with Store.open(store.path, config=config, create=True) as reader:
            assert_same(reader.load(), state)
            assert reader.verify() == []


@pytest.mark.slow
def test_twenty_thousand_tensors(store: Store) -> None:
    """Test that small tensors share partitions: many rows and names, few partitions."""
    values = torch.arange(20_000, dtype=torch.int64)
    # Tensors of at most 1 KiB would be stored in the manifest.
    state = {"model": {f"layer.{i}.weight": torch.full((129,), i) for i in range(20_000)}}
    store.save(state, step=1)
    loaded = store.load()
    assert isinstance(loaded, dict)
    assert list(loaded["model"]) == list(state["model"])
    assert torch.equal(torch.stack(list(loaded["model"].values())), values[:, None].expand(-1, 129))
    assert len(list((store.path / "packs").iterdir())) == 1
