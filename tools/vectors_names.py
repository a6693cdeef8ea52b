"""Vectors of names (SPEC.md §A3, §B8) and of catalog entries (SPEC.md §B3.1)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asymcheck.format import catalog_records
from asymcheck.format.digest import sum8
from asymcheck.format.layout import ManifestName
from asymcheck.format.record import canonical_json
from asymcheck.types import Location, Owner
from tools.vectors_base import Vector, fixed_bytes, flipped, pack_id, partition_digest, patched, save_id, valid
from tools.vectors_manifest import REF

_PACK = pack_id("golden")
_DIGEST = partition_digest("small", 300)
_OWNER = Owner(4711, 123456, "01234567-89ab-cdef-0123-456789abcdef", "pid:[4026531836]")


def layout_vectors() -> Iterator[Vector]:
    """Yield names that follow the grammar, and names that do not (value null)."""

    def name(kind: str, text: str, value: object, why: str) -> Vector:
        label = "-".join(re.findall("[a-z0-9]+", why.lower()))
        return valid("layout", f"{kind}-{label}", text.encode(), why, value, kind=kind)

    digits = "0123456789abcdef" * 2
    for text, why in (
        ("gpt2-run1", "letters, digits and a hyphen"),
        ("0", "one digit"),
        ("A.b_c-" + "z" * 58, "64 characters"),
    ):
        yield name("run", text, {"run": text}, why)
    for text, why in (
        ("", "no characters"),
        ("z" * 65, "65 characters"),
        (".hidden", "a dot in front"),
        ("-x", "a hyphen in front"),
        ("run.tmp", "a temporary name"),
        ("a/b", "a slash"),
        ("a b", "a space"),
        ("k\u00e4se", "not ASCII"),
        ("a\n", "a line feed at the end"),
    ):
        yield name("run", text, None, why)
    yield name("pack", f"{digits}.pack", {"pack_id": digits}, "a complete pack")
    for text, why in (
        (f"{digits.upper()}.pack", "digits in upper case"),
        (f"{digits[:-1]}.pack", "31 digits"),
        (f"{digits}0.pack", "33 digits"),
        (f"{digits}.pack.tmp", "a temporary name"),
        (f"{digits}.pack\n", "a line feed at the end"),
        (f"{digits}.PACK", "an ending in upper case"),
        (f"{digits}.tmp", "a pack being written"),
    ):
        yield name("pack", text, None, why)
    yield name("head", "00000001.head", {"generation": 1}, "the first generation")
    yield name("head", "99999999.head", {"generation": 99999999}, "the last generation")
    for text, why in (
        ("00000000.head", "generations count from 1"),
        ("1.head", "one digit"),
        ("000000001.head", "nine digits"),
        ("+0000001.head", "a sign"),
        ("\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668.head", "digits that are not ASCII"),
        ("00000001.head.tmp", "a temporary name"),
    ):
        yield name("head", text, None, why)
    value = {"generation": REF.generation, "step": REF.step, "save_id": REF.save_id.hex()}
    yield name("checkpoint", f"00000003-000000001200-{REF.save_id.hex()}", value, "generation, step and save id")
    for text, why in (
        (f"00000000-000000001200-{digits}", "generations count from 1"),
        (f"00000003-00000001200-{digits}", "a step of 11 digits"),
        (f"00000003-000000001200-{digits[:-1]}", "a save id of 31 digits"),
        (f"00000003-000000001200-{digits.upper()}", "a save id in upper case"),
        (f"00000003-000000001200-{digits}.tmp", "a temporary name"),
    ):
        yield name("checkpoint", text, None, why)
    manifest = ManifestName(1, 2, _DIGEST)
    value = {"rank": 1, "world_size": 2, "digest": _DIGEST.hex()}
    yield name("manifest", str(manifest), value, "rank 1 of 2")
    yield name("manifest", f"00000-of-00001-{digits}.manifest", {"rank": 0, "world_size": 1, "digest": digits}, "alone")
    for text, why in (
        (f"00001-of-00001-{digits}.manifest", "a rank that is not less than the world size"),
        (f"00000-of-00000-{digits}.manifest", "a world size of 0"),
        (f"0-of-1-{digits}.manifest", "ranks of one digit"),
        (f"00000-of-00001-{digits}", "no ending"),
        (f"00000-of-00001-{digits}.manifest.tmp", "a temporary name"),
    ):
        yield name("manifest", text, None, why)
    other = fixed_bytes("ring", 16).hex()
    yield name("ring", f"asymcheck-{digits}-{other}.ring", {"store_id": digits, "ring_id": other}, "store and ring")
    for text, why in (
        (f"asymcheck-{digits}-{other[:-1]}.ring", "a ring id of 31 digits"),
        (f"asymcheck-{digits}0-{other}.ring", "a store id of 33 digits"),
        (f"asymcheck-{digits.upper()}-{other}.ring", "a store id in upper case"),
        (f"asymcheck-{digits}.ring", "one id"),
        (f"{digits}-{other}.ring", "another program"),
        (f"asymcheck-{digits}-{other}.ring.tmp", "a temporary name"),
        (f"asymcheck-{digits}-{other}.ring\n", "a line feed at the end"),
    ):
        yield name("ring", text, None, why)


def catalog_vectors() -> Iterator[Vector]:
    """Yield catalog entries, and entries that count as absent (value null)."""

    def entry(name: str, database: str, key: bytes, data: bytes, value: object, why: str) -> Vector:
        return valid("catalog", name, data, why, value, database=database, key=key.hex())

    at = Location(_PACK, 4096, 300, 300)
    location = catalog_records.encode_location(_DIGEST, at)
    described = {
        "pack_id": _PACK.hex(),
        "offset": 4096,
        "stored_length": 300,
        "plain_length": 300,
        "base_digest": bytes(16).hex(),
        "kind": 0,
        "codec": 0,
        "digest_algorithm": 1,
    }
    yield entry("partition", "partitions", _DIGEST, location, described, "where a partition lies")
    live, freed = (
        catalog_records.encode_pack_entry(_PACK, 1, 3, 86016),
        catalog_records.encode_pack_entry(_PACK, 2, 3, 86016),
    )
    pack = {"state": 1, "frame_count": 3, "pack_length": 86016}
    yield entry("pack-live", "packs", _PACK, live, pack, "a pack in use")
    yield entry("pack-freed", "packs", _PACK, freed, {**pack, "state": 2}, "a pack that collection has marked")
    key = catalog_records.manifest_key("gpt2-run1", REF, ManifestName(0, 1, _DIGEST))
    yield entry(
        "manifest", "manifests", key, catalog_records.encode_manifest_entry(key, 5000), {"size": 5000}, "a manifest"
    )
    pin = catalog_records.pin_key(save_id("pin"), 7)
    packs = sorted([_PACK, pack_id("other")])
    owner = {"pid": 4711, "start_ticks": 123456, "boot_id": _OWNER.boot_id, "pid_namespace": _OWNER.pid_namespace}
    value = {"owner": owner, "packs": [item.hex() for item in packs]}
    yield entry(
        "pin", "pins", pin, catalog_records.encode_pin(pin, _OWNER, packs), value, "rank 7 of a save holds two packs"
    )
    store_id = fixed_bytes("store", 16)
    sealed = catalog_records.seal(b"store_id", store_id)
    yield entry("store-id", "meta", b"store_id", sealed, {"store_id": store_id.hex()}, "whose catalog it is")
    other = partition_digest("other", 300)
    reserved = patched(location, (59, b"\1"))
    reserved = patched(reserved, (64, sum8(_DIGEST + reserved[:64])))
    for name, key, data, why in (
        ("partition-flipped", _DIGEST, flipped(location, 16), "a bit is flipped"),
        ("partition-sum", _DIGEST, flipped(location, 71), "a bit of the checksum is flipped"),
        ("partition-other-key", other, location, "the value of another key"),
        ("partition-short", _DIGEST, location[:-1], "a byte is missing"),
        (
            "partition-long",
            _DIGEST,
            catalog_records.seal(_DIGEST, location[:64] + b"\0"),
            "a byte too many, with its checksum",
        ),
        ("partition-empty", _DIGEST, b"", "no bytes"),
        ("partition-reserved", _DIGEST, reserved, "reserved_a is not zero"),
    ):
        yield entry(name, "partitions", key, data, None, why)
    reserved = patched(live, (1, b"\1"))
    reserved = patched(reserved, (24, sum8(_PACK + reserved[:24])))
    for name, data, why in (
        ("pack-flipped", flipped(live, 8), "a bit is flipped"),
        ("pack-short", live[:-1], "a byte is missing"),
        ("pack-reserved", reserved, "reserved_a is not zero"),
        ("pack-long", catalog_records.seal(_PACK, live[:24] + b"\0"), "a byte too many, with its checksum"),
    ):
        yield entry(name, "packs", _PACK, data, None, why)
    sound = catalog_records.encode_pin(pin, _OWNER, packs)
    by_name = {"owner": vars(_OWNER), "packs": {item.hex(): 0 for item in packs}}
    for name, data, why in (
        ("pin-flipped", flipped(sound, 10), "a bit is flipped"),
        ("pin-not-json", catalog_records.seal(pin, b"{"), "no JSON, with its checksum"),
        (
            "pin-space",
            catalog_records.seal(pin, sound[:-8].replace(b',"packs"', b', "packs"')),
            "JSON that is not canonical",
        ),
        ("pin-key-twice", catalog_records.seal(pin, sound[:-9] + b',"packs":[]}'), "a key is there twice"),
        ("pin-packs-object", catalog_records.seal(pin, canonical_json(by_name)), "packs that are no list"),
        ("pin-no-owner", catalog_records.seal(pin, b'{"packs":[]}'), "no owner"),
        (
            "pin-pack-short",
            catalog_records.seal(pin, sound[:-8].replace(packs[0].hex().encode(), b"00")),
            "an id of 2 digits",
        ),
    ):
        yield entry(name, "pins", pin, data, None, why)
