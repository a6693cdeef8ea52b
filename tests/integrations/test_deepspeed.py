"""Test DeepSpeed engines: saved on every rank, killed, and resumed bit for bit, also with other ranks and stages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from asymcheck import Store
from asymcheck.cli.main import commands
from asymcheck.convert.convert import foreign_state
from asymcheck.errors import ForeignFileError, InvalidInputError
from asymcheck.integrations.deepspeed import read_weights
from tests.distributed.job import LIMIT_S, Meeting
from tests.integrations.deepspeed_configs import COMPARED, CONFIGS, EVERY, KILLED_IN, STEPS
from tests.zygote import Zygote

pytestmark = pytest.mark.slow
PROGRAM = "tests.integrations.deepspeed_ranks"
Reports = dict[str, Any]


@pytest.fixture(scope="module")
def meeting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meeting]:
    """Return the rendezvous of the ranks."""
    zygote = Zygote(tmp_path_factory.mktemp("zygote"), "deepspeed")
    yield Meeting(zygote)
    zygote.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a training of two ranks without a kill."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(meeting: Meeting, folder: Path) -> list[Reports]:
    """Return the reports of each rank on each engine."""
    return [one["whole"] for one in meeting.launch("whole", 2, folder, program=PROGRAM).wait()]


@pytest.mark.slow
def test_resumed_training_is_identical(meeting: Meeting, whole: list[Reports], tmp_path: Path) -> None:
    """Test a kill of rank 1 during a step, and of rank 0 while it waits: losses and tensors are equal."""
    job = meeting.launch("killed", 2, tmp_path, program=PROGRAM)
    assert job.processes[1].has_ended(LIMIT_S), job.output(1)
    job.processes[1].wait_killed()
    job.kill(0)
    reports = [one["resumed"] for one in meeting.launch("resumed", 2, tmp_path, program=PROGRAM).wait()]
    for name in CONFIGS:
        for rank in range(2):
            found, expected = reports[rank][name], whole[rank][name]
            assert found["restored"] in range(EVERY, KILLED_IN, EVERY)
            assert found["losses"] == expected["losses"][found["restored"] :]
            assert (EVERY <= expected["skipped"] < COMPARED) == (name == "two"), expected["skipped"]
            assert found["again"] == [expected["losses"][EVERY:], found["digest"]]
            assert found["digest"] == expected["digests"][str(STEPS)]


@pytest.mark.slow
def test_one_rank_with_another_stage_reads_two_ranks(
    meeting: Meeting, whole: list[Reports], folder: Path, tmp_path: Path
) -> None:
    """Test that its whole tensors equal those of the two ranks."""
    shutil.copytree(folder / "store", tmp_path / "store")
    (reports,) = meeting.launch("others,refused", 1, tmp_path, program=PROGRAM).wait()
    for what, digest in reports["others"].items():
        run = what.split(" into ")[0]
        assert digest == whole[0][run]["digests"][str(COMPARED)], what
    refused = reports["refused"]
    assert "pass a DeepSpeed engine of stage 1, 2 or 3" in refused["stage 0"]
    assert "Linear of ZeRO stage None" in refused["no engine"]
    assert "1 micro steps are done, and 2 make a step" in refused["between steps"]
    assert "weights: missing in the checkpoint" in refused["no checkpoint of an engine"]
    for text in (
        "nothing was overwritten",
        "engine.shapes.first.weight: [13, 7] is given, but [14, 7] is stored",
        "engine.shapes.fourth.bias: nothing is given, but [2] is stored",
        "engine.groups: 2 groups of parameters are given, but 0 are stored",
    ):
        assert text in refused["another model"]


@pytest.mark.slow
def test_weights_and_moments_are_copied_beside_the_training(whole: list[Reports]) -> None:
    """Test copies at the fence, with a full comparison of every capture with the state in step()."""
    beside = ("engine.weights.", "engine.optimizer.")
    for reports in whole:
        for name in CONFIGS:
            assert any(one.endswith(".exp_avg_sq") for one in reports[name]["deferred"])
            assert all(one.startswith(beside) for one in reports[name]["deferred"])
            assert [one for one in reports[name]["eager"] if one.startswith(beside)] == [], name


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_of_deepspeed_becomes_whole_tensors(
    whole: list[Reports], folder: Path, tmp_path: Path, name: str
) -> None:
    """Test weights against DeepSpeed's own program, and moments against the engine."""
    saved = Path(shutil.copytree(folder / "saved" / name, tmp_path / "saved"))
    (saved / "config.json").write_text("{}")
    done = CliRunner().invoke(commands, ["convert", str(saved), str(tmp_path / "store"), "--step", str(STEPS)])
    assert done.exit_code == 0, done.output
    assert f"did not convert config.json in {saved}. " in done.output
    with Store.open(tmp_path / "store", read_only=True) as store:
        state: Any = store.load()
    with Store.open(folder / "store", read_only=True) as store:
        engine: Any = store.load(run=name)["engine"]  # type: ignore[index]  # a dict, as it was saved
        weights = read_weights(store, run=name)
    expected = weights
    if name != "one-sums":
        expected = torch.load(folder / f"{name}.pt", weights_only=True)
        assert weights.keys() == {"first.weight", "first.bias", "second.weight", "second.bias", "third.bias"}
        assert all(torch.equal(weights[key], expected[key]) for key in weights)
        # Frozen weights are missing in stage 1.
        assert state["model"].keys() - expected.keys() <= {"last.weight", "last.bias"}
    for key, tensor in expected.items():
        assert torch.equal(state["model"][key].float(), tensor), key
    assert state["model"]["last.weight"].shape == (5, 13)
    assert torch.equal(state["model"]["last.bias"], engine["frozen"]["last.bias"])
    assert torch.equal(state["model"]["third.weight"], state["model"]["second.weight"])
    for key, moments in engine["optimizer"].items():
        converted = state["optimizer"]["state"][key]
        for moment, flat in moments.items():
            assert torch.equal(converted[moment].view(-1), flat), (key, moment)
            assert converted[moment].shape == engine["shapes"][key]
    groups = state["optimizer"]["param_groups"]
    taken = STEPS - whole[0][name]["skipped"]
    assert [(group["weight_decay"], group["step"]) for group in groups] == [(0.1, taken), (0.0, taken)]
    assert state["counters"]["global_steps"] == STEPS
    assert state["client_state"] == {"epoch": 3, "files": ["a", "b"]}


def test_weights_of_another_object_are_refused(tmp_path: Path) -> None:
    """Test keys of modules, whose tensors have similar names, and a glob instead of a key."""
    with Store.open(tmp_path / "store", create=True) as store:
        store.save({"model": torch.nn.Linear(2, 2), "parts": [torch.nn.Linear(2, 2)]}, step=1)
        for part in ("model", "parts.0", "m*"):
            with pytest.raises(InvalidInputError, match="is no state of a DeepSpeed engine"):
                read_weights(store, part=part)


class Hostile:
    """Runs a program when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the program."""
        return (Path.touch, (self.path,))


@pytest.mark.slow
def test_folders_that_lack_files_or_hold_programs_are_refused(
    whole: list[Reports], folder: Path, tmp_path: Path
) -> None:
    """Test that no code in them is run, and that no store is created."""
    for name in ("one", "three"):
        copy = tmp_path / name
        shutil.copytree(folder / "saved" / name, copy)
        (tag,) = (one for one in copy.iterdir() if one.is_dir())
        first, second = sorted(tag.glob("*_optim_states.pt"))
        good = first.read_bytes()
        torch.save({"optimizer_state_dict": {}, "more": Hostile(tmp_path / "ran")}, first)
        assert "pickled object of" in refused(copy)
        first.write_bytes(good[: len(good) // 2])
        refused(copy)
        first.write_bytes(good)
        assert refused(copy) == ""
        second.unlink()
        assert "files of 1 of 2 ranks found" in refused(copy)
        first.rename(tag / first.name.replace("mp_rank_00", "mp_rank_01"))
        assert "tensor parallelism are not supported" in refused(copy)
    assert not (tmp_path / "ran").exists()


def refused(folder: Path) -> str:
    """Return the error of a folder, or nothing."""
    try:
        with foreign_state(folder):
            return ""
    except ForeignFileError as error:
        return str(error)
