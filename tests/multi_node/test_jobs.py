"""Test jobs with one store per machine: all save and restore one checkpoint, or report the reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import pytest
import torch
from click.testing import CliRunner

from asymcheck import Push, Retention, Store
from asymcheck.cli.main import commands
from asymcheck.errors import InconsistentCheckpointError, UnreachableRemoteWarning
from asymcheck.fsck.verify import Severity
from asymcheck.replication import background_push, cross_node_dedup
from tests.distributed.job import Job
from tests.distributed.training import Training
from tests.multi_node.conftest import Launch
from tests.multi_node.scenarios import COLUMNS, ROWS, store_of
from tests.remote.conftest import ChildOnThread

STEPS = 4
"""Number of steps of the job of :func:`pushed`: 0 to 3, of which 0 and 2 were pushed."""
Reports = list[dict[str, object]]


@pytest.fixture(scope="module")
def pushed(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reports]:
    """Return the folder and the reports of a job with two machines of two ranks, which pushed to one location."""
    folder = tmp_path_factory.mktemp("pushed")
    return folder, launch("trained", folder, STEPS, IN_STEP=1, LOCATION=(folder / "there").as_uri()).wait()


def restored(job: Job) -> int:
    """Return the restored step of all ranks, whose states must be right."""
    reports = job.wait()
    assert not [one["refused"] for one in reports if "refused" in one]
    (step,) = {cast(int, one["restored"]) for one in reports}
    for rank, one in enumerate(reports):
        assert one["state"] == (job.folder / f"state-{step}-{rank}").read_text()
    return step


def steps_in(store: Path | str) -> list[int]:
    """Return the complete steps of a store or location."""
    with Store.open(store, read_only=True) as opened:
        assert not [one for one in opened.verify() if one.severity == Severity.ERROR]
        return [one.step for one in opened.checkpoints() if one.complete and one.on_line]


@pytest.mark.slow
def test_each_machine_stores_the_shards_of_its_ranks(pushed: tuple[Path, Reports]) -> None:
    """Test that the checkpoint is complete for that store, but not as a whole."""
    for machine in range(2):
        said = CliRunner().invoke(commands, ["verify", str(store_of(pushed[0], machine))]).output
        assert said == f"{STEPS} checkpoints checked: all shards in this store are intact\n"
        with Store.open(store_of(pushed[0], machine), read_only=True) as store:
            assert not store.verify()
            found = store.checkpoints()
            assert [one.step for one in found if one.complete] == list(range(STEPS))
            assert found[0].ranks == f"{2 * machine}-{2 * machine + 1} of 4"
            with pytest.raises(InconsistentCheckpointError, match="pass the location to which all stores push"):
                store.load()


def test_common_data_is_stored_per_machine_and_pushed_once(pushed: tuple[Path, Reports]) -> None:
    """Test that each byte of a replicated model is sent to the location once."""
    folder, reports = pushed
    written = [cast(int, one["written"]) for one in reports]
    sent = [cast(list[int], one["pushed"])[2] for one in reports]
    with Store.open((folder / "there").as_uri()) as store:
        assert not store.verify()
        assert [(one.step, one.complete, one.ranks) for one in store.checkpoints()] == [(0, True, "4"), (2, True, "4")]
        state = cast(dict[str, torch.Tensor], store.load())
        each = (1 + 2 + 3) * torch.arange(float(ROWS))
        assert torch.equal(state["cut"], each[:, None].expand(ROWS, COLUMNS))
    # Of each step, a machine writes the common data, and the data of its two ranks: 600 numbers and a shard.
    alone = 2 * 4 * (600 + ROWS // 4 * COLUMNS)
    of_a_step = (written[0] + written[1]) // STEPS
    assert sum(sent) == 2 * (of_a_step + alone)
    assert sent[0] == pytest.approx(sent[2], rel=0.2)
    assert sent[1] == sent[3] == 0
    # The first machine to finish only knows that step 0 is complete at the location.
    assert max(cast(int, reports[0]["newest_there"]), cast(int, reports[2]["newest_there"])) == STEPS - 2
    assert reports[1]["newest_there"] is reports[3]["newest_there"] is None


@pytest.mark.slow
def test_missing_shards_of_other_machines_are_reported(
    pushed: tuple[Path, Reports], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the push of a single store never completes a checkpoint."""
    monkeypatch.setattr(cross_node_dedup, "PATIENCE_S", 0.0)
    monkeypatch.setattr(background_push, "_start", ChildOnThread)
    rules = Push(tmp_path.as_uri(), every=3, close_s=None)
    with Store.open(store_of(pushed[0], 0), create=True) as store, store.training.push_in_background(rules) as pushing:
        pushing.wait()
        assert (pushing.statistics().backlog, pushing.statistics().problem) == (0, "")
        monkeypatch.setattr(cross_node_dedup, "LATE_S", 0.0)
        with pytest.warns(UnreachableRemoteWarning, match="step 3 is incomplete: other machines"):
            pushing.close()
        assert pushing.statistics().newest_step is None


@pytest.mark.slow
def test_another_number_of_ranks_restores_from_where_all_push(
    launch: Launch, pushed: tuple[Path, Reports], tmp_path: Path
) -> None:
    """Test ranks with other shards, which no store of a machine has."""
    shutil.copytree(pushed[0] / "there", tmp_path / "there")
    reports = launch("trained", tmp_path, 0, world_size=2, PER_MACHINE=1, LOCATION=(tmp_path / "there").as_uri()).wait()
    assert [one["restored"] for one in reports] == [2, 2]


def test_manual_pruning_keeps_the_newest_two(pushed: tuple[Path, Reports], tmp_path: Path) -> None:
    """Test that the newest checkpoint may be incomplete on another machine."""
    shutil.copytree(store_of(pushed[0], 0), tmp_path / "store")
    with Store.open(tmp_path / "store", create=True) as store:
        assert [one.step for one in store.prune(Retention(keep_last=1)).removed] == [0, 1]
    assert steps_in(tmp_path / "store") == [2, 3]


def test_single_process_reads_store_and_location(pushed: tuple[Path, Reports]) -> None:
    """Test that a store with the remote location is equivalent to a store with all shards."""
    training = Training(seed=5)
    with Store.open(store_of(pushed[0], 1), read_only=True, remote=(pushed[0] / "there").as_uri()) as store:
        read = store.restore(into={"model": training.model, "optimizer": training.optimizer}, rank=3)
        assert read.checkpoint.step == 2
        state = cast(dict[str, torch.Tensor], store.load(2))
    assert state["cut"].shape == (ROWS, COLUMNS)


@pytest.mark.slow
def test_a_machine_that_is_lost_comes_back_from_where_all_push(launch: Launch, tmp_path: Path) -> None:
    """Test that all ranks report the skipped checkpoints."""
    there = (tmp_path / "there").as_uri()
    launch("trained", tmp_path, STEPS, world_size=2, PER_MACHINE=1, LOCATION=there).wait()
    shutil.rmtree(tmp_path / "machine-1")
    # Step 3 was not pushed, and only machine 0 has its part.
    job = launch("trained", tmp_path, 1, world_size=2, PER_MACHINE=1, LOCATION=there)
    assert restored(job) == 2
    skipped = cast(list[str], job.report(0)["reports"])[0]
    assert "skipped step 3" in skipped
    assert "the parts of rank 1 are missing" in skipped
    assert "it is not complete on this machine" in cast(list[str], job.report(1)["reports"])[0]


@pytest.mark.slow
def test_swapped_machines_do_not_start_from_scratch(launch: Launch, tmp_path: Path) -> None:
    """Test stores with the shards of the other machine's ranks; nothing is abandoned."""
    launch("trained", tmp_path, 2, world_size=2, PER_MACHINE=1).wait()
    store_of(tmp_path, 0).rename(tmp_path / "store")
    store_of(tmp_path, 1).rename(store_of(tmp_path, 0))
    (tmp_path / "store").rename(store_of(tmp_path, 1))
    for one in launch("trained", tmp_path, 1, world_size=2, PER_MACHINE=1).wait():
        assert "no checkpoint of run 'default' can be restored by all ranks" in str(one["refused"])
        assert "the parts of rank 0, rank 1 are missing" in str(one["refused"])
    for machine in range(2):
        assert steps_in(store_of(tmp_path, machine)) == [0, 1]


@pytest.mark.slow
def test_the_only_checkpoint_of_a_lost_machine_is_never_abandoned(launch: Launch, tmp_path: Path) -> None:
    """Test each start with a new store, which looks like a store that took part in no checkpoint yet."""
    launch("trained", tmp_path, 1, world_size=2, PER_MACHINE=1).wait()
    shutil.rmtree(tmp_path / "machine-1")
    for _ in range(2):
        for one in launch("trained", tmp_path, 1, world_size=2, PER_MACHINE=1).wait():
            assert "the parts of rank 1 are missing" in str(one["refused"])
    assert steps_in(store_of(tmp_path, 0)) == [0]


@pytest.mark.slow
def test_a_rollback_opens_its_generation_on_all_machines_and_each_deletes(launch: Launch, tmp_path: Path) -> None:
    """Test that all stores know the line of later saves, and that each applies its retention."""
    for one in launch("rolled", tmp_path, world_size=2, PER_MACHINE=1, KEEP=2).wait():
        assert one == {"step": 2, "generation": 1, "is_same": True, "saved": 2}
    heads = [tmp_path / f"machine-{machine}/store/heads/default" for machine in range(2)]
    for name in ("00000001.head", "00000002.head"):
        assert (heads[0] / name).read_bytes() == (heads[1] / name).read_bytes()
    for machine in range(2):
        with Store.open(store_of(tmp_path, machine), read_only=True) as store:
            assert [(one.generation, one.step) for one in store.checkpoints() if one.on_line] == [(1, 2), (2, 3)]


@pytest.mark.slow
def test_diverged_replicas_of_machines_are_reported(launch: Launch, tmp_path: Path) -> None:
    """Test that tensors that legitimately differ between ranks are not reported."""
    reports = [
        cast(list[str], one["reports"]) for one in launch("diverged", tmp_path, world_size=2, PER_MACHINE=1).wait()
    ]
    for texts in reports:
        assert {text.split(":", 1)[0] for text in texts} == {"SilentDivergenceWarning"}
        assert any("step 3 of run 'default': tensor model.1.weight" in text for text in texts)
        assert all("but was equal until step 2" in text for text in texts if "step 3 of" in text)
        assert not any("tensor own" in text or "tensor cut" in text for text in texts)
