"""Engines of DeepSpeed: saved on every rank, killed, resumed bit for bit, also by other ranks and in another stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asymcheck import Store
from asymcheck.interop.deepspeed import read_weights
from tests.interop.deepspeed_configs import COMPARED, CONFIGS, EVERY, KILLED_IN, STEPS
from tests.ranks.job import LIMIT_S, Meeting

pytestmark = pytest.mark.slow
PROGRAM = "tests.interop.deepspeed_ranks"
Told = dict[str, Any]


@pytest.fixture(scope="module")
def meeting() -> Meeting:
    """Where the ranks find each other."""
    return Meeting()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks train and nobody is killed."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(meeting: Meeting, folder: Path) -> list[Told]:
    """What each of them told of each engine."""
    return [one["whole"] for one in meeting.launch("whole", 2, folder, program=PROGRAM).wait()]


def test_what_was_killed_goes_on_as_if_it_had_not_been(meeting: Meeting, whole: list[Told], tmp_path: Path) -> None:
    """Rank 1 is killed in the middle of a step, rank 0 while it waits for it; losses and all tensors are the same."""
    job = meeting.launch("killed", 2, tmp_path, program=PROGRAM)
    assert job.processes[1].wait(LIMIT_S) == -9, job.output(1)
    job.kill(0)
    told = [one["resumed"] for one in meeting.launch("resumed", 2, tmp_path, program=PROGRAM).wait()]
    for name in CONFIGS:
        for rank in range(2):
            found, expected = told[rank][name], whole[rank][name]
            assert found["restored"] in range(EVERY, KILLED_IN, EVERY)
            assert found["losses"] == expected["losses"][found["restored"] :]
            assert found["digest"] == expected["digests"][str(STEPS)]


def test_one_rank_and_another_stage_take_what_two_ranks_saved(
    meeting: Meeting, whole: list[Told], folder: Path
) -> None:
    """One rank has whole tensors; they, and the low-precision ones, are those that two had."""
    (told,) = meeting.launch("others,refused", 1, folder, program=PROGRAM).wait()
    for what, digest in told["others"].items():
        run = what.split(" into ")[0]
        assert digest == whole[0][run]["digests"][str(COMPARED)], what
    refused = told["refused"]
    assert "give a DeepSpeed engine of stage 1, 2 or 3; of stage 0, give engine.module" in refused["stage 0"]
    assert "Linear of ZeRO stage None" in refused["no engine"]
    assert "1 micro steps were done, of which 2 make a step" in refused["between steps"]
    for text in (
        "nothing was overwritten",
        "engine.shapes.first.weight: [13, 7] is given, but [14, 7] is stored",
        "engine.shapes.fourth.bias: nothing is given, but [2] is stored",
        "engine.groups: 2 groups of parameters are given, but 0 are stored",
    ):
        assert text in refused["another model"]


def test_weights_and_moments_are_copied_beside_the_training(whole: list[Told]) -> None:
    """All but where frozen parameters lie in the same memory: in stage 3 with fp32 weights alone."""
    for name in CONFIGS:
        for told in whole:
            deferred = {one for one in told[name]["deferred"] if one.startswith(("engine.weights", "engine.optimizer"))}
            assert deferred == set(told[name]["deferred"])
            assert any(one.endswith("exp_avg_sq") for one in deferred)
            assert any(one.startswith("engine.weights") for one in deferred) == (name != "three-fp32")


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_read_whole_without_an_engine(whole: list[Told], folder: Path, name: str) -> None:
    """They are what DeepSpeed's own script makes of its own files, but for what is not trained."""
    expected = torch.load(folder / f"{name}.pt", weights_only=True)
    with Store.open(folder / "store", read_only=True) as store:
        found = read_weights(store, run=name)
    assert found.keys() == {"first.weight", "first.bias", "second.weight", "second.bias", "third.bias"}
    for key, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[key]), key
