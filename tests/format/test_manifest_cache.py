"""Test manifests read together: results and refusals equal those of single reads, with shared memory."""

import dataclasses
import json
import random
import time

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.errors import FormatError, StructureError
from asymcheck.format.manifest import Extent, Manifest
from asymcheck.format.manifest_reader import ManifestCache, decode_manifest, decode_manifests
from asymcheck.format.record import parse_json
from asymcheck.types import Digest
from tests.fuzz.manifests import HEADER, ROWS, change, row, seeds
from tools.manifest_files import encode_manifest

_WORLD = 5


def of_ranks() -> list[bytes]:
    """Return manifests of ranks, some equal, some with other tensors and another tree."""
    found = []
    for rank in range(_WORLD):
        rows = ROWS if rank % 3 else [*ROWS, row("own", (rank + 1, 2), "int16")]
        tree = HEADER.tree if rank % 3 else ["l", [["T", number] for number in range(len(rows))]]
        header = dataclasses.replace(HEADER, rank=rank, world_size=_WORLD, tree=tree)
        found.append(encode_manifest(header, rows))
    return found


def facts(manifest: Manifest) -> tuple[object, ...]:
    """Return all content of a manifest."""
    rows = manifest.rows()
    # NaN differs from itself.
    header = dataclasses.replace(manifest.header, metrics={})
    return header, repr(manifest.header.metrics), rows, manifest.partitions()


def test_manifests_read_together_equal_those_read_alone() -> None:
    """Test different rows and trees, and manifests without rows."""
    files = [*of_ranks(), *seeds()]
    together = decode_manifests([(data, "x") for data in files], ManifestCache())
    for manifest, data in zip(together, files, strict=True):
        assert facts(manifest) == facts(decode_manifest(data, "x"))
        # Write the content again, from the columns.
        assert encode_manifest(manifest.header, manifest.rows()) == data


def test_equal_parts_of_ranks_are_stored_once() -> None:
    """Test that trees are the same object, columns the same memory, and that none refers to a file."""
    files = of_ranks()
    first, second = decode_manifests([(data, "x") for data in files], ManifestCache())[1:3]
    assert first.header.tree is second.header.tree
    assert first.header.rank != second.header.rank
    assert _addresses(first) == _addresses(second)
    for data in files:
        whole = pa.py_buffer(data)
        assert not any(whole.address <= one < whole.address + whole.size for one in _addresses(first))


def test_replicas_have_their_rows_once() -> None:
    """Test replicas separated by other ranks, and replicas that are read later."""
    shards = [[row("own", (rank + 1, 2), "int16")] for rank in range(2)]
    files = [
        (encode_manifest(dataclasses.replace(HEADER, rank=rank, world_size=6), shards[rank % 2]), "x")
        for rank in range(6)
    ]
    alike = ManifestCache()
    found = decode_manifests(files[:4], alike) + decode_manifests(files[4:], alike)
    assert [manifest.header.rank for manifest in found] == list(range(6))
    for rank, manifest in enumerate(found):
        assert manifest.rows()[:1] == shards[rank % 2]
        assert _addresses(manifest) == _addresses(found[rank % 2])


def _addresses(manifest: Manifest) -> list[int]:
    buffers = [buffer for column in manifest.columns for buffer in column.buffers()]
    return [buffer.address for buffer in buffers if buffer is not None and buffer.size]


@pytest.mark.slow(long=["[2-7]"])
@pytest.mark.parametrize("seed", range(8))
def test_invalid_manifests_are_refused_together_as_alone(seed: int) -> None:
    """Test the same error and message, and that valid manifests are not refused."""
    dice = random.Random(seed)
    before, *_, after = of_ranks()
    refused = 0
    for number in range(300):
        original = dice.choice(seeds())
        data = change(original, dice)
        alone: object
        try:
            alone = facts(decode_manifest(data, "the changed one"))
        except FormatError as error:
            alone = type(error), str(error)
        try:
            files = [(before, "a"), (original, "the original"), (data, "the changed one"), (after, "b")]
            together: object = facts(decode_manifests(files, ManifestCache())[2])
        except FormatError as error:
            together = type(error), str(error)
            refused += 1
        assert alone == together, number
    assert 30 < refused < 300


def test_two_ranks_may_give_one_partition_two_lengths() -> None:
    """Test that equal lengths are a rule of one manifest, which is named if it breaks the rule itself."""
    name = Digest(bytes(16))
    rows = [row("a", (length,), "uint8", (Extent(name, 0, length, length),)) for length in (3, 4)]
    files = [(encode_manifest(HEADER, [one]), "apart") for one in rows]
    assert [manifest.total_bytes for manifest in decode_manifests(files, ManifestCache())] == [3, 4]
    with pytest.raises(StructureError, match=r"^broken: one partition has two lengths"):
        decode_manifests([*files, (encode_manifest(HEADER, rows), "broken")], ManifestCache())


_PIECES = st.sampled_from(
    ['"tree":', ',"world_size":', "{", "}", "[", "]", '"', "\\", ":", ",", "1", "18446744073709551616", '"a":', "null"]
)


@given(st.lists(_PIECES, max_size=14).map("".join), st.lists(_PIECES, max_size=14).map("".join))
def test_header_of_any_form_is_parsed_exactly(one: str, other: str) -> None:
    """Test that the placeholder of the tree never matches other text."""
    alike = ManifestCache()
    for text in (
        f'{{"rank":1,"tree":{one},"world_size":2}}',
        f'{{"rank":1,"tree":{one},"world_size":2}}',
        f'{{"a":{other},"tree":{one},"world_size":2}}',
        f"{{{other}{one}}}",
    ):
        assert _parsed(alike.parse, text) == _parsed(parse_json, text)


def _parsed(parse: object, text: str) -> object:
    try:
        return parse(text.encode(), "x")  # type: ignore[operator]  # one of two functions
    except StructureError as error:
        return str(error)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":"\\"tree\\":{},\\"world_size\\":1"}',
        '{"a":{"tree":{"b":1},"world_size":1},"tree":{"c":2},"world_size":1}',
        '{"tree":{"b":1},"a":{"world_size":1,"x":[1,"world_size"]},"world_size":1}',
        '{"tree":{"b":1},"x":{"y":[1],"world_size":1},"tree":3}',
        '{"tree":18446744073709551616,"world_size":1}',
        '{"a":18446744073709551616,"tree":18446744073709551617,"world_size":1}',
        '{"x":{"tree":[1],"world_size":1},"tree":true}',
        '{"x":{"tree":[1],"world_size":1},"tree":3}',
        '{"a\\"tree":[1],"world_size":1,"tree":3}',
        '{"tree":1e400,"world_size":1}',
        '{"tree":"\\ud800","world_size":1}',
        ' {"world_size":1,"tree":[1,2]}',
    ],
)
def test_headers_that_look_like_others(text: str) -> None:
    """Test headers in which the tree's key is in a string, nested, or repeated."""
    alike = ManifestCache()
    for _ in range(2):
        assert _parsed(alike.parse, text) == _parsed(parse_json, text)


def test_a_header_full_of_numbers_is_read_in_no_time() -> None:
    """Test many numbers that could be the placeholder of the tree: trying each once took minutes."""
    text = json.dumps({"packs": list(range(1 << 64, (1 << 64) + 60_000)), "tree": 1, "world_size": 1})
    begun = time.monotonic()
    assert ManifestCache().parse(text.replace(" ", "").encode(), "x") == json.loads(text)
    assert time.monotonic() - begun < 5
