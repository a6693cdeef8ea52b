"""Test the reader in JavaScript, which was written from SPEC.md alone, against vectors, stores and the library."""

import base64
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import asymcheck
from asymcheck.errors import AsymcheckError
from asymcheck.fsck.verify import Severity
from tests.spec.corpus import FORMAT_SPEC, Vector, vectors
from tests.spec.frozen import (
    Frozen,
    FrozenParts,
    encoded_stores,
    expected_wholes,
    part_stores,
    torn_stores,
    whole_stores,
)
from tests.spec.test_readers_agree import (
    COLUMNS,
    NODES,
    VALUES,
    changed,
    header_verdicts,
    places,
    tree_verdicts,
    wrapped,
)
from tools.vectors_manifest import manifest_path
from tools.vectors_manifest_invalid import arrow_file, header_bytes

FOLDER = FORMAT_SPEC / "js"
NODE = shutil.which("node", path=f"{os.environ['PATH']}:{Path(sys.executable).parent}")

pytestmark = [
    # torch warns once in a process, when the first complex32 tensor is created.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.skipif(NODE is None, reason="Node is missing; run make node"),
    pytest.mark.skipif(not (FOLDER / "node_modules").exists(), reason="packages are missing; run make node"),
]


def answers(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of one process to some requests."""
    command = [str(NODE), str(FOLDER / "reader.mjs"), "--check"]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    run = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in run.stdout.split("\n") if line]


def request(structure: str, data: bytes, **facts: object) -> dict[str, Any]:
    """Return the request to check some bytes."""
    return {"structure": structure, "data": base64.b64encode(data).decode(), **facts}


def request_of(vector: Vector) -> dict[str, Any]:
    """Return the request to check a vector."""
    facts = vector.facts
    structure = facts.get("structure", vector.folder)
    if structure == "record":
        structure = "head" if facts["path"].endswith(".head") else "descriptor"
    context: dict[str, Any] = {key: facts[key] for key in ("path", "place_id", "rows") if key in facts}
    if "sequence" in facts:
        # JSON.parse rounds integers above 2^53.
        context["sequence"] = str(facts["sequence"])
    return request(structure, vector.data, **context)


def test_every_malformed_vector_is_refused() -> None:
    """Test that the kind of each refusal is that of the library, or the other kind that the text allows."""
    malformed = vectors("invalid")
    found = answers([request_of(vector) for vector in malformed])
    allowed = [{vector.facts["error_kind"], vector.facts.get("or")} for vector in malformed]
    wrong = [
        f"{vector}: {answer['kind']}"
        for vector, answer, kinds in zip(malformed, found, allowed, strict=True)
        if answer["kind"] is None or answer["kind"] not in kinds
    ]
    assert len(malformed) > 600
    assert wrong == []


def test_every_sound_vector_is_read() -> None:
    """Test the vectors of all structures that a reader of stores and rings needs."""
    folders = ("frame", "pack", "manifest", "tree", "codec", "ring", "record")
    sound = [vector for folder in folders for vector in vectors(folder)]
    found = answers([request_of(vector) for vector in sound])
    assert [f"{vector}: {answer}" for vector, answer in zip(sound, found, strict=True) if answer["kind"]] == []


def check_listing(found: dict[str, Any], frozen: Frozen) -> None:
    """Compare a listing with what was saved: trees, tensors and their digests, the line, and the newest checkpoints."""
    keys = ("run", "generation", "step", "save_id", "on_line", "world_size", "metrics", "parts")
    parts = [[{key: facts[key] for key in ("tree", "tensors")}] for facts in frozen.checkpoints]
    complete = [{"parts": part, **facts} for part, facts in zip(parts, frozen.checkpoints, strict=True)]
    expected = [{key: facts[key] for key in keys} for facts in complete]
    listed = [{key: checkpoint.get(key) for key in keys} for checkpoint in found["checkpoints"]]

    def identity(facts: dict[str, Any]) -> str:
        return f"{facts['run']} {facts['save_id']}"

    assert sorted(listed, key=identity) == sorted(expected, key=identity)
    wholes = {identity(checkpoint): checkpoint.get("wholes", {}) for checkpoint in found["checkpoints"]}
    assert wholes == {identity(facts): expected_wholes(facts) for facts in frozen.checkpoints}
    on_line = [facts for facts in frozen.checkpoints if facts["on_line"]]
    order = [(facts["run"], facts["generation"], facts["step"], facts["save_id"]) for facts in on_line]
    assert found["newest"] == {run: save_id for run, _, _, save_id in sorted(order)}


@pytest.mark.parametrize("frozen", [*whole_stores(), *encoded_stores(), *part_stores()], ids=str)
def test_frozen_store_is_read(frozen: Frozen, tmp_path: Path) -> None:
    """Test every bit of every checkpoint and rank, in stores and in a remote layout."""
    command = [str(NODE), str(FOLDER / "reader.mjs"), str(frozen.copy_to(tmp_path / "store"))]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    check_listing(json.loads(run.stdout), frozen)


@pytest.mark.parametrize("frozen", part_stores(), ids=str)
def test_store_of_one_machine_has_no_consistent_checkpoint_of_the_job(frozen: FrozenParts, tmp_path: Path) -> None:
    """Test that its checkpoint is listed with a problem, and is the newest of no run."""
    paths = [frozen.of(machine).copy_to(tmp_path / str(machine)) for machine in frozen.machines]
    for answer in answers([{"store": str(path)} for path in paths]):
        (problem,) = (one["problem"] for one in answer["value"]["checkpoints"] if one["run"] == "job")
        assert problem.startswith("inconsistent-checkpoint")
        assert "job" not in answer["value"]["newest"]


def test_torn_stores_are_read(tmp_path: Path) -> None:
    """Test that exactly the committed checkpoints are in each store that a crash left."""
    torn = torn_stores()
    paths = [frozen.copy_to(tmp_path / str(number)) for number, frozen in enumerate(torn)]
    for frozen, answer in zip(torn, answers([{"store": str(path)} for path in paths]), strict=True):
        assert answer["kind"] is None, answer
        check_listing(answer["value"], frozen)


def changed_trees(count: int, seed: int) -> list[tuple[bytes, int]]:
    """Return vectors of trees with several changes, and the numbers of their rows."""
    numbers = random.Random(seed)
    sound = [(json.loads(vector.data), vector.facts["rows"]) for vector in vectors("tree")]
    parts = [part for node, _ in sound for part in [node, *(where[key] for where, key in places(node))]]
    choices = NODES + [part for part in parts if len(json.dumps(part)) < 400]
    trees = []
    for _ in range(count):
        node, rows = numbers.choice(sound)
        for _ in range(numbers.randint(1, 3)):
            node = changed(node, choices, numbers)
        trees.append((json.dumps(wrapped(node, numbers.choice([0, 0, 1, 62, 63]))).encode(), rows))
    return trees


def changed_headers(count: int, seed: int) -> list[bytes]:
    """Return headers of manifests with one or two changes."""
    numbers = random.Random(seed)
    sound = json.loads(
        header_bytes(store_ranks=[[0, 0]], elsewhere="05", merged={"a": 1}, metrics={"a": 1, "b": "NaN", "c": 2.5})
    )
    headers = []
    for _ in range(count):
        header = sound
        for _ in range(numbers.randint(1, 2)):
            header = changed(header, VALUES, numbers)
        headers.append(json.dumps(header).encode())
    return headers


@pytest.mark.parametrize("count", [500, pytest.param(8000, marks=pytest.mark.long)])
def test_both_say_the_same_of_changed_trees(count: int) -> None:
    """Test trees with random changes against the verdict of the library."""
    trees = changed_trees(count, seed=count)
    found = answers([request("tree", text, rows=rows) for text, rows in trees])
    library = [tree_verdicts(text, rows)[0] for text, rows in trees]
    differing = [
        (text[:300], accepts, answer)
        for (text, _), accepts, answer in zip(trees, library, found, strict=True)
        if accepts != (answer["kind"] is None)
    ]
    assert differing == []
    assert count * 0.05 < sum(library) < count * 0.95


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.long)])
def test_both_say_the_same_of_changed_headers(count: int) -> None:
    """Test headers with random changes against the verdict of the library."""
    headers = changed_headers(count, seed=count)
    files = [arrow_file(COLUMNS, text) for text in headers]
    found = answers([request("manifest", data, path=manifest_path(data)) for data in files])
    library = [header_verdicts(text)[0] for text in headers]
    differing = [
        (text, accepts, answer)
        for text, accepts, answer in zip(headers, library, found, strict=True)
        if accepts != (answer["kind"] is None)
    ]
    assert differing == []
    assert count * 0.02 < sum(library) < count * 0.98


def changed_store(source: Path, target: Path, numbers: random.Random) -> str:
    """Copy a store, damage one of its files, and return a description."""
    shutil.copytree(source, target)
    path = numbers.choice(sorted(path for path in target.rglob("*") if path.is_file() and path.parent.name != "pool"))
    data, act = bytearray(path.read_bytes()), numbers.choice(["flip", "flip", "flip", "zero", "cut", "remove", "swap"])
    path.unlink()
    at = numbers.choice([numbers.randrange(len(data)), numbers.randrange(min(len(data), 8192))])
    if act == "flip":
        data[at] ^= 1 << numbers.randrange(8)
    elif act == "zero":
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    elif act == "cut":
        del data[at:]
    elif act == "swap":
        data[at : at + 64] = data[at : at + 64][::-1]
    if act != "remove":
        path.write_bytes(data)
    return f"{act} at {at} of {path.relative_to(target)}"


def damaged_checkpoints(path: Path) -> set[str] | None:
    """Return the first digits of the save ids that the library calls lost; None if it refuses the store."""
    try:
        with asymcheck.Store.open(path, read_only=True) as store:
            findings = [finding for finding in store.verify() if finding.severity is Severity.ERROR]
    except AsymcheckError:
        return None
    return {text[-13:-1] for finding in findings for text in finding.checkpoints}


@pytest.mark.parametrize(
    "count", [pytest.param(60, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.long)]
)
def test_both_say_the_same_of_damaged_stores(count: int, tmp_path: Path) -> None:
    """Test stores with one damaged file: both refuse them, or name the same checkpoints as lost."""
    numbers = random.Random(count)
    whole = numbers.choice(whole_stores()).whole / "store"
    paths = [tmp_path / str(number) for number in range(count)]
    acts = [changed_store(whole, path, numbers) for path in paths]
    lost = 0
    for act, path, answer in zip(acts, paths, answers([{"store": str(path)} for path in paths]), strict=True):
        library, checkpoints = damaged_checkpoints(path), None
        found = None
        if answer["kind"] is None:
            checkpoints = answer["value"]["checkpoints"]
            found = {one["save_id"][:12] for one in checkpoints if "problem" in one}
            # Without a manifest, a directory names no checkpoint.
            library = library and library & {one["save_id"][:12] for one in checkpoints}
        assert found == library, (act, answer["kind"], answer.get("message"), checkpoints)
        lost += library is None or bool(library)
    assert count * 0.2 < lost < count
