"""Test ranks that save, restore, differ and fail, each in its own process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import cast

import pytest
import torch

from asymcheck import Store
from tests.distributed.job import Meeting
from tests.distributed.training import Training

_STEPS = 6
Reports = list[dict[str, dict[str, object]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the scenarios of two ranks, each in a folder of its name."""
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(meeting: Meeting, folder: Path) -> Reports:
    """Return the reports of two ranks on all scenarios of one launch, which saves time."""
    return cast(
        Reports, meeting.launch("replicas,sharded,divergence,failures,caught,run_in_use,paced", 2, folder).wait()
    )


@pytest.fixture(scope="module")
def four(meeting: Meeting, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Return the reports of four ranks."""
    return cast(Reports, meeting.launch("replicas,sharded", 4, tmp_path_factory.mktemp("four")).wait())


@pytest.fixture(params=["two", "four"])
def reports(request: pytest.FixtureRequest) -> Reports:
    """Return the reports of both launches."""
    return cast(Reports, request.getfixturevalue(request.param))


def replicated_bytes() -> int:
    """Return the bytes that all ranks have in common."""
    training = Training()
    training.train(0, 0)
    values = [value for one in training.optimizer.state.values() for value in one.values()]
    return sum(one.nbytes for one in (*training.model.parameters(), *values))


@pytest.mark.slow(quick=["two"])
def test_a_resumed_training_is_the_same_bit_for_bit(reports: Reports) -> None:
    """Test model, optimizer and per-rank state; the scenario compares the bytes."""
    for rank in reports:
        found = rank["replicas"]
        assert found["resumed"] == cast(list[float], found["losses"])[3:]
        assert found["saved"] == [5, 3, True, len(reports)]
        assert found["generations"] == [1, 1]


@pytest.mark.slow
def test_common_data_is_written_once(reports: Reports) -> None:
    """Test that the ranks write about equal shares."""
    written = [cast(int, rank["replicas"]["written"]) for rank in reports]
    own = _STEPS * Training().own.nbytes
    assert sum(written) <= 1.02 * _STEPS * replicated_bytes() + len(reports) * own
    assert sum(written) >= 0.5 * _STEPS * replicated_bytes()
    assert max(written) <= 1.3 * sum(written) / len(written)


def test_shards_come_back_to_their_ranks(reports: Reports) -> None:
    """Test the bytes of each rank's shards, which the scenario compares."""
    assert [rank["sharded"]["step"] for rank in reports] == [3] * len(reports)


def test_whole_tensors_can_be_read_of_shards(two: Reports, folder: Path) -> None:
    """Test a process that is not one of the ranks."""
    assert len(two) == 2
    whole = torch.load(folder / "sharded" / "whole.pt", weights_only=True)
    with Store.open(folder / "sharded" / "store", read_only=True) as store:
        loaded = cast(dict[str, dict[str, torch.Tensor]], store.load(tensors="model.*"))
    assert {name: one.shape for name, one in loaded["model"].items()} == {
        name: one.shape for name, one in whole.items()
    }
    assert all(torch.equal(one, whole[name]) for name, one in loaded["model"].items())


def test_retention_is_carried_out_by_rank_0_alone(two: Reports, folder: Path) -> None:
    """Test that complete checkpoints are kept."""
    assert [rank["sharded"]["prunes"] for rank in two] == [True, False]
    with Store.open(folder / "sharded" / "store", read_only=True) as store:
        assert [(one.step, one.complete) for one in store.checkpoints()] == [(2, True), (3, True)]
        assert not store.verify()


def test_diverged_replica_is_reported_and_saved(two: Reports) -> None:
    """Test one report on both ranks, with tensor, step and ranks."""
    for rank in two:
        (text,) = cast(list[str], rank["divergence"]["reports"])
        assert text.startswith("SilentDivergenceWarning: step 3 of run 'default': tensor model.1.weight differs")
        assert "between ranks 0 and 1 from byte 0 on, but was equal until step 2" in text
        assert rank["divergence"]["is_same"]
    assert two[0]["divergence"]["weight"] != two[1]["divergence"]["weight"]


def test_a_rank_that_fails_lets_all_lose_that_checkpoint_and_no_other(two: Reports) -> None:
    """Test that each rank gets the reason, and that the next attempt at the same step is restored."""
    first, second = (rank["failures"] for rank in two)
    full = "step 1 of run 'default' was not saved: rank 1: OutOfSpaceError: the disk of this test is full"
    assert first["refused save"] == f"LostCheckpointError: {full}"
    assert "the disk of this test is full" in str(second["refused save"])
    for found in (first, second):
        save_id, state = cast(list[str], found["attempts"])
        assert found["restored"] == f"returned {save_id!r}"
        assert found["restored bytes"] == state
    assert first["attempts"] != second["attempts"]


def test_unsupported_value_on_one_rank_fails_on_all(two: Reports) -> None:
    """Test also a rank that has not begun."""
    first, second = (rank["failures"] for rank in two)
    assert str(second["unstorable"]).startswith("UnsupportedValueError: cannot store state at object")
    assert "rank 1: UnsupportedValueError: cannot store state at object" in str(first["unstorable"])


def test_no_rank_trains_on_when_one_could_not_restore(two: Reports) -> None:
    """Test the own error on one rank, and its reason on the others."""
    first, second = (rank["failures"] for rank in two)
    assert str(second["unfitting"]).startswith("StateMismatchError: ")
    assert "rank 1: StateMismatchError" in str(first["unfitting"])
    assert str(first["unfitting"]).startswith("RankFailedError: ")


def test_ranks_with_different_steps_are_refused(two: Reports) -> None:
    """Test states that do not belong together."""
    for rank in two:
        assert "rank 0 saves step 4 where rank 1 saves step 5" in str(rank["failures"]["other steps"])


def test_a_rank_that_does_not_come_is_named(two: Reports) -> None:
    """Test the commit, which does not block the training, and the rendezvous."""
    first, second = (rank["failures"] for rank in two)
    lost = [
        text for text in cast(list[str], first["missing in the commit"]) if text.startswith("LostCheckpointWarning")
    ]
    assert len(lost) == 1
    assert "step 1 of run 'late'" in lost[0]
    assert "rank 1 did not respond" in lost[0]
    assert str(first["missing at the start"]).startswith(
        "RanksMissingError: finding each other: rank 1 did not respond"
    )
    outcome, texts = cast(tuple[str, list[str]], second["missing in step"])
    assert outcome == "returned False"
    assert texts[0].startswith("LostCheckpointWarning: step 2 of run 'late' was not saved: rank 0 saves step 1")


def test_errors_that_are_caught_leave_the_ranks_in_step(two: Reports) -> None:
    """Test errors of one rank alone; the other ranks get those that concern them."""
    first, second = (rank["caught"] for rank in two)
    disliked = "InvalidInputError: step {} is not liked"
    lost = "step 4 of run 'default' was not saved: rank 1: InvalidInputError: metric 'loss' is 'unknown'"
    begun = "returned True"
    steps = cast(list[str], first["steps"])
    assert steps[5].startswith(f"LostCheckpointError: {lost}")
    assert [*steps[:5], steps[6]] == [begun, begun, begun, disliked.format(2), begun, begun]
    steps = cast(list[str], second["steps"])
    assert steps[4].startswith("InvalidInputError: metric 'loss' is 'unknown'")
    assert [*steps[:4], *steps[5:]] == [begun, begun, disliked.format(1), begun, begun, begun]
    assert second["restored"] == [disliked.format(6), "returned 6"]
    assert first["rolled back"] == [disliked.format(7), "returned 7"]
    for number, heard in ((6, first["restored"]), (7, second["rolled back"])):
        refusal, again = cast(list[str], heard)
        assert refusal.startswith("RankFailedError: ")
        assert disliked.format(number) in refusal
        assert again == f"returned {number}"
    saved, again = cast(list[str], first["saved"])
    assert saved.startswith("returned <Checkpoint 'default' step 8,")
    assert again == "returned 9"
    assert second["saved"] == [disliked.format(8), "returned 9"]
    assert first["stored"] == second["stored"] == [0, 1, 2, 3, 5, 6, 7, 8, 9, 2]


def test_a_restore_of_different_steps_is_refused_and_a_session_is_left(two: Reports) -> None:
    """Test all ranks, and that the next restore succeeds."""
    for rank in two:
        refusal, restored = cast(list[str], rank["caught"]["other steps"])
        assert "rank 0 restores the newest checkpoint where rank 1 restores step 3" in refusal
        assert restored.startswith("returned <Checkpoint 'default' step 3,")
        assert rank["caught"]["left"]


def test_lower_step_warns_on_all_ranks(two: Reports) -> None:
    """Test also save(), whose code differs from that of a single process."""
    for rank in two:
        texts = cast(list[str], rank["caught"]["earlier step"])
        assert ["step 2 is saved after step 3" in text for text in texts].count(True) == 1


def test_ranks_of_unequal_speed_save_the_same_steps_by_an_interval_that_rank_0_chooses(two: Reports) -> None:
    """Test an interval for the slow rank, from its reports, also after a restore."""
    first, second = (rank["paced"] for rank in two)
    assert first["begun"] == second["begun"]
    assert first["chosen"] == second["chosen"]
    chosen, begun = cast(list[tuple[int, str]], first["chosen"]), cast(list[int], first["begun"])
    assert [steps for steps, _ in chosen[:3]] == [0, 0, 0]
    assert begun[0] == 1
    # All ranks then restored step 1. The next steps follow the announcements at the previous checkpoints, or are later
    # if the interval was found to be too short.
    went_back = next(number for number, (one, other) in enumerate(itertools.pairwise(begun), 1) if other < one)
    assert begun[went_back] > 2
    gaps = [later - earlier for earlier, later in itertools.pairwise(begun[went_back:])]
    said = [steps for steps, _ in chosen[went_back:-1]]
    assert len(gaps) == 4
    assert all(gap >= steps > 1 for gap, steps in zip(gaps, said, strict=True))
    assert all(step_s > 0.004 for step_s in cast(list[float], first["step_s"]))
    assert len(cast(list[float], first["step_s"])) == 2
    assert second["step_s"] == []


def test_run_of_another_process_is_refused_on_all_ranks(two: Reports) -> None:
    """Test a restore while another process trains the run, and a step and a rollback after a takeover."""
    first, second = (rank["run_in_use"] for rank in two)
    assert str(first["refused"]).startswith("RunInUseError: run default is trained by process ")
    assert str(second["refused"]).startswith("RankFailedError: rank 0: ")
    assert [rank["free"] for rank in (first, second)] == ["returned 0", "returned 0"]
    for own, others in zip(cast(list[str], first["taken over"]), cast(list[str], second["taken over"]), strict=True):
        assert own.startswith("RunInUseError: run default was taken over by process ")
        assert others.startswith("RankFailedError: ")
    assert first["stored"] == [0]
