"""Test catalog entries: a checksum binds them to their keys, and invalid ones count as absent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.format import catalog_records
from asymcheck.format.digest import sum8
from asymcheck.format.layout import ManifestName
from asymcheck.types import CheckpointRef, Digest, Location, Owner, PackId, SaveId

ids = st.binary(min_size=16, max_size=16)
numbers = st.integers(0, (1 << 64) - 1)
small = st.integers(0, 255)
locations = st.builds(Location, ids.map(PackId), numbers, numbers, numbers, small, small, small, ids)
owners = st.builds(Owner, numbers, numbers, st.text(max_size=36), st.text(max_size=20))


@given(ids, locations)
def test_locations_go_round(key: bytes, at: Location) -> None:
    """Test that the location of a partition is read as it was written, in 72 bytes."""
    value = catalog_records.encode_location(key, at)
    assert len(value) == catalog_records.PARTITION.size == 72
    assert catalog_records.decode_location(key, value) == at


@given(ids, st.sampled_from([1, 2]), numbers, numbers)
def test_pack_states_go_round(key: bytes, state: int, count: int, length: int) -> None:
    """Test that the state of a pack is read as it was written, in 32 bytes."""
    value = catalog_records.encode_pack_entry(key, state, count, length)
    assert len(value) == catalog_records.PACK.size == 32
    assert catalog_records.decode_pack_state(key, value) == state


@given(ids.map(SaveId), st.integers(0, 99999), owners, st.lists(ids.map(PackId), max_size=5))
def test_pins_go_round(save_id: SaveId, rank: int, owner: Owner, packs: list[PackId]) -> None:
    """Test that a pin lists its owner and packs, in order of their ids."""
    key = catalog_records.pin_key(save_id, rank)
    assert len(key) == 20
    assert catalog_records.decode_pin(key, catalog_records.encode_pin(key, owner, packs)) == (owner, sorted(packs))


@pytest.mark.parametrize("kind", ["location", "pack", "pin", "plain"])
def test_every_changed_byte_makes_an_entry_absent(kind: str) -> None:
    """Test that an entry with any changed byte of value or key never reads as another entry."""
    key = bytes(range(20)) if kind == "pin" else bytes(range(16))
    at, owner = Location(PackId(bytes(16)), 4096, 300, 300), Owner(1, 2, "boot", "namespace")
    value = {
        "location": catalog_records.encode_location(key, at),
        "pack": catalog_records.encode_pack_entry(key, 1, 2, 3),
        "pin": catalog_records.encode_pin(key, owner, [PackId(bytes(16))]),
        "plain": catalog_records.seal(key, b"body"),
    }[kind]
    read = {
        "location": catalog_records.decode_location,
        "pack": catalog_records.decode_pack_state,
        "pin": catalog_records.decode_pin,
        "plain": catalog_records.unseal,
    }[kind]
    assert read(key, value) is not None
    for offset in range(len(value)):
        changed = bytearray(value)
        changed[offset] ^= 4
        assert read(key, bytes(changed)) is None
        assert read(key, value[:offset]) is None
    for offset in range(len(key)):
        other = bytearray(key)
        other[offset] ^= 4
        assert read(bytes(other), value) is None
    assert read(key, value + b"\0") is None


@pytest.mark.parametrize("offset", range(59, 64))
def test_reserved_bytes_of_a_location_invalidate_it(offset: int) -> None:
    """Test non-zero reserved bytes, which may have a meaning in a later version."""
    key = bytes(16)
    body = bytearray(catalog_records.encode_location(key, Location(PackId(bytes(16)), 4096, 300, 300))[:-8])
    body[offset] = 1
    assert catalog_records.decode_location(key, bytes(body) + sum8(key + bytes(body))) is None


@pytest.mark.parametrize("offset", range(1, 8))
def test_reserved_bytes_of_a_pack_entry_invalidate_it(offset: int) -> None:
    """Test non-zero reserved bytes of the entry of a pack."""
    key = bytes(16)
    body = bytearray(catalog_records.encode_pack_entry(key, 1, 2, 3)[:-8])
    body[offset] = 1
    assert catalog_records.decode_pack_state(key, bytes(body) + sum8(key + bytes(body))) is None


_OWNER = '{"boot_id":"b","pid":1,"pid_namespace":"n","start_ticks":2}'
_PIN = f'{{"owner":{_OWNER},"packs":["{"00" * 16}"]}}'


_DEEP = "[" * 100_000 + "]" * 100_000
_OTHER_PINS = {
    "spaces": _PIN.replace(",", ", "),
    "packs twice": _PIN[:-1] + ',"packs":[]}',
    "pid twice": _PIN.replace('"pid":1', '"pid":1,"pid":2'),
    "an escape that is not needed": _PIN.replace('"b"', '"\\u0062"'),
    "packs by name": f'{{"owner":{_OWNER},"packs":{{"{"00" * 16}":0}}}}',
    "packs in a string": f'{{"owner":{_OWNER},"packs":""}}',
    "no packs": f'{{"owner":{_OWNER}}}',
    "no owner": '{"packs":[]}',
    "no object": "[]",
    "only depth": _DEEP,
    "depth under a further key": f'{{"more":{_DEEP},{_PIN[1:]}',
}


@pytest.mark.parametrize("text", _OTHER_PINS.values(), ids=_OTHER_PINS)
def test_another_text_than_is_written_is_no_pin(text: str) -> None:
    """Test that a pin must be canonical JSON with the documented keys."""
    key = catalog_records.pin_key(SaveId(bytes(16)), 0)
    assert catalog_records.decode_pin(key, catalog_records.seal(key, _PIN.encode())) == (
        Owner(1, 2, "b", "n"),
        [PackId(bytes(16))],
    )
    assert catalog_records.decode_pin(key, catalog_records.seal(key, text.encode())) is None


def test_a_pin_may_have_further_keys() -> None:
    """Test that keys of later versions are ignored."""
    key = catalog_records.pin_key(SaveId(bytes(16)), 0)
    assert catalog_records.decode_pin(key, catalog_records.seal(key, b'{"more":[],' + _PIN[1:].encode())) is not None


@given(st.binary(max_size=60))
def test_any_sealed_bytes_are_a_pin_or_absent(body: bytes) -> None:
    """Test that random bytes with a valid checksum are a pin or absent."""
    assert catalog_records.decode_pin(b"key", catalog_records.seal(b"key", body)) is None


def test_the_key_of_a_manifest_is_its_path() -> None:
    """Test that the key is the path below the folder of manifests."""
    ref, name = CheckpointRef(2, 30, SaveId(bytes(16))), ManifestName(0, 1, Digest(b"\xab" * 16))
    key = catalog_records.manifest_key("run", ref, name)
    assert key == f"run/00000002-000000000030-{'0' * 32}/00000-of-00001-{'ab' * 16}.manifest".encode()
    assert len(catalog_records.manifest_key("r" * 64, ref, name)) < 511
