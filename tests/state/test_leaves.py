"""Test leaves: bytes of a tensor in row-major order, for any strides and offset."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.errors import UnsupportedValueError
from asymcheck.format.digest import digest
from asymcheck.state import leaves
from asymcheck.state.leaves import Leaf, digest_pieces, flat_bytes, identity_key, make_leaf, whole_bytes
from asymcheck.state.partition_plan import Piece

PLAIN = torch.arange(60, dtype=torch.int32).reshape(3, 4, 5)

VIEWS = {
    "contiguous": PLAIN,
    "transposed": PLAIN.transpose(0, 2),
    "permuted": PLAIN.permute(1, 2, 0),
    "strided": PLAIN[:, ::2, 1::3],
    "expanded": PLAIN[:1].expand(7, 4, 5),
    "channels last": torch.arange(120, dtype=torch.int16).reshape(1, 2, 6, 10).to(memory_format=torch.channels_last),
    "0-d": torch.tensor(-7, dtype=torch.int64),
    "empty": torch.empty(3, 0, 2),
    "one element": PLAIN[1:2, 2, 3],
    "offset": torch.arange(10, dtype=torch.uint8)[3:],
}


@pytest.mark.parametrize("name", VIEWS)
def test_bytes_are_in_row_major_order(name: str) -> None:
    """Test that a view has the same bytes as a new tensor with equal values."""
    view = VIEWS[name]
    expected = np.array(view.tolist(), dtype=view.numpy().dtype).tobytes()
    assert flat_bytes(view).numpy().tobytes() == expected


@pytest.mark.parametrize("name", VIEWS)
def test_some_bytes_are_those_of_the_tensor(name: str) -> None:
    """Test whole tensors and ranges of any layout, also of lazy negatives."""
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert turned.is_neg()
    for source in (VIEWS[name], VIEWS[name].float(), turned):
        leaf, whole = make_leaf(source, "x", ""), flat_bytes(source).numpy().tobytes()
        assert leaf.some_bytes(0, leaf.nbytes) == whole
        half = leaf.nbytes // 2
        assert leaf.some_bytes(half, leaf.nbytes - half) == whole[half:]


def test_the_bytes_of_many_tensors_are_those_of_each() -> None:
    """Test equal and different tensors in any order, with signs and gradients."""
    whole = torch.tensor([1 + 2j, 3 - 4j])
    sources = [
        *(source for view in VIEWS.values() for source in (view, view.float(), view.bfloat16(), view.numpy())),
        *(whole.conj().imag, whole.imag, whole.conj(), torch.nn.Parameter(torch.rand(4)), torch.rand(4)),
        *(torch.tensor(float(number)) for number in range(5)),
        *(torch.tensor([True, False]), torch.rand(2).to(torch.float8_e4m3fn)),
    ]
    leaves = [make_leaf(source, "x", "") for source in (*sources, *reversed(sources))]
    assert whole_bytes(leaves) == [leaf.some_bytes(0, leaf.nbytes) for leaf in leaves]
    assert whole_bytes([]) == []


@pytest.mark.parametrize("name", VIEWS)
def test_contiguous_bytes_are_views(name: str) -> None:
    """Test that later changes are visible, and None if a copy is needed."""
    view = VIEWS[name]
    for source in (view, view.numpy()):
        in_place = make_leaf(source, "x", "").bytes_in_place(0, view.nbytes)
        if view.is_contiguous():
            assert in_place is not None
            assert bytes(in_place) == flat_bytes(view).numpy().tobytes()
            assert not in_place or np.frombuffer(in_place, dtype=np.uint8).ctypes.data == view.data_ptr()
        else:
            assert in_place is None
    assert make_leaf(torch.tensor([1j]).conj(), "x", "").bytes_in_place(0, 8) is None
    unwritable = np.arange(3)
    unwritable.flags.writeable = False
    assert make_leaf(unwritable, "x", "").bytes_in_place(0, 24) is None


def test_conj_and_neg_views_have_the_bytes_of_their_values() -> None:
    """Test lazy conjugates and negatives, whose memory has other numbers."""
    numbers = torch.tensor([1 + 2j, -0.0 - 3j, complex("inf") + 0j], dtype=torch.complex64)
    assert numbers.conj().is_conj()
    assert flat_bytes(numbers.conj()).numpy().tobytes() == numbers.numpy().conj().tobytes()
    for count in (3, 1):
        negative = numbers[:count].conj().imag
        assert negative.is_neg()
        assert flat_bytes(negative).numpy().tobytes() == (-numbers[:count].numpy().imag).tobytes()


def test_strided_tensors_of_dtypes_that_torch_cannot_copy_have_bytes() -> None:
    """Test dtypes of half a byte, of which torch has views and no copies."""
    numbers = torch.arange(200 * 300, dtype=torch.int32).to(torch.uint8).reshape(200, 300)
    strided = numbers.view(torch.float4_e2m1fn_x2).t()
    assert flat_bytes(strided).equal(numbers.t().contiguous().flatten())


@given(st.sampled_from(sorted(VIEWS)), st.data())
def test_any_range_of_bytes_can_be_copied(name: str, data: st.DataObject) -> None:
    """Test ranges that begin or end inside of elements."""
    leaf = make_leaf(VIEWS[name], "x", "")
    whole = flat_bytes(VIEWS[name]).numpy().tobytes()
    start = data.draw(st.integers(0, leaf.nbytes))
    length = data.draw(st.integers(0, leaf.nbytes - start))
    target = bytearray(length)
    if length:
        leaf.copy_bytes(start, memoryview(target))
    assert bytes(target) == whole[start : start + length]
    leaf.release()


def test_threads_copy_parts_of_one_strided_tensor_together() -> None:
    """Test that the contiguous copy is made once, by any thread, and that all parts are correct."""
    values = torch.arange(1 << 16, dtype=torch.int64).reshape(256, 256).t()
    leaf = make_leaf(values, "x", "")
    target = bytearray(leaf.nbytes)
    view = memoryview(target)
    step = leaf.nbytes // 8
    threads = [
        threading.Thread(target=leaf.copy_bytes, args=(start, view[start : start + step]))
        for start in range(0, leaf.nbytes, step)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bytes(target) == values.numpy().tobytes()


def test_the_contiguous_copy_is_forgotten_on_release() -> None:
    """Test that a strided tensor only uses memory while it is written."""
    leaf = make_leaf(PLAIN.transpose(0, 2), "x", "")
    leaf.copy_bytes(0, memoryview(bytearray(4)))
    assert leaf._flat is not None
    leaf.release()
    assert leaf._flat is None


def _array(name: str) -> np.ndarray:
    plain = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    fixed = plain.copy()
    fixed.flags.writeable = False
    return {
        "C order": plain,
        "Fortran order": np.asfortranarray(plain),
        "reversed": plain[::-1, :, ::-1],
        "read-only": fixed,
        "0-d": np.array(2.5),
        "empty": np.empty((0, 3)),
        "field of records": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i1"), ("b", "<f8")])["b"],
    }[name]


@pytest.mark.parametrize(
    "name", ["C order", "Fortran order", "reversed", "read-only", "0-d", "empty", "field of records"]
)
def test_arrays_of_any_order_have_row_major_bytes(name: str) -> None:
    """Test that the bytes equal tobytes(), also for arrays that torch cannot wrap."""
    array = _array(name)
    leaf = make_leaf(array, "x", "")
    assert flat_bytes(array).numpy().tobytes() == array.tobytes()
    assert (leaf.nbytes, leaf.shape) == (len(array.tobytes()), array.shape)


def test_leaves_describe_tensors() -> None:
    """Test dtype, shape and size, and the role, which follows from the name."""
    leaf = make_leaf(torch.zeros(3, 2, dtype=torch.bfloat16), "optimizer.state.0.exp_avg", "optimizer")
    assert (leaf.dtype, leaf.shape, leaf.nbytes, leaf.group, leaf.role) == (
        "bfloat16",
        (3, 2),
        12,
        "optimizer",
        "first_moment",
    )
    assert isinstance(leaf, Leaf)


def test_identity_is_the_same_view_of_the_same_memory() -> None:
    """Test that shape, strides, dtype and laziness distinguish views of the same memory."""
    base = torch.arange(6.0)
    square = base[:4].view(2, 2)
    same = [base, base.detach(), torch.nn.Parameter(base), base.view(6)]
    other = [
        base[:5],
        base.view(2, 3),
        base.view(3, 2),
        base.view(torch.int32),
        base[1:],
        base.clone(),
        square,
        square.t(),
    ]
    keys = [identity_key(tensor) for tensor in same]
    assert len(set(keys)) == 1
    assert len({*keys, *(identity_key(tensor) for tensor in other)}) == 1 + len(other)
    numbers = torch.zeros(2, dtype=torch.complex64)
    assert identity_key(numbers) != identity_key(numbers.conj())


def test_a_leaf_that_has_no_bytes_names_its_path() -> None:
    """Test the path in the attribute and in the text of the error."""
    with pytest.raises(UnsupportedValueError, match=r"model\.w") as caught:
        make_leaf(torch.empty(2, device="meta"), "model.w", "model")
    assert caught.value.path == "model.w"


def test_several_threads_find_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that each piece is digested once, in place or from a copy, for any number of threads."""
    tensors = [*VIEWS.values(), np.arange(500.0)]
    described = [make_leaf(tensor, str(row), "") for row, tensor in enumerate(tensors)]
    pieces = [Piece(row, leaf.nbytes // 3, leaf.nbytes // 2) for row, leaf in enumerate(described)]
    expected = [digest(described[piece.row].some_bytes(piece.start, piece.length)) for piece in pieces]
    for share in (1, 500, 1 << 30):
        monkeypatch.setattr(leaves, "_BYTES_FOR_A_THREAD", share)
        assert digest_pieces(pieces, described) == expected
    assert digest_pieces([], described) == []
