"""Vectors of well-formed manifests (SPEC.md §A8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.format.layout import ManifestName, checkpoint_name
from asymcheck.format.manifest import Extent, ManifestHeader, TensorRow
from asymcheck.format.record import parent_to_json
from asymcheck.format.tree import Node, encode_metric, value_features
from asymcheck.types import CheckpointRef
from tools.manifest_files import encode_manifest
from tools.vectors_base import (
    CREATED_NS,
    WRITER,
    Vector,
    fixed_bytes,
    pack_id,
    partition_digest,
    save_id,
    valid,
)

REF = CheckpointRef(3, 1200, save_id("golden", 60))
PARENT = CheckpointRef(2, 1100, save_id("parent"))
HEADER = ManifestHeader(
    run="gpt2-run1",
    ref=REF,
    rank=0,
    world_size=1,
    parent=PARENT,
    created_ns=CREATED_NS,
    writer=WRITER,
    metrics={"loss": 3.25},
    plan={"number": 0, "kind": "canonical"},
    packs=(pack_id("golden"),),
    tree=None,
)


def header_for(tree: Node, **changes: object) -> ManifestHeader:
    """Return the usual header with another tree."""
    return dataclasses.replace(HEADER, tree=tree, **changes)  # type: ignore[arg-type]  # fields by name, as replace has it


def manifest_path(data: bytes, header: ManifestHeader = HEADER) -> str:
    """Return the path in a store at which these bytes would be stored."""
    name = ManifestName(header.rank, header.world_size, digest(data))
    return f"manifests/{header.run}/{checkpoint_name(header.ref)}/{name}"


def inline_row(name: str, dtype: str, shape: Sequence[int], data: bytes | None = None) -> TensorRow:
    """Return a tensor whose bytes are in the manifest."""
    nbytes = registry.DTYPE_BYTES[dtype]
    for extent in shape:
        nbytes *= extent
    content = fixed_bytes(name, nbytes) if data is None else data
    whole = tuple(shape)
    return TensorRow(name, (), dtype, "other", whole, whole, (0,) * len(whole), nbytes, content, ())


def stored_row(name: str, shape: Sequence[int], extents: Sequence[Extent], role: str = "weights") -> TensorRow:
    """Return a float32 tensor whose bytes are in partitions."""
    whole = tuple(shape)
    nbytes = sum(extent.length for extent in extents)
    return TensorRow(name, (), "float32", role, whole, whole, (0,) * len(whole), nbytes, None, tuple(extents))


def extent(label: str, offset: int, length: int, whole: int) -> Extent:
    """Return a byte range of the partition that :func:`plain_bytes` returns for a label."""
    return Extent(partition_digest(label, whole), offset, length, whole)


CUT_ROW = stored_row(
    "model.h.0.weight",
    (40, 64),
    [extent("cut 0", 0, 4096, 4096), extent("cut 1", 0, 4096, 4096), extent("cut 2", 0, 2048, 2048)],
)
BUNDLED_ROWS = [
    stored_row("optimizer.state.0.exp_avg", (64,), [extent("bundle", 0, 256, 768)], "first_moment"),
    stored_row("optimizer.state.0.exp_avg_sq", (128,), [extent("bundle", 256, 512, 768)], "second_moment"),
]


_STATE = ["d", [["exp_avg", ["T", 1]], ["exp_avg_sq", ["T", 2]], ["step", ["T", 3]]]]
TREE: Node = [
    "d",
    [
        ["model", ["m", [["h.0.weight", ["T", 0]]], ["d", [["", ["d", [["version", 1]]]]]]]],
        ["optimizer", ["d", [["state", ["d", [[0, _STATE]]]], ["param_groups", ["l", []]]]]],
        ["epoch", 4],
    ],
]
"""The structure of a model with its optimizer."""


def row_json(row: TensorRow) -> dict[str, object]:
    """Return a row in the layout of vectors, with the keys of SPEC.md's table of columns."""
    return {
        "name": row.name,
        "aliases": list(row.aliases),
        "dtype": row.dtype,
        "role": row.role,
        "shape": list(row.shape),
        "global_shape": list(row.global_shape),
        "offset": list(row.offset),
        "nbytes": row.nbytes,
        "inline": None if row.inline is None else row.inline.hex(),
        "inline_digest": None if row.inline is None else digest(row.inline).hex(),
        "extents": [{**dataclasses.asdict(item), "digest": item.digest.hex()} for item in row.extents],
    }


def header_json(header: ManifestHeader) -> dict[str, object]:
    """Return a header in the layout of vectors, with the keys of SPEC.md's table of the header."""
    return {
        "format": 1,
        "reader_features": sorted(value_features(header.tree)),
        "run": header.run,
        "generation": header.ref.generation,
        "step": header.ref.step,
        "save_id": header.ref.save_id.hex(),
        "world_size": header.world_size,
        "rank": header.rank,
        "parent": parent_to_json(header.parent),
        "created_ns": header.created_ns,
        "writer": header.writer,
        "metrics": {name: encode_metric(value) for name, value in header.metrics.items()},
        "plan": dict(header.plan),
        "packs": [pack.hex() for pack in header.packs],
        "tree": header.tree,
        **({} if header.store_ranks is None else {"store_ranks": [list(span) for span in header.store_ranks]}),
        **({"elsewhere": header.elsewhere.hex()} if header.elsewhere else {}),
        **({} if header.merged is None else {"merged": dict(header.merged)}),
    }


def _foreign_parts() -> Iterator[Vector]:
    """Yield manifests with parts of an Arrow file or of a header that a reader must ignore."""
    rows = [inline_row("a", "uint8", (1,))]
    deep: object = []
    for _ in range(253):
        deep = [deep]
    plan = {"number": 0, "kind": "deep", "further": deep}
    header = header_for(["T", 0])
    data = encode_manifest(header, rows)
    with pa.ipc.open_file(pa.py_buffer(data)) as reader:
        batch, schema = reader.get_batch(0), reader.schema
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, metadata={b"footer": b"1"}) as writer:
        writer.write_batch(batch, custom_metadata={b"batch": b"1"})
    with_metadata = sink.getvalue().to_pybytes()
    for name, head, file, why in (
        ("custom-metadata", header, with_metadata, "metadata of the footer and of the record batch is ignored"),
        ("deep-plan", header_for(["T", 0], plan=plan), None, "256 levels of nesting, which every reader accepts"),
    ):
        whole = file or encode_manifest(head, rows)
        value = {"header": header_json(head), "rows": [row_json(row) for row in rows]}
        yield valid("manifest", name, whole, why, value, path=manifest_path(whole, head))


def manifest(name: str, header: ManifestHeader, rows: Sequence[TensorRow], why: str) -> Vector:
    """Return a well-formed manifest."""
    data = encode_manifest(header, rows)
    value = {"header": header_json(header), "rows": [row_json(row) for row in rows]}
    return valid("manifest", name, data, why, value, path=manifest_path(data, header))


def manifest_vectors() -> Iterator[Vector]:
    """Yield well-formed manifests."""
    yield manifest("no-rows", HEADER, [], "a state without tensors")
    rows = [CUT_ROW, *BUNDLED_ROWS, inline_row("optimizer.state.0.step", "float32", (), b"\0\0\x80\x3f")]
    yield manifest("extents", header_for(TREE), rows, "a tensor over three partitions, two in one, and one inline")
    dtypes = [inline_row(dtype, dtype, (3, 2)) for dtype in registry.DTYPE_BYTES]
    tree: Node = ["d", [[row.name, ["T", number]] for number, row in enumerate(dtypes)]]
    yield manifest("dtypes", header_for(tree), dtypes, "every dtype of the registry, inline")
    roles = [dataclasses.replace(inline_row(role, "uint8", (1,)), role=role) for role in registry.ROLES]
    tree = ["d", [[row.name, ["T", number]] for number, row in enumerate(roles)]]
    yield manifest("roles", header_for(tree), roles, "every role of the registry")
    shapes = [
        inline_row("scalar", "float64", ()),
        inline_row("empty", "int32", (0,)),
        inline_row("empty-matrix", "int32", (3, 0, 2)),
        inline_row("64-dimensions", "uint8", (1,) * 64),
        inline_row("inline-limit", "uint8", (4096,)),
    ]
    tree = ["l", [["T", number] for number in range(len(shapes))]]
    yield manifest("shapes", header_for(tree), shapes, "no dimension, no elements, most dimensions, most inline bytes")
    tied = dataclasses.replace(CUT_ROW, name="model.wte", aliases=("model.lm_head", "shadow.0"))
    tree = ["d", [["model", ["d", [["wte", ["T", 0]], ["lm_head", ["T", 0]]]]], ["shadow", ["l", [["T", 0]]]]]]
    yield manifest("tied", header_for(tree), [tied], "one row under three names")
    piece = dataclasses.replace(CUT_ROW, global_shape=(80, 64), offset=(40, 0))
    ranks = header_for(["T", 0], rank=1, world_size=2)
    yield manifest("piece-of-a-rank", ranks, [piece], "rank 1 of 2 holds the lower half of a tensor")
    part = header_for(["T", 0], rank=1, world_size=8, store_ranks=((0, 1), (6, 6)), elsewhere=b"\x05")
    yield manifest("part-of-a-store", part, [CUT_ROW], "ranks 0, 1 and 6 of 8 save here; others bring two partitions")
    merged = {"method": "mean", "sources": [{"step": 1, "weight": 0.5}, {"step": 2, "weight": 0.5}]}
    yield manifest("merged", header_for(["T", 0], merged=merged), [CUT_ROW], "a checkpoint that was merged from others")
    names = [inline_row(name, "uint8", (1,)) for name in ("", "same", "same", "Gewicht\u00e4\U0001f9c0", "a.b\nc")]
    tree = ["l", [["T", number] for number in range(len(names))]]
    yield manifest("names", header_for(tree), names, "names need not be distinct, nor short, nor ASCII")
    metrics: Mapping[str, float] = {"nan": float("nan"), "up": float("inf"), "down": float("-inf"), "tiny": 5e-324}
    yield manifest("metrics", header_for(None, metrics=metrics), [], "numbers that JSON has and has not")
    most = {f"metric-{number:03d}": float(number) for number in range(256)}
    yield manifest("metrics-limit", header_for(None, metrics=most), [], "as many metrics as there may be")
    plan = {"number": 7, "kind": "asymmetric", "further": {"keys": [1, 2]}}
    yield manifest(
        "plan", header_for(None, plan=plan, parent=None, packs=()), [], "a plan with further keys; no parent"
    )
    before = CheckpointRef(REF.generation, REF.step - 1, save_id("before"))
    yield manifest("parent", header_for(None, parent=before, packs=()), [], "a parent of the same generation")
    tree = ["d", [["x", "deque"], ["window", ["x", "deque", 3, ["l", [["T", 0]]]]]]]
    typed = "a typed value in a list of a mapping, so that a feature is listed; the key x is none"
    yield manifest("typed-value", header_for(tree), [inline_row("window.0", "uint8", (1,))], typed)
    tree = ["l", [["T", 0], ["x", "set", None, ["t", [["t", [["x", "enum", "Level.LOW", 1]]]]]]]]
    why = "a set with a member of an enumeration, so that a second feature is listed"
    yield manifest("enum-item", header_for(tree), [inline_row("0", "uint8", (1,))], why)
    yield from _foreign_parts()
    last = CheckpointRef(99999999, 999999999999, save_id("last"))
    limits = header_for(None, ref=last, rank=99998, world_size=99999, run="r" * 64)
    yield manifest("header-limits", limits, [], "the largest generation, step, rank and world size")
