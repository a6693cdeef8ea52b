"""Test that the numbers of the format are consistent."""

import torch

from asymcheck.format import registry
from asymcheck.state.numpy_dtypes import NUMPY_DTYPES


def test_supported_numbers_have_names() -> None:
    """Test that every supported number is registered."""
    assert set(registry.FRAME_KINDS) >= registry.SUPPORTED_KINDS
    assert set(registry.CODECS) >= registry.SUPPORTED_CODECS
    assert set(registry.DIGESTS) >= registry.SUPPORTED_DIGESTS
    assert {registry.PACK_LIVE, registry.PACK_FREED} == set(registry.PACK_STATES)


def test_names_are_distinct() -> None:
    """Test that no name has two numbers."""
    for names in (registry.FRAME_KINDS, registry.CODECS, registry.DIGESTS, registry.PACK_STATES):
        assert len(set(names.values())) == len(names)


def test_numbers_fit_their_fields() -> None:
    """Test that kinds, codecs and digests fit into one byte."""
    numbers = [*registry.FRAME_KINDS, *registry.CODECS, *registry.DIGESTS, *registry.PACK_STATES]
    assert all(0 <= number < 256 for number in numbers)


def test_magics_have_eight_bytes_and_differ() -> None:
    """Test that every structure has a distinct magic."""
    magics = {registry.FRAME_MAGIC, registry.PACK_MAGIC, registry.PACK_INDEX_MAGIC}
    assert {len(magic) for magic in magics} == {8}
    assert len(magics) == 3


def test_limits_leave_room_for_each_other() -> None:
    """Test that a partition may grow by encoding, names are as wide as their limits, and blocks are powers of two."""
    assert registry.PARTITION_BYTES_MAX < registry.FRAME_STORED_BYTES_MAX < 1 << 32
    assert registry.INLINE_BYTES_MAX <= registry.BLOCK_BYTES
    assert registry.RECORD_JSON_BYTES_MAX + 1 + 32 + 1 + 1 <= registry.BLOCK_BYTES
    assert len(str(registry.STEP_MAX)) == 12
    assert len(str(registry.GENERATION_MAX)) == 8
    assert len(str(registry.WORLD_SIZE_MAX)) == 5
    assert registry.BLOCK_BYTES & (registry.BLOCK_BYTES - 1) == 0


def test_dtypes_have_the_sizes_of_torch_and_numpy() -> None:
    """Test the size of an element for each dtype that torch or numpy has."""
    for name, size in registry.DTYPE_BYTES.items():
        dtype = getattr(torch, name, None)
        if isinstance(dtype, torch.dtype):
            assert dtype.itemsize == size
    assert {name: dtype.itemsize for name, dtype in NUMPY_DTYPES.items()}.items() <= registry.DTYPE_BYTES.items()
