"""Vectors of manifests whose header breaks a rule (SPEC.md §A8)."""

from __future__ import annotations

from collections.abc import Iterator

from asymcheck.format.record import canonical_json
from tools.vectors_base import Vector
from tools.vectors_manifest import HEADER, header_json
from tools.vectors_manifest_invalid import ROWS, ROWS_HEADER, arrow_file, columns_of, header_bytes, refused


def header_damage_vectors() -> Iterator[Vector]:
    """Yield every manifest in which only the header is wrong."""
    yield from _header_text()
    yield from _header_values()


def _header_text() -> Iterator[Vector]:
    columns, good = columns_of(ROWS), header_bytes()
    deep = b"[" * 100_000 + b"]" * 100_000
    for name, text, why in (
        ("not-json", b"{", "the header is not JSON"),
        ("not-an-object", b"[]", "the header is not an object"),
        ("empty", b"", "the header has no bytes"),
        ("key-twice", good[:-1] + b',"step":1201}', "a key is there twice"),
        ("key-twice-alike", good[:-1] + b',"step":1200}', "a key is there twice with one value"),
        ("metric-twice", good.replace(b'"loss":3.25', b'"loss":3.25,"loss":3.25'), "a key of metrics is there twice"),
        ("surrogate", good.replace(b"asymcheck 0.1.0", rb"\ud800"), "half of a pair of surrogates has no UTF-8 form"),
        ("nan", good.replace(b"3.25", b"NaN"), "NaN is not JSON; it is written as a string"),
        ("utf-16", good.decode().encode("utf-16-le"), "JSON that is not UTF-8"),
        ("byte-order-mark", b"\xef\xbb\xbf" + good, "a byte order mark before the JSON"),
        ("not-utf-8", good.replace(b"asymcheck 0.1.0", b"asymcheck \xff"), "bytes that are not UTF-8"),
        ("deep", good.replace(b'"tree":', b'"remark":' + deep + b',"tree":'), "nesting that a parser may choke on"),
    ):
        yield refused(f"header-{name}", arrow_file(columns, text), "bad-structure", why)
    for key in header_json(ROWS_HEADER):
        fields = {name: value for name, value in header_json(ROWS_HEADER).items() if name != key}
        data = arrow_file(columns, canonical_json(fields))
        yield refused(f"header-no-{key}", data, "bad-structure", f"{key} is missing")


def _header_values() -> Iterator[Vector]:
    columns = columns_of(ROWS)
    save, pack = HEADER.ref.save_id.hex(), HEADER.packs[0].hex()
    parent = {"generation": 2, "step": 1, "save_id": save}
    many = {f"metric-{number}": 0 for number in range(257)}
    for name, changes, kind, why in (
        ("format-2", {"format": 2}, "unsupported-version", "a newer major version"),
        ("format-0", {"format": 0}, "unsupported-version", "a version that never was"),
        ("format-true", {"format": True}, "bad-structure", "true is not the integer 1"),
        ("format-string", {"format": "1"}, "bad-structure", "a version that is no integer"),
        ("reader-feature", {"reader_features": ["a-feature-of-later"]}, "unsupported-feature", "an unknown feature"),
        ("features-object", {"reader_features": {}}, "bad-structure", "features that are no list"),
        ("run-grammar", {"run": "../run"}, "bad-structure", "a run that cannot be a name"),
        ("run-number", {"run": 1}, "bad-structure", "a run that is no string"),
        ("generation-0", {"generation": 0}, "bad-structure", "generations count from 1"),
        ("generation-9-digits", {"generation": 10**8}, "bad-structure", "a generation of 9 digits"),
        ("generation-float", {"generation": 3.0}, "bad-structure", "a generation that is no integer"),
        ("step-negative", {"step": -1}, "bad-structure", "a negative step"),
        ("step-13-digits", {"step": 10**12}, "bad-structure", "a step of 13 digits"),
        ("step-true", {"step": True}, "bad-structure", "true is not an integer"),
        ("save-id-short", {"save_id": save[:-2]}, "bad-structure", "a save id of 30 digits"),
        ("save-id-upper", {"save_id": save.upper()}, "bad-structure", "a save id in upper case"),
        ("save-id-spaces", {"save_id": f"{save[:2]} {save[2:]}"}, "bad-structure", "a save id with a space in it"),
        ("save-id-list", {"save_id": [save]}, "bad-structure", "a save id that is no string"),
        ("rank-world-size", {"rank": 1}, "bad-structure", "a rank that is not less than the world size"),
        ("rank-negative", {"rank": -1}, "bad-structure", "a negative rank"),
        ("world-size-limit", {"world_size": 100000}, "bad-structure", "a world size of 6 digits"),
        ("parent-list", {"parent": []}, "bad-structure", "a parent that is neither object nor null"),
        ("parent-save-id", {"parent": {**parent, "save_id": "x"}}, "bad-structure", "a parent with a wrong save id"),
        ("parent-no-step", {"parent": {**parent, "step": None}}, "bad-structure", "a parent without a step"),
        ("parent-later", {"parent": {**parent, "generation": 4}}, "bad-structure", "a parent of a later generation"),
        ("store-ranks-empty", {"store_ranks": []}, "bad-structure", "no rank saves into the store"),
        ("store-ranks-null", {"store_ranks": None}, "bad-structure", "ranks of a store that are no list"),
        (
            "store-ranks-others",
            {"store_ranks": [[1, 1]], "world_size": 2},
            "bad-structure",
            "its rank is missing",
        ),
        ("store-ranks-order", {"store_ranks": [[2, 2], [0, 0]], "world_size": 3}, "bad-structure", "not in order"),
        (
            "store-ranks-beside",
            {"store_ranks": [[0, 0], [1, 1]], "world_size": 2},
            "bad-structure",
            "one as two",
        ),
        (
            "store-ranks-turned",
            {"store_ranks": [[1, 0]], "world_size": 2},
            "bad-structure",
            "last before first",
        ),
        (
            "store-ranks-limit",
            {"store_ranks": [[0, 1]]},
            "bad-structure",
            "a rank that is not less than the world size",
        ),
        ("store-ranks-true", {"store_ranks": [[0, True]], "world_size": 2}, "bad-structure", "true is not an integer"),
        ("store-ranks-three", {"store_ranks": [[0, 0, 0]]}, "bad-structure", "three numbers are no pair"),
        ("elsewhere-upper", {"elsewhere": "0F"}, "bad-structure", "hexadecimal digits in upper case"),
        ("elsewhere-odd", {"elsewhere": "0"}, "bad-structure", "half a byte"),
        ("elsewhere-number", {"elsewhere": 5}, "bad-structure", "no string"),
        ("merged-list", {"merged": []}, "bad-structure", "the sources of a merge that are no object"),
        ("merged-null", {"merged": None}, "bad-structure", "null is no object"),
        ("created-negative", {"created_ns": -1}, "bad-structure", "a negative time"),
        ("created-too-large", {"created_ns": 1 << 64}, "bad-structure", "a time of more than 64 bits"),
        ("writer-list", {"writer": []}, "bad-structure", "a writer that is no string"),
        ("metrics-list", {"metrics": []}, "bad-structure", "metrics that are no object"),
        ("metrics-limit", {"metrics": many}, "limit-exceeded", "257 metrics"),
        ("metrics-string", {"metrics": {"loss": "nan"}}, "bad-structure", "not one of the three strings"),
        ("metrics-true", {"metrics": {"loss": True}}, "bad-structure", "true is not a number"),
        ("metrics-huge", {"metrics": {"loss": 10**400}}, "bad-structure", "a number that no binary64 holds"),
        ("plan-list", {"plan": []}, "bad-structure", "a plan that is no object"),
        ("plan-no-number", {"plan": {"kind": "canonical"}}, "bad-structure", "a plan without a number"),
        ("plan-no-kind", {"plan": {"number": 0}}, "bad-structure", "a plan without a kind"),
        ("packs-string", {"packs": pack}, "bad-structure", "packs that are no list"),
        ("packs-short", {"packs": [pack[:-1]]}, "bad-structure", "a pack id of 31 digits"),
        ("packs-upper", {"packs": [pack.upper()]}, "bad-structure", "a pack id in upper case"),
        ("packs-object", {"packs": {pack: 1}}, "bad-structure", "packs that are an object"),
        ("packs-number", {"packs": [1]}, "bad-structure", "a pack id that is no string"),
        ("tree-row-range", {"tree": ["l", [["T", 0], ["T", 4]]]}, "bad-structure", "the tree names row 4 of 4"),
        ("tree-row-unnamed", {"tree": ["l", [["T", 0], ["T", 1], ["T", 2]]]}, "bad-structure", "row 3 is in no node"),
        ("tree-unknown", {"tree": ["P", "os.system"]}, "bad-structure", "a node with an unknown tag"),
    ):
        yield refused(f"header-{name}", arrow_file(columns, header_bytes(**changes)), kind, why)
    number = arrow_file(columns, header_bytes(reader_features=[1]))
    why = "a feature that is no string"
    yield refused("header-features-number", number, "bad-structure", why, also="unsupported-feature")
