"""Test killed ranks: common commits are restored by all ranks bit for bit, and others are not."""

from __future__ import annotations

import fcntl
import random
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import pytest

from asymcheck import Store
from asymcheck.cli import exit_status
from asymcheck.format import manifest_reader
from asymcheck.format.frame import payload_offset
from asymcheck.storage.process_identity import this_process
from asymcheck.storage.shm.orphaned_rings import RingCapture, newer_than_stored, survey_rings
from asymcheck.storage.shm.ring_reader import RingReader
from tests.cli.conftest import run_command
from tests.crash.dead_rings import copied, refuse_rings, set_owner
from tests.damage.flips import flip
from tests.distributed.job import LIMIT_S, Job, Meeting
from tests.distributed.training import Training

_SPAN_S = 0.3


def newest_complete(folder: Path) -> int:
    """Return the newest step for which the store has the manifests of all ranks."""
    with Store.open(folder / "store", read_only=True) as store:
        return max((one.step for one in store.checkpoints() if one.complete), default=-1)


def _newer_captures(store: Store, folder: Path) -> list[RingCapture]:
    tier = store.resources.tier
    return newer_than_stored(tier, survey_rings(tier, folder, None, check=False))


def wait_for_one(folder: Path, more_than: int) -> None:
    """Wait until both ranks of a launch train, and a newer checkpoint is complete."""

    def is_saved() -> bool:
        # A restore commits captures of the last launch, which are newer, too.
        is_training = all(any(folder.glob(f"step-*-{rank}")) for rank in range(2))
        return is_training and newest_complete(folder) > more_than

    began = time.monotonic()
    while not is_saved():
        assert time.monotonic() - began < LIMIT_S
        time.sleep(0.01)


def check_restored(job: Job, least: int) -> int:
    """Check that all ranks have restored one step, with the right state of each; return the step."""
    reports = [job.report(rank) for rank in range(len(job.processes))]
    (step,) = {-1 if one["restored"] is None else cast(int, one["restored"]) for one in reports}
    assert step >= least
    if step < 0:
        return step
    for rank, one in enumerate(reports):
        assert one["digest"] == (job.folder / f"state-{step}-{rank}").read_text()
    return step


@pytest.mark.slow
def test_after_a_kill_all_ranks_resume_from_the_last_common_commit(meeting: Meeting, tmp_path: Path) -> None:
    """Test kills of different ranks in two launches; the third launch finishes.

    The remaining rank ends by itself, and names the missing one.
    """
    chance = random.Random(7)
    least = -1
    for victim in (1, 0):
        for mark in tmp_path.glob("step-*"):
            mark.unlink()
        job = meeting.launch("killed", 2, tmp_path, "60", "3")
        wait_for_one(tmp_path, least + 1)
        time.sleep(chance.random() * _SPAN_S)
        job.kill(victim)
        assert job.processes[1 - victim].has_ended(LIMIT_S), job.output(1 - victim)
        job.processes[1 - victim].finish()
        found = job.report(1 - victim)
        reports = "\n".join([*cast(list[str], found["reports"]), str(found.get("ended", ""))])
        assert f"rank {victim} did not respond" in reports
        check_restored(job, least)
        least = newest_complete(tmp_path)

    job = meeting.launch("killed", 2, tmp_path, "3", "60")
    last_reports = job.wait()
    step = check_restored(job, least)
    assert not any("Lost" in text for one in last_reports for text in cast(list[str], one["reports"]))
    assert newest_complete(tmp_path) == step + 3
    with Store.open(tmp_path / "store", read_only=True) as store:
        assert not [one for one in store.verify() if one.severity == "error"]
    assert not list((tmp_path / "memory").iterdir())


def check_files_from_memory(where: Path) -> None:
    """Test that ``restore --tier memory`` writes the same as a later restore from the store."""
    outcome = run_command(
        *("restore", where / "whole" / "store", "--tier", "memory", "--ring-folder", where / "whole" / "memory"),
        *("--to", where / "memory.safetensors"),
    )
    assert outcome.status == 0, outcome.err
    copied(where / "whole", where / "copy")
    with Store.open(where / "copy" / "store", create=True) as store, store.training.adopting(where / "copy" / "memory"):
        pass
    outcome = run_command("restore", where / "copy" / "store", "--to", where / "store.safetensors")
    assert outcome.status == 0, outcome.err
    assert (where / "memory.safetensors").read_bytes() == (where / "store.safetensors").read_bytes()
    outcome = run_command(
        *("restore", where / "part" / "store", "--tier", "memory", "--ring-folder", where / "part" / "memory"),
        *("--to", where / "part.safetensors"),
    )
    assert outcome.status == exit_status.UNREADABLE
    assert re.search("only [01] of 2 ranks left a complete capture in memory", outcome.err)


def check_newer_program(where: Path) -> None:
    """Test a capture of one rank that only a newer program can read: no capture is discarded."""
    copied(where / "whole", where / "newer")
    rings = sorted((where / "newer" / "memory").iterdir())

    def refuse(features: Iterable[str], what: str) -> None:
        if rings[0].name in what:
            refuse_rings(features, what)

    with Store.open(where / "newer" / "store", create=True) as store:
        with pytest.MonkeyPatch.context() as newer:
            newer.setattr(manifest_reader, "check_reader_features", refuse)
            with store.training.adopting(where / "newer" / "memory") as adopted:
                assert [one.ref for one in adopted] == [None, None]
        assert sorted((where / "newer" / "memory").iterdir()) == rings
        with store.training.adopting(where / "newer" / "memory") as adopted:
            assert [one.problem for one in adopted] == ["", ""]


def check_living_rank(where: Path) -> None:
    """Test another training that starts before all ranks have ended: the capture waits for the last rank."""
    copied(where / "whole", where / "living")
    rings = sorted((where / "living" / "memory").iterdir())
    set_owner(rings[0], this_process())
    with Store.open(where / "living" / "store", create=True) as store:
        # This process holds the ring and the mark, as the rank would.
        store.resources.catalog()
        with rings[0].open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with store.training.adopting(where / "living" / "memory", run="another") as adopted:
                assert [one.ref for one in adopted] == [None]
                assert "is in use" in adopted[0].problem
        assert sorted((where / "living" / "memory").iterdir()) == rings
        with store.training.adopting(where / "living" / "memory") as adopted:
            assert [one.problem for one in adopted] == ["", ""]
        assert not list((where / "living" / "memory").iterdir())


def check_damaged_rank(where: Path, number: int) -> None:
    """Test a damaged frame in the ring of one rank: no part of the capture is committed."""
    folder = copied(where / "whole", where / f"damaged-{number}")
    rings = sorted((folder / "memory").iterdir())
    with RingReader(rings[number]) as ring, RingReader(rings[1 - number]) as other:
        newest = ring.manifest(max(ring.captures, key=lambda entry: entry.save_id))
        lengths = newest.partitions()
        # A replica in the other ring would replace a damaged frame.
        frames = [(offset, name) for name in lengths.keys() - other.offsets for offset in ring.offsets[name]]
    for offset, name in frames:
        flip(rings[number], 8 * (offset + payload_offset(lengths[name])))
    with Store.open(folder / "store", create=True) as store:
        with store.training.adopting(folder / "memory") as adopted:
            assert [(one.step, one.ref) for one in adopted] == [(1, None)]
        assert "neither in the ring nor in the store" in adopted[0].problem
        assert [one.step for one in store.checkpoints()] == [0]


def check_damaged_replicas(where: Path) -> None:
    """Test damaged replicas in the ring of rank 0: those in the other ring are committed."""
    folder = copied(where / "whole", where / "replicas")
    rings = sorted((folder / "memory").iterdir())
    with RingReader(rings[0]) as ring, RingReader(rings[1]) as other:
        # The parts are committed in the order of ranks.
        damaged, intact = sorted((ring, other), key=lambda reader: reader.header.rank)
        lengths = damaged.manifest(max(damaged.captures, key=lambda entry: entry.save_id)).partitions()
        frames = [(at, name) for name in lengths.keys() & intact.offsets for at in damaged.offsets[name]]
        path = damaged.path
    assert frames
    for offset, name in frames:
        flip(path, 8 * (offset + payload_offset(lengths[name])))
    with Store.open(folder / "store", create=True) as store:
        with store.training.adopting(folder / "memory") as adopted:
            assert [(one.step, one.problem) for one in adopted] == [(1, "")] * 2
        assert not [one for one in store.verify() if one.severity == "error"]


@pytest.mark.slow
def test_only_captures_of_all_ranks_are_recovered(meeting: Meeting, tmp_path: Path) -> None:
    """Test ranks killed when step 1 was complete in the memory of each, and not committed."""
    job = meeting.launch("stuck", 2, tmp_path / "whole")
    for rank in range(2):
        job.until(rank, f"in-memory-{rank}")
    job.kill()
    assert newest_complete(tmp_path / "whole") == 0
    copied(tmp_path / "whole", tmp_path / "part")
    rings = sorted((tmp_path / "part" / "memory").iterdir())
    assert len(rings) == 2
    rings[1].unlink()

    check_files_from_memory(tmp_path)
    check_newer_program(tmp_path)
    check_living_rank(tmp_path)
    for number in range(2):
        check_damaged_rank(tmp_path, number)
    check_damaged_replicas(tmp_path)
    with Store.open(tmp_path / "whole" / "store", create=True) as store:
        only = _newer_captures(store, tmp_path / "whole" / "memory")
        assert [(one.step, one.world_size) for one in only] == [(1, 2)]
        with store.training.adopting(tmp_path / "whole" / "memory") as taken:
            pass
        assert [(one.step, one.ref is not None, one.problem) for one in taken] == [(1, True, "")] * 2
        for rank in range(2):
            training = Training(seed=1)
            training.train(0, 0)
            assert store.restore(into=training.state(), rank=rank).checkpoint.step == 1
            assert training.digest() == (tmp_path / "whole" / f"state-1-{rank}").read_text()
    assert newest_complete(tmp_path / "whole") == 1

    with Store.open(tmp_path / "part" / "store", create=True) as store:
        # Such a capture is not promised.
        assert _newer_captures(store, tmp_path / "part" / "memory") == []
        with store.training.adopting(tmp_path / "part" / "memory") as adopted:
            (left,) = adopted
        assert (left.step, left.ref) == (1, None)
        assert "incomplete: ranks" in left.problem
        assert [one.step for one in store.checkpoints()] == [0]
    assert not list((tmp_path / "part" / "memory").iterdir())


@pytest.mark.slow
def test_a_capture_of_all_ranks_survives_later_captures_of_one(meeting: Meeting, tmp_path: Path) -> None:
    """Test a kill of rank 1, and of rank 0 after it has given up two checkpoints."""
    job = meeting.launch("outlived", 2, tmp_path)
    job.until(1, "in-memory-1-1")
    job.kill(1)
    job.until(0, "lost")
    job.kill(0)
    assert newest_complete(tmp_path) == 0
    job = meeting.launch("killed", 2, tmp_path, "1", "60")
    job.wait()
    assert check_restored(job, 0) == 1
