"""Test commands for rings of killed trainings: list, export and collect without a loss."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from asymcheck import Store
from asymcheck.convert.convert import Output, export_checkpoint
from asymcheck.errors import CheckpointNotFoundError, FormatError
from asymcheck.format.frame import HEADER_BYTES, decode_header, encode_header, payload_offset
from asymcheck.format.layout import parse_ring_name
from asymcheck.format.record import RECORD_BYTES
from asymcheck.format.ring_records import DATA_OFFSET, decode_ring_header, encode_ring_header
from asymcheck.types import PackId
from tests.checkpointer.loops import folder_for_rings, rings
from tests.cli.conftest import Outcome, run_command
from tests.crash.dead_rings import CAPTURED, DURABLE, kill_when_ready, partition_of_newest, set_store_path
from tests.crash.states import Journal
from tests.crash.trainer import assert_restored, train, train_two_runs
from tests.damage.flips import flip
from tests.store.equality import assert_same
from tests.zygote import Child, Zygote, wait_until


def call(folder: Path, command: str, *words: object) -> Outcome:
    """Run a command with the store and the rings of a training."""
    return run_command(command, folder / "store", "--ring-folder", folder_for_rings(folder), *words)


def restore(folder: Path, name: str, *words: object) -> Outcome:
    """Write a capture to a file in the folder of the training."""
    return call(folder, "restore", "--tier", "memory", "--to", folder / name, *words)


def damage_newest(folder: Path) -> None:
    """Flip a bit of the newest capture."""
    (ring,) = rings(folder)
    offset, length = partition_of_newest(ring)
    flip(ring, 8 * (offset + payload_offset(length) + 5))


@pytest.fixture
def living(zygote: Zygote, tmp_path: Path) -> Child:
    """Return a running training with captures in its ring."""
    child = zygote.start(train, path=str(tmp_path), steps=CAPTURED, durable=DURABLE)
    wait_until(lambda: bool(Journal(tmp_path / "journal").lines("ready")), "the training")
    return child


@pytest.fixture
def deleted(zygote: Zygote, tmp_path: Path) -> Path:
    """Return the folder of a killed training whose store was deleted and replaced by another store."""
    kill_when_ready(zygote.start(train, path=str(tmp_path), steps=CAPTURED, durable=DURABLE), tmp_path)
    shutil.rmtree(tmp_path / "store")
    return tmp_path


# -------------------------------------------------------------------------------------------------------------- inspect


def test_a_dead_ring_is_listed_with_its_captures(folder: Path) -> None:
    """Test that process, steps and durable steps are listed, and that nothing is changed."""
    (ring,) = rings(folder)
    before = ring.read_bytes()
    found = call(folder, "inspect", "--tier", "memory", "--json")
    assert found.status == 0
    (told,) = json.loads(found.out)["rings"]
    assert (told["path"], told["is_alive"], told["nbytes"], told["run"]) == (str(ring), False, len(before), "default")
    captures = [(one["step"], one["generation"], one["is_durable"], one["is_intact"]) for one in told["captures"]]
    assert captures[-3:] == [(step, 1, False, True) for step in range(DURABLE, CAPTURED)]
    assert all(is_durable for _, _, is_durable, _ in captures[:-3])
    text = call(folder, "inspect", "--tier", "memory").out
    assert f"process {told['pid']}, dead" in text
    assert text.count("in memory only  intact") == CAPTURED - DURABLE
    assert ring.read_bytes() == before


def test_a_living_ring_is_listed_as_alive(living: Child, tmp_path: Path) -> None:
    """Test that frames of a running process are not checked, because they may change, and that it continues."""
    found = call(tmp_path, "inspect", "--tier", "memory", "--json")
    (told,) = json.loads(found.out)["rings"]
    assert (told["is_alive"], told["pid"]) == (True, living.pid)
    assert {one["is_intact"] for one in told["captures"]} == {None}
    assert max(one["step"] for one in told["captures"]) == CAPTURED - 1
    assert f"process {living.pid}, running" in call(tmp_path, "inspect", "--tier", "memory").out
    assert "in memory only" not in call(tmp_path, "inspect").err


@pytest.mark.parametrize("how", ["bit", "cut"])
def test_damaged_ring_is_reported(folder: Path, how: str) -> None:
    """Test that a flipped bit names the capture, and that a truncated ring is unreadable."""
    if how == "bit":
        damage_newest(folder)
    else:
        os.truncate(rings(folder)[0], 20_000)
    found = call(folder, "inspect", "--tier", "memory")
    assert found.status == 6
    assert ("DAMAGED: 1 of" if how == "bit" else "20000 of") in found.out
    (told,) = json.loads(call(folder, "inspect", "--tier", "memory", "--json").out)["rings"]
    broken = [one["step"] for one in told["captures"] if one["problem"]]
    assert (broken, bool(told["problem"])) == (([CAPTURED - 1], False) if how == "bit" else ([], True))


def test_inspect_mentions_captures_in_memory(folder: Path) -> None:
    """Test the line with the command that recovers the captures, and its absence after the recovery."""
    note = call(folder, "inspect").err
    assert "step 4 of run default is in memory only" in note
    assert "asymcheck restore" in note
    assert call(folder, "inspect", "--run", "default").err.count("\n") == 1
    assert_restored(folder, CAPTURED - 1)
    assert call(folder, "inspect").err == ""


def test_deleted_checkpoint_in_a_ring_is_not_mentioned(zygote: Zygote, tmp_path: Path) -> None:
    """Test that a deleted checkpoint is not mentioned, because it was durable."""
    kill_when_ready(zygote.start(train, path=str(tmp_path), steps=2, durable=2), tmp_path)
    with Store.open(tmp_path / "store", create=True) as store:
        for step in range(2):
            store.delete(step)
    assert call(tmp_path, "inspect").err == ""


def test_no_rings_are_no_error_of_inspect(tmp_path: Path) -> None:
    """Test the message for a store without rings."""
    Store.open(tmp_path / "store", create=True).close()
    found = call(tmp_path, "inspect", "--tier", "memory")
    assert (found.status, found.out) == (0, f"no rings of store {tmp_path / 'store'} in {tmp_path / 'memory'}\n")


# -------------------------------------------------------------------------------------------------------------- restore


@pytest.mark.parametrize("words", [("x.pt",), ("x.safetensors", "--part", "model"), ("x", "--tensors", "model.*")])
def test_a_capture_becomes_the_file_that_its_checkpoint_becomes(folder: Path, words: tuple[str, ...]) -> None:
    """Test that the file has the same bytes, that the ring is unchanged, and that a training can recover it."""
    (ring,) = rings(folder)
    before = ring.read_bytes()
    name, *rest = words
    done = restore(folder, name, *rest)
    assert (done.status, f"from run default, step {CAPTURED - 1}" in done.out) == (0, True), done.err
    assert ring.read_bytes() == before
    assert_restored(folder, CAPTURED - 1)
    (folder / "other").mkdir()
    assert run_command("restore", folder / "store", "--to", folder / "other" / name, *rest).status == 0
    assert_same(_content(folder / name), _content(folder / "other" / name))


def _content(path: Path) -> object:
    if path.is_dir():
        return {item.name: item.read_bytes() for item in path.iterdir()}
    # A .pt file contains a random name of itself.
    return torch.load(path, weights_only=True) if path.suffix == ".pt" else path.read_bytes()


@pytest.mark.parametrize("step", [DURABLE, CAPTURED - 2])
def test_a_step_can_be_named(folder: Path, step: int) -> None:
    """Test any step in the ring."""
    assert f"from run default, step {step}" in restore(folder, "x.pt", "--step", step).out


def test_only_the_ring_is_read(folder: Path) -> None:
    """Test a store without packs and manifests."""
    for name in ("packs", "manifests"):
        shutil.rmtree(folder / "store" / name)
    assert restore(folder, "x.pt").status == 0


def test_damaged_capture_is_skipped(folder: Path) -> None:
    """Test the message and the status, and that a request by step is an error without a file."""
    damage_newest(folder)
    done = restore(folder, "x.pt")
    assert (done.status, f"from run default, step {CAPTURED - 2}" in done.out) == (6, True)
    assert f"skipped step {CAPTURED - 1} (generation 1" in done.err
    named = restore(folder, "y.pt", "--step", CAPTURED - 1)
    assert (named.status, "has no intact frame" in named.err) == (4, True)
    assert not (folder / "y.pt").exists()


def test_a_ring_that_was_cut_short_is_an_error(folder: Path) -> None:
    """Test that the error names the ring."""
    (ring,) = rings(folder)
    os.truncate(ring, 20_000)
    done = restore(folder, "x.pt")
    assert (done.status, ring.name in done.err, "20000 of" in done.err) == (4, True, True)


def test_the_newest_of_two_dead_rings_is_taken(folder: Path) -> None:
    """Test two rings with captures of one run: the ring with the newest or the requested step is used."""
    (ring,) = rings(folder)
    other = ring.with_name(f"{ring.name[:-37]}{'0' * 32}.ring")
    shutil.copy(ring, folder / "copy")
    damage_newest(folder)
    assert f"step {CAPTURED - 2}" in restore(folder, "x.pt").out
    _as_ring(folder / "copy", other)
    assert len(rings(folder)) == 2
    found = json.loads(call(folder, "inspect", "--tier", "memory", "--json").out)["rings"]
    assert sorted(one["captures"][-1]["is_intact"] for one in found) == [False, True]
    assert f"step {CAPTURED - 1}" in restore(folder, "y.pt").out


def _as_ring(copy: Path, path: Path) -> None:
    """Give a copy of a ring another id: in its name, its header and its frames."""
    data = bytearray(copy.read_bytes())
    header = decode_ring_header(data[:RECORD_BYTES], "copy")
    _, ring_id = parse_ring_name(path.name) or (b"", b"")
    data[:RECORD_BYTES] = encode_ring_header(dataclasses.replace(header, ring_id=ring_id))
    for offset in range(DATA_OFFSET, len(data), 4096):
        try:
            frame = decode_header(data[offset : offset + HEADER_BYTES], "copy")
        except FormatError:
            continue
        data[offset : offset + HEADER_BYTES] = encode_header(frame.descriptor, PackId(ring_id), offset // 4096)
    path.write_bytes(data)


def test_another_run_is_named(zygote: Zygote, tmp_path: Path) -> None:
    """Test two rings of two runs: each run is found, and the error for a missing run lists both."""
    kill_when_ready(zygote.start(train_two_runs, path=str(tmp_path), steps=3), tmp_path)
    for run in ("one", "two"):
        assert f"from run {run}, step 2" in restore(tmp_path, f"{run}.pt", "--run", run).out
    missing = restore(tmp_path, "x.pt")
    assert (missing.status, "it has runs one, two" in missing.err) == (3, True)
    step = restore(tmp_path, "x.pt", "--run", "one", "--step", 7)
    assert (step.status, "it has steps 0, 1, 2" in step.err) == (3, True)
    assert call(tmp_path, "inspect").err.count("is in memory only") == 2


def test_the_ring_of_a_living_process_is_refused(living: Child, tmp_path: Path) -> None:
    """Test that the error names the process, and that the command works after its death."""
    refused = restore(tmp_path, "x.pt")
    assert (refused.status, f"is in use by process {living.pid}" in refused.err) == (5, True)
    assert not (tmp_path / "x.pt").exists()
    living.kill()
    living.wait_killed()
    assert restore(tmp_path, "x.pt").status == 0


def test_empty_memory_is_reported(tmp_path: Path) -> None:
    """Test that the message names the store and the searched folder."""
    Store.open(tmp_path / "store", create=True).close()
    done = restore(tmp_path, "x.pt")
    assert (done.status, "the folder has no ring of this store" in done.err, str(tmp_path / "memory") in done.err) == (
        3,
        True,
        True,
    )
    output = Output(tmp_path / "x.pt")
    with Store.open(tmp_path / "store", create=True) as store, pytest.raises(CheckpointNotFoundError):
        export_checkpoint(store, output, ring_folder=tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------------------------- gc


def test_undurable_captures_stay(folder: Path) -> None:
    """Test that the captures are listed with the command to recover them, and can be recovered afterwards."""
    (ring,) = rings(folder)
    done = call(folder, "gc")
    assert done.status == 0
    assert f"kept ring {ring}" in done.out
    assert "3 captures not durable (step 2, 3, 4)" in done.out
    assert "asymcheck restore" in done.out
    assert_restored(folder, CAPTURED - 1)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("discard", [True, False])
def test_ring_is_removed_when_durable_or_discarded(folder: Path, *, discard: bool, dry_run: bool) -> None:
    """Test that a dry run reports the size and removes nothing."""
    (ring,) = rings(folder)
    size = ring.stat().st_size
    words = [*(["--discard-rings"] if discard else []), *(["--dry-run"] if dry_run else [])]
    if not discard:
        shutil.copy(ring, folder / "kept")
        assert_restored(folder, CAPTURED - 1)
        shutil.move(folder / "kept", ring)
    done = call(folder, "gc", *words)
    assert f"{'would remove' if dry_run else 'removed'} ring {ring}, {size / 2**20:.1f} MiB" in done.out
    assert rings(folder) == ([ring] if dry_run else [])
    assert json.loads(call(folder, "gc", *words, "--json").out)["rings"] == [] or dry_run


@pytest.mark.parametrize("how", ["unmade", "cut"])
def test_a_ring_that_cannot_be_read(folder: Path, how: str) -> None:
    """Test that an incomplete new ring is removed, and that a truncated ring stays until it is discarded."""
    (ring,) = rings(folder)
    os.truncate(ring, 0 if how == "unmade" else 20_000)
    done = call(folder, "gc")
    assert (rings(folder) == []) == (how == "unmade"), done.out
    if how == "cut":
        advice = done.out.partition("The captures cannot be recovered. To remove all kept rings: asymcheck ")[2]
        assert run_command(*shlex.split(advice)).status == 0
        assert rings(folder) == []


def test_the_ring_of_a_living_process_is_not_collected(living: Child, tmp_path: Path) -> None:
    """Test that the ring of a running process is not listed, and not discarded."""
    (ring,) = rings(tmp_path)
    done = call(tmp_path, "gc", "--discard-rings")
    assert (done.status, "ring" in done.out) == (0, False)
    assert rings(tmp_path) == [ring]
    assert living.pid


@pytest.mark.slow(quick=["nothing there"])
@pytest.mark.parametrize("another", [False, True], ids=["nothing there", "another store there"])
def test_the_ring_of_a_deleted_store_is_named_by_any(deleted: Path, *, another: bool) -> None:
    """Test that the ring is listed by any store, and removed with --discard-rings."""
    if another:
        Store.open(deleted / "store", create=True).close()
    Store.open(deleted / "any", create=True).close()
    words = ("gc", deleted / "any", "--ring-folder", folder_for_rings(deleted))
    named = run_command(*words)
    assert f"of store {deleted / 'store'}, which is not at that path: 3 captures not durable" in named.out
    assert "If the store was moved, is unmounted or belongs to another container, its next training" in named.out
    assert len(rings(deleted)) == 1
    assert "removed ring" in run_command(*words, "--discard-rings").out
    assert rings(deleted) == []


@pytest.mark.slow(quick=["nowhere"])
@pytest.mark.parametrize("how", ["whole", "damaged", "nowhere", "/no\0where"])
def test_the_ring_of_another_store_is_its_own_affair(zygote: Zygote, tmp_path: Path, how: str) -> None:
    """Test that the ring of an existing store is neither listed nor discarded by another store."""
    kill_when_ready(zygote.start(train, path=str(tmp_path), steps=2), tmp_path)
    Store.open(tmp_path / "any", create=True).close()
    if how == "damaged":
        (tmp_path / "store" / "asymcheck.store").write_bytes(b"x")
    if "where" in how:
        # A relative or invalid path in a ring says nothing about the store.
        (ring,) = rings(tmp_path)
        set_store_path(ring, how)
    words = ("gc", tmp_path / "any", "--ring-folder", folder_for_rings(tmp_path), "--discard-rings")
    assert "ring" not in run_command(*words).out
    assert len(rings(tmp_path)) == 1


def test_a_ring_of_another_user_is_never_touched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that no command opens the ring of another user."""
    (ring,) = rings(folder)
    status = ring.stat()
    monkeypatch.setattr(os, "geteuid", lambda: status.st_uid + 1)
    opened: list[object] = []
    really = os.open

    def watched(path: str, *rest: int, **more: int) -> int:
        opened.append(path)
        return really(path, *rest, **more)

    monkeypatch.setattr(os, "open", watched)
    assert "no rings" in call(folder, "inspect", "--tier", "memory").out
    assert restore(folder, "x.pt").status == 3
    assert "ring" not in call(folder, "gc", "--discard-rings").out
    assert opened
    assert ring not in opened
    assert rings(folder) == [ring]
