"""Test that the workload ``models`` compares resumed states with reports, and handles failing processes."""

from __future__ import annotations

import dataclasses
import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks import models, models_child
from benchmarks.async_peers import Saver
from benchmarks.models_child import Cell, train_until_killed
from benchmarks.schemes import Kind, Scheme, State


class _Told:
    """Stands for the pipe to the killing process: the reported steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def send(self, told: tuple[int, bytes, float]) -> None:
        step, digest, seconds = told
        assert digest
        assert seconds > 0
        self.steps.append(step)


def test_step_is_reported_before_it_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that no kill can leave a checkpoint of an unreported step."""
    told = _Told()
    saved: list[int] = []

    class Watched(Saver):
        def save(self, step: int) -> None:
            assert told.steps[-1] == step
            saved.append(step)

    def make(state: State, where: Path) -> Saver:
        return Watched(state, where)

    monkeypatch.setattr(models_child, "scheme_of", lambda cell: Scheme(cell.scheme, "asymcheck", make, None))
    monkeypatch.setattr(models_child, "_be_silent", lambda: None)
    monkeypatch.setattr(models_child, "_keep_rings_in", lambda _: None)
    train_until_killed(Cell("GPT-2", "tiny", "watched", every=2, steps=5), tmp_path, cast("Connection", told))
    assert saved == [0, 2, 4]
    assert told.steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("kind", "step"), [("upstream", -1), ("asymcheck", None)])
def test_torn_file_is_a_result_for_peers_only(
    kind: Kind, step: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that for asymcheck, an unreadable file is a defect, and ends the workload."""

    def recover(_state: State, _where: Path) -> int:
        raise EOFError("half a file")

    monkeypatch.setattr(models_child, "scheme_of", lambda cell: Scheme(cell.scheme, kind, Saver, recover))
    monkeypatch.setattr(models_child, "_be_silent", lambda: None)
    monkeypatch.setattr(models_child, "_keep_rings_in", lambda _: None)
    answers: list[object] = []
    pipe = SimpleNamespace(send=answers.append, close=lambda: None)
    models_child.recover(Cell("GPT-2", "tiny", "torn", every=1, steps=1), tmp_path, {}, cast("Connection", pipe))
    (answer,) = answers
    if step is None:
        assert answer == "EOFError: half a file"
    else:
        assert isinstance(answer, models_child.Recovered)
        assert (answer.step, answer.is_exact) == (step, False)


def test_failing_library_has_no_rows_and_asymcheck_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Test cells whose process answers with the text of an error."""
    monkeypatch.setattr(models, "_asked", lambda *_: "EOFError: half a file")
    context = cast("ForkServerContext", None)
    cell = Cell("GPT-2", "tiny", "safetensors", every=1, steps=1)
    assert models._measured_cell(context, cell, tmp_path) == ([], "")
    assert capsys.readouterr().out == f"{cell}: EOFError: half a file\n"
    with pytest.raises(SystemExit, match=r"asymcheck \+S\+O.*: EOFError: half a file"):
        models._measured_cell(context, dataclasses.replace(cell, scheme=models.OURS), tmp_path)


def test_library_that_ends_early_has_no_recovery(tmp_path: Path) -> None:
    """Test that a training which ends before its kill does not end the workload."""
    process = SimpleNamespace(start=lambda: None, kill=lambda: None, join=lambda: None, pid=None)
    context = cast("ForkServerContext", SimpleNamespace(Pipe=multiprocessing.Pipe, Process=lambda **_: process))
    cell = Cell("GPT-2", "tiny", "safetensors", every=models._KILL, steps=1)
    assert models._measured_cell(context, cell, tmp_path) == ([], "")
