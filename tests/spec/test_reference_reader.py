"""Test that the second reader, written from SPEC.md alone, agrees with the library on stores, damage and vectors.

Vectors of the catalog, which no reader needs, and of names alone are left out.
"""

import functools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asymcheck
from asymcheck.errors import AsymcheckError, InconsistentCheckpointError
from asymcheck.format.pack import ENTRY_DTYPE, decode_pack_header, encode_index
from tests.damage.flips import flip
from tests.spec.corpus import FORMAT_SPEC, VECTORS, Vector, vectors
from tests.spec.frozen import Frozen, found_tensors, torn_stores, whole_stores

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

READER = FORMAT_SPEC / "reference_reader.py"
KINDS = ("frame", "pack", "manifest", "descriptor", "head", "tree", "ring", "codec")

# Run isolated (-I), without access to the library, so that a reader that imports it fails.
ALONE = """
import runpy, sys
class Out:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("asymcheck", "torch", "tools", "tests"):
            raise ImportError(f"the reference reader imports {name}")
sys.meta_path.insert(0, Out())
sys.argv = sys.argv[1:]
"""
RUN = f"{ALONE}runpy.run_path(sys.argv[0], run_name='__main__')"
CHECK = f"""{ALONE}
import json, pathlib
reader = runpy.run_path(sys.argv[0], run_name="reader")
found = {{}}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*/*.bin")):
    facts = json.loads(path.with_suffix(".json").read_text())
    kind = facts.get("structure") or facts.get("record") or path.parent.name
    if kind in {KINDS!r}:
        try:
            name, rows = facts.get("path", path.stem), facts.get("rows", 0)
            value = reader["check_file"](kind.replace("codec", "pack"), path.read_bytes(), name, rows)
            result = {{"value": value}}
        except reader["SpecError"] as error:
            result = {{"kind": error.kind}}
        except Exception as error:
            result = {{"crash": repr(error)}}
        found[f"{{path.parent.name}}/{{path.stem}}"] = result
print(json.dumps(found))
"""


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a separate interpreter."""
    command = [sys.executable, "-I", "-c", program, str(READER), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def read(store: Path, *arguments: object) -> dict[str, Any]:
    """Return the output of the reference reader for a store."""
    done = run(RUN, store, *arguments)
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def shown(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint on which both readers must agree exactly."""
    tensors = [{key: tensor[key] for key in sorted(tensor)} for tensor in facts["tensors"]]
    names = ("generation", "step", "save_id", "world_size", "on_line", "metrics", "tree")
    return {**{name: facts[name] for name in names}, "tensors": tensors}


def test_reference_reader_cannot_import_the_library() -> None:
    """Test that the isolation of these tests works."""
    done = subprocess.run([sys.executable, "-I", "-c", f"{ALONE}import asymcheck"], capture_output=True, check=False)
    assert done.returncode != 0
    assert b"the reference reader imports asymcheck" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("frozen", whole_stores(), ids=str)
def test_reference_reader_reads_frozen_stores(frozen: Frozen) -> None:
    """Test tree and digest of every tensor, for each run and step."""
    for name in sorted(frozen.newest):
        of_run = [facts for facts in frozen.checkpoints if facts["run"] == name]
        newest = read(frozen.whole / "store", "--run", name)
        assert newest["run"] == name
        assert newest["generation"] == max(facts["generation"] for facts in of_run)
        assert newest["newest"]["save_id"] == newest["chosen"]["save_id"] == frozen.newest[name]
        listed = [
            (item["save_id"], item["on_line"], item["consistent"], item["reason"]) for item in newest["checkpoints"]
        ]
        assert listed == [(facts["save_id"], facts["on_line"], True, None) for facts in sorted(of_run, key=_age)]
        for facts in of_run:
            if facts["on_line"]:
                chosen = read(frozen.whole / "store", "--run", name, "--step", facts["step"])["chosen"]
                assert shown(chosen) == shown(facts)


def _age(facts: dict[str, Any]) -> tuple[int, int, str]:
    return (facts["generation"], facts["step"], facts["save_id"])


@pytest.mark.slow(quick=["v1-by-0.1.0-torn/11-manifest.committed"], long=["*shifted*"])
@pytest.mark.parametrize("frozen", torn_stores(), ids=str)
def test_reference_reader_recovers_from_every_crash(frozen: Frozen, store_path: Path) -> None:
    """Test that it chooses the same checkpoint as the library, and reads the same bytes."""
    frozen.copy_to(store_path)
    chosen = read(store_path, "--run", "default")["chosen"]
    assert chosen["save_id"] == frozen.newest["default"]
    (facts,) = (facts for facts in frozen.checkpoints if facts["save_id"] == chosen["save_id"])
    assert shown(chosen) == shown(facts)


@pytest.mark.slow
def test_reference_reader_reads_current_stores(store_path: Path) -> None:
    """Test several packs, generations and layouts of tensors."""
    numbers = np.random.default_rng(7)
    shared = torch.from_numpy(numbers.standard_normal((300, 400)))
    state: dict[str, object] = {
        "model": {"a": shared, "b": shared[3:40], "tied": shared, "small": torch.arange(3), "empty": torch.empty(0, 4)},
        "optimizer": [{"exp_avg": torch.from_numpy(numbers.standard_normal(70_000).astype("f4"))}, (1, 2.5, None)],
        "array": numbers.integers(0, 9, (5, 6)),
    }
    config = asymcheck.StoreConfig(partition_bytes=1 << 17, bundle_below_bytes=1 << 16, pack_bytes=1 << 19)
    with asymcheck.Store.open(store_path, config=config, create=True) as store:
        first = store.save(state, step=1, metrics={"loss": float("nan"), "lr": 1e-3})
        store.save({**state, "late": torch.ones(50_000)}, step=2)
        assert store.training.begin_generation(first) == 2
        state["array"] = numbers.integers(0, 9, (5, 6))
        store.save(state, step=2, metrics={"loss": float("-inf")})
        loaded = store.load()
    tree, tensors = found_tensors(loaded)
    assert len(list((store_path / "packs").iterdir())) > 3
    printed = read(store_path)
    assert printed["chosen"]["tree"] == tree
    assert printed["chosen"]["tensors"] == [{key: tensor[key] for key in sorted(tensor)} for tensor in tensors]
    assert printed["chosen"]["metrics"] == {"loss": "-Infinity"}
    assert [(item["generation"], item["step"], item["on_line"]) for item in printed["checkpoints"]] == [
        (1, 1, True),
        (1, 2, False),
        (2, 2, True),
    ]


def test_a_step_of_another_training_stands_in_for_none(store_path: Path) -> None:
    """Test a damaged step on the line, for which neither reader returns the abandoned save of the step."""
    with asymcheck.Store.open(store_path, create=True) as store:
        first = store.save({"a": 1}, step=1)
        store.save({"a": 2}, step=2)
        store.training.begin_generation(first)
        store.save({"a": 3}, step=2)
        flip(next(iter(_newest(store_path).iterdir())), 8 * 3000)
        with pytest.raises(InconsistentCheckpointError, match="step 2"):
            store.load(2)
        assert store.load(1) == {"a": 1}
    refused = run(RUN, store_path, "--step", "2")
    assert refused.returncode == 1
    assert "no checkpoint to read" in refused.stderr


def _newest(store: Path) -> Path:
    return max((store / "manifests" / "default").iterdir())


def _pack(store: Path, number: int) -> Path:
    packs = sorted((store / "packs").iterdir())
    return packs[number % len(packs)]


def _flip_pack(store: Path, number: int) -> None:
    flip(_pack(store, number), 8 * random.Random(number).choice([4224, 4230, 4300, 4096 + 90]))


def _cut_pack(store: Path, number: int) -> None:
    path = _pack(store, number)
    path.write_bytes(path.read_bytes()[: 4096 * (1 + number % 3)])


def _add_foreign_files(store: Path) -> None:
    for name in ("packs/x.pack", "heads/default/00000000.head", "manifests/default/x", "x"):
        (store / name).write_text("not ours")


def _flip_both(path: Path, offset: int) -> None:
    flip(path, 8 * offset)
    flip(path, 8 * (4096 + offset))


def _use_unknown_codec(store: Path, number: int) -> None:
    """Give an index entry of a pack a codec that no version 1 has."""
    path = _pack(store, number)
    data = bytearray(path.read_bytes())
    header = decode_pack_header(data[:4096], path.name)
    start, end = header.index_offset + 64, header.index_offset + header.index_length
    entries = np.frombuffer(data[start:end], dtype=ENTRY_DTYPE).copy()
    entries["codec"][-1] = 200
    index = encode_index(header.pack_id, entries)
    data[header.index_offset : header.index_offset + len(index)] = index
    path.write_bytes(data)


def _add_manifest(store: Path) -> None:
    """Add a damaged manifest of a rank that has an intact one."""
    (manifest,) = _newest(store).iterdir()
    rank, digest = manifest.name[:15], "0" * 32
    (manifest.parent / f"{rank}{digest}.manifest").write_bytes(manifest.read_bytes())


DAMAGE: dict[str, Callable[[Path], object]] = {
    "both copies of the first head record": lambda store: _flip_both(store / "heads" / "default" / "00000001.head", 20),
    "both copies of the descriptor": lambda store: _flip_both(store / "asymcheck.store", 20),
    "no packs": lambda store: shutil.rmtree(store / "packs"),
    "no checkpoint of the run": lambda store: shutil.rmtree(store / "manifests" / "default"),
    "no manifests": lambda store: shutil.rmtree(store / "manifests"),
    "two manifests of a rank": _add_manifest,
    **{f"an unknown codec in pack {n}": functools.partial(_use_unknown_codec, number=n) for n in range(5)},
    "no manifest": lambda store: shutil.rmtree(_newest(store)),
    "a bit of the newest manifest": lambda store: flip(next(_newest(store).iterdir()), 8 * 1000),
    "a bit of one copy of a head record": lambda store: flip(store / "heads" / "default" / "00000002.head", 8 * 20),
    "no head record": lambda store: (store / "heads" / "default" / "00000002.head").unlink(),
    "a bit of one copy of the descriptor": lambda store: flip(store / "asymcheck.store", 8 * 20),
    "no descriptor": lambda store: (store / "asymcheck.store").unlink(),
    "foreign files": _add_foreign_files,
    **{f"a bit of pack {number}": functools.partial(_flip_pack, number=number) for number in range(10)},
    **{f"the version of pack {n}": lambda store, n=n: flip(_pack(store, n), 8 * 8) for n in range(5)},
    **{f"pack {number} is cut": functools.partial(_cut_pack, number=number) for number in range(5)},
}


@pytest.mark.slow(
    quick=["a bit of pack 6", "an unknown codec in pack 2", "two manifests of a rank"],
    long=["a bit of pack [1-57-9]", "pack [1-4] is cut"],
)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_both_take_the_same_checkpoint_of_a_damaged_store(damage: Callable[[Path], None], store_path: Path) -> None:
    """Test a single damage: both readers choose the same checkpoint with the same bytes, or give the same kind."""
    whole_stores()[-1].copy_to(store_path)
    damage(store_path)
    done = run(RUN, store_path, "--run", "default")
    refused = None
    try:
        with asymcheck.Store.open(store_path, read_only=True) as store:
            restored = store.restore()
    except AsymcheckError as error:
        refused, restored = error, None
    assert (done.stderr if done.returncode else "").partition(":")[0] == (refused.kind if refused else "")
    if restored is None:
        return
    assert done.returncode == 0, done.stderr
    chosen = json.loads(done.stdout)["chosen"]
    assert chosen["save_id"] == restored.checkpoint.save_id
    _, tensors = found_tensors(restored.state)
    assert chosen["tensors"] == [{key: tensor[key] for key in sorted(tensor)} for tensor in tensors]


@functools.cache
def checked() -> dict[str, dict[str, Any]]:
    """Return the results of the reference reader for all vectors, from one interpreter."""
    done = run(CHECK, VECTORS)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


FOLDERS = ("frame", "pack", "manifest", "record", "tree", "ring", "codec")
VALID = [vector for folder in FOLDERS for vector in vectors(folder)]
INVALID = [vector for vector in vectors("invalid") if vector.facts["structure"] in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("vector", VALID, ids=str)
def test_reference_reader_accepts_well_formed_vectors(vector: Vector) -> None:
    """Test the content of the JSON file of each vector."""
    found, facts = checked()[str(vector)], vector.facts
    assert set(found) == {"value"}, found
    value = found["value"]
    if vector.folder == "pack":
        assert (
            facts["value"]["header"].items() <= {**value, "magic": "ASYMPACK", "writer": _text(value["writer"])}.items()
        )
        for entry, expected in zip(value["entries"], facts["value"]["entries"], strict=True):
            shift = expected["payload_offset"] - 4096 if expected["stored_length"] >= 65536 else 0
            assert {**expected, "payload_shift": shift, **entry} == {**expected, "payload_shift": shift}
    elif vector.folder == "codec":
        assert value["plains"] == [entry["plain"] for entry in facts["value"]["entries"]]
    elif vector.folder == "frame":
        expected = {key: item for key, item in facts["value"].items() if key not in ("magic", "payload_pattern")}
        assert expected.items() <= value.items()
    else:
        assert value == facts["value"]


def _text(hexadecimal: str) -> str:
    return bytes.fromhex(hexadecimal).rstrip(b"\0").decode()


@pytest.mark.parametrize("vector", INVALID, ids=str)
def test_reference_reader_refuses_malformed_vectors(vector: Vector) -> None:
    """Test a permitted kind of error, without a crash."""
    facts = vector.facts
    if facts["structure"] == "frame" and vector.name in ("frame-other-pack", "frame-other-sequence"):
        pytest.skip("check_file is not told the frame's place; the vectors of packs have the same faults")
    found = checked()[str(vector)]
    assert found.get("kind") in {facts["error_kind"], facts.get("or", facts["error_kind"])}, found
