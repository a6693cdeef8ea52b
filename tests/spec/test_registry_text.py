"""Test that SPEC.md §A15, registry.json and the code have the same numbers."""

import json
from typing import Any

from asymcheck.codecs import container, derived
from asymcheck.format import registry, ring_records
from tests.spec import spec_text
from tests.spec.corpus import FORMAT_SPEC
from tests.spec.spec_text import code, table

REGISTRY: dict[str, Any] = json.loads((FORMAT_SPEC / "registry.json").read_text("ascii"))


def test_registry_tables_are_the_registry() -> None:
    """Test numbers, names and states."""
    assert {row["structure"]: code(row["magic"]) for row in table("registry_magics")} == REGISTRY["magics"]
    for name in ("frame_kinds", "codecs"):
        rows = {row["number"]: {"name": row["name"], "status": row["status"]} for row in table(f"registry_{name}")}
        assert rows == REGISTRY[name]
    digests = {
        row["number"]: {"name": row["name"], "bytes": int(row["bytes"]), "status": row["status"]}
        for row in table("registry_digests")
    }
    assert digests == REGISTRY["digests"]
    assert {row["number"]: row["name"] for row in table("registry_pack_states")} == REGISTRY["pack_states"]
    assert [(row["dtype"], int(row["bytes"])) for row in table("registry_dtypes")] == list(REGISTRY["dtypes"].items())
    assert {row["type"]: row["content"] for row in table("registry_value_types")} == REGISTRY["value_types"]
    assert [row["role"] for row in table("registry_roles")] == REGISTRY["roles"]
    assert {row["limit"]: int(row["value"]) for row in table("registry_limits")} == REGISTRY["limits"]


def test_numbers_of_other_sections_are_in_the_registry() -> None:
    """Test the numbers of §B8, §A10.2 and §A10.4 in registry.json and in the code."""
    (state,) = (row["meaning"] for row in table("ring_capture") if row["field"] == "state")
    assert state.partition(":")[0] == _listed(REGISTRY["capture_states"])
    assert REGISTRY["capture_states"] == {str(ring_records.COMPLETE): "complete", str(ring_records.DURABLE): "durable"}
    assert {row["encoding"]: row["name"] for row in table("planes_encodings")} == REGISTRY["plane_encodings"]
    encodings = {"raw": container.RAW, "zstd": container.ZSTD, "constant": container.CONSTANT}
    assert {name: int(number) for number, name in REGISTRY["plane_encodings"].items()} == encodings
    (dtype,) = (row["meaning"] for row in table("derived_payload") if row["field"] == "dtype")
    assert dtype == _listed(REGISTRY["derived_dtypes"])
    assert {int(number): name for number, name in REGISTRY["derived_dtypes"].items()} == derived.DTYPES


def _listed(names: dict[str, str]) -> str:
    return ", ".join(f"{number} {name}" for number, name in names.items())


def test_every_table_of_the_registry_is_compared() -> None:
    """Test that a new table in registry.json has a comparison in this module."""
    compared = {"format", "magics", "digests", "frame_kinds", "codecs", "dtypes", "roles", "pack_states", "limits"}
    compared |= {"value_types"}
    compared |= {"reader_features", "writer_features", "capture_states", "plane_encodings", "derived_dtypes"}
    assert set(REGISTRY) == compared


def test_the_registry_is_the_code() -> None:
    """Test that the numbers and the supported subset are equal."""
    versions = {
        "min_read": registry.FORMAT_MIN_READ,
        "max_read": registry.FORMAT_MAX_READ,
        "write": registry.FORMAT_WRITE,
    }
    assert versions == REGISTRY["format"]
    magics = {"frame": registry.FRAME_MAGIC, "pack": registry.PACK_MAGIC, "pack_index": registry.PACK_INDEX_MAGIC}
    assert {name: magic.decode() for name, magic in magics.items()} == REGISTRY["magics"]
    for name, names, supported in (
        ("digests", registry.DIGESTS, registry.SUPPORTED_DIGESTS),
        ("frame_kinds", registry.FRAME_KINDS, registry.SUPPORTED_KINDS),
        ("codecs", registry.CODECS, registry.SUPPORTED_CODECS),
    ):
        assert {str(number): word for number, word in names.items()} == {
            number: entry["name"] for number, entry in REGISTRY[name].items()
        }
        assert {str(number) for number in supported} == {
            number for number, entry in REGISTRY[name].items() if entry["status"] != "reserved"
        }
    assert {entry["bytes"] for entry in REGISTRY["digests"].values()} == {registry.DIGEST_BYTES}
    assert {str(number): name for number, name in registry.PACK_STATES.items()} == REGISTRY["pack_states"]
    assert {name: getattr(registry, name.upper()) for name in REGISTRY["limits"]} == REGISTRY["limits"]
    assert REGISTRY["dtypes"] == registry.DTYPE_BYTES
    assert REGISTRY["value_types"] == registry.VALUE_TYPES
    assert list(registry.ROLES) == REGISTRY["roles"]
    assert set(REGISTRY["reader_features"]) == registry.READER_FEATURES
    assert set(REGISTRY["writer_features"]) == registry.WRITER_FEATURES


def test_the_format_version_is_stated() -> None:
    """Test that the text names the version that the code writes."""
    assert f"Format version: **{registry.FORMAT_WRITE}**." in spec_text.text()
