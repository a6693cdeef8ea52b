"""Test common properties of the schemes of the workload ``models``, and DeepSpeed's engines in a separate process."""

from __future__ import annotations

import dataclasses
import multiprocessing
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import models
from benchmarks.async_peers import Saver, process_group, train
from benchmarks.models_child import Cell, Recovered
from benchmarks.schemes import SCHEMES, State

ENGINES = ["DeepSpeed Torch engine", "DeepSpeed Fast engine", "DeepSpeed Decoupled engine"]


def _scheme(name: str) -> models.Scheme:
    return next(scheme for scheme in SCHEMES if scheme.name == name)


def _state() -> tuple[nn.Linear, State]:
    model = nn.Linear(64, 64)
    return model, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def _engine_saves(name: str, where: Path, pipe: Connection) -> None:
    """Save two steps, and change the state at once; return the weights of both steps and of the recovery."""
    model, state = _state()
    with process_group():
        saver = _scheme(name).make(state, where)
        weights = []
        for step in (3, 4):
            saver.save(step)
            weights.append(model.weight.detach().clone())
            saver.before_optimizer()
            with torch.no_grad():
                model.weight.add_(1.0)
        saver.finish()
        other, empty = _state()
        recover = _scheme(name).recover
        assert recover is not None
        step = recover(empty, where)
    pipe.send((step, torch.equal(other.weight, weights[-1]), len(saver.stalls), len(saver.durable)))


@pytest.mark.long
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_deepspeed_brings_the_last_step_back(name: str, tmp_path: Path) -> None:
    """Test also the engine that writes from the state itself, which must end before the state changes."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_engine_saves, args=(name, tmp_path, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == (4, True, 2, 2)
    process.join()
    assert (tmp_path / "latest").read_text() == "4"


def test_unavailable_scheme_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Test that the others are measured, and that none is compared with an unmeasured scheme."""
    lacking = [
        dataclasses.replace(scheme, missing=lambda: "no such thing") if scheme.name == "safetensors" else scheme
        for scheme in SCHEMES
    ]
    monkeypatch.setattr(models, "SCHEMES", lacking)
    grid = models.Grid(["GPT-2"], "tiny", {1: 1}, ["safetensors", "torch.save"])
    assert models._runnable(grid).schemes == ["torch.save"]
    assert capsys.readouterr().out == "left out: safetensors (no such thing)\n"


def test_an_unfinished_run_has_the_most_important_cells() -> None:
    """Test the order of the cells: all models of asymcheck, one of another scheme, another interval, then the rest."""
    ours, other = "asymcheck +S+O", "torch.save"
    grid = models.Grid(["GPT-2", "BERT"], "tiny", {10: 3, 1: 2}, [ours, other])
    order = [(cell.model, cell.scheme, cell.every) for cell in grid.cells()]
    best = [("GPT-2", ours, 10), ("GPT-2", ours, models._KILL), ("BERT", ours, 10), ("BERT", ours, models._KILL)]
    best += [("GPT-2", other, 10), ("GPT-2", other, models._KILL), ("GPT-2", ours, 1)]
    rest = [("BERT", ours, 1), ("GPT-2", other, 1), ("BERT", other, 10), ("BERT", other, models._KILL)]
    assert order == [*best, *rest, ("BERT", other, 1)]


def test_failed_recovery_has_no_time() -> None:
    """Test two kills, one of which left no readable checkpoint: its error takes milliseconds."""
    cell = Cell("GPT-2", "tiny", "torch.save", models._KILL, 2)
    restored, failed = Recovered(6, 0.5, 1.0, is_exact=True), Recovered(-1, 0.001, 1.0, is_exact=False)
    medians = {one.metric: one.median for one in models._recovery_rows(cell, [(7, restored), (7, failed)])}
    assert (medians["recovery, GPT-2"], medians["steps lost, GPT-2"], medians["bit-exact, GPT-2"]) == (500, 4.5, 0.5)
    assert "recovery, GPT-2" not in {one.metric for one in models._recovery_rows(cell, [(7, failed)])}


def _never_answers(_pipe: Connection) -> None:
    time.sleep(600)


def test_process_of_a_cell_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that it no longer writes when the folder of the cell is removed."""
    monkeypatch.setattr(models, "_TIMEOUT_S", 0.1)
    before = multiprocessing.active_children()
    answer = models._asked(multiprocessing.get_context("forkserver"), _never_answers, ())
    assert (answer, multiprocessing.active_children()) == ("no answer in time", before)


def test_time_is_taken_when_the_first_checkpoints_are_done(tmp_path: Path) -> None:
    """Test a scheme that starts a process for its first checkpoint, which must not count for later ones."""
    told: list[str] = []

    class Watched(Saver):
        def save(self, step: int) -> None:
            told.append(f"save {step}")

        def drain(self) -> None:
            told.append("drain")

    train(lambda step: told.append(f"step {step}"), Watched({}, tmp_path), every=4, steps=2)
    before = ["step 0", "save 0", "step 1", "step 2", "save 2", "step 3", "step 4", "drain"]
    assert told == [*before, "step 5", "save 5", "step 6"]


def test_children_of_a_killed_training_are_ended() -> None:
    """Test a child process that would wait forever."""
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert models._children_of(parent.pid) == [child]
        with models._ended([child]):
            parent.kill()
            parent.wait()
            assert _runs(child)
        for _ in range(1000):
            if not _runs(child):
                break
            time.sleep(0.01)
        assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
