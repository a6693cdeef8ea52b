"""Test the search for the best merge: its result, continuation after an interruption, and failing commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.convert.export_target import make_temporary_folder
from asymcheck.errors import InvalidInputError

pytest.importorskip("optuna", reason="the search needs optuna: pip install 'asymcheck[merge]'")

from asymcheck.merging.search import Evaluation, search  # after the check that optuna is installed

PROGRAM = """
import sys
from safetensors.torch import load_file
print("loss", abs(load_file(sys.argv[1] + "/model.safetensors")["weight"][0].item() - 0.75))
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[asymcheck.Store]:
    """Return a store with weights 0 and 1, whose best weight for the newer one is 0.75."""
    with asymcheck.Store.open(tmp_path / "stores" / "pair", create=True) as store:
        for step in (0, 1):
            store.save({"model": {"weight": torch.full((100,), float(step))}}, step=step)
        yield store


@pytest.fixture
def command(tmp_path: Path) -> str:
    """Return a command that prints the distance of the weight from 0.75."""
    program = tmp_path / "loss.py"
    program.write_text(PROGRAM)
    return f"{sys.executable} {program} {{folder}}"


@pytest.mark.slow
def test_an_interrupted_search_continues_to_the_best_weight(
    pair: asymcheck.Store, command: str, tmp_path: Path
) -> None:
    """Test an interruption after two trials, the number of trials, the result, and that no file is left."""
    seen: list[float] = []

    def note(number: int, value: float, _settings: object) -> None:
        seen.append(value)
        if number == 1:
            raise KeyboardInterrupt

    evaluation = Evaluation(command, tmp_path / "study.log", trials=6)
    with pytest.raises(KeyboardInterrupt):
        search(pair, [0, 1], evaluation, note=note)
    assert pair.runs() == ["default"]
    found = search(pair, [0, 1], evaluation, note=note)
    assert (len(seen), found.trials, found.best) == (6, 6, min(seen))
    assert found.best < 0.2
    state = pair.load(run="merged")
    assert abs(state["model"]["weight"][0].item() - 0.75) == pytest.approx(found.best, abs=1e-6)  # type: ignore[index]  # a dict
    assert [path.name for path in (tmp_path / "stores").iterdir()] == ["pair"]


@pytest.mark.parametrize(
    ("words", "method", "problem"),
    [
        ("false {folder}", "weighted", "exit status 1"),
        ("echo {folder} done", "weighted", "last word 'done' is no finite number"),
        ("echo 1", "weighted", "has no {folder}"),
        ("no-such-program {folder}", "weighted", "cannot run evaluation command 'no-such-program'"),
        ("echo {folder} 1", "mean", "method mean has no setting to search"),
        ("echo '{folder}", "weighted", "cannot split evaluation command .* No closing quotation"),
        (r"printf '\377 %s' {folder}", "weighted", "is no finite number"),
    ],
)
def test_a_failing_evaluation_is_named(
    pair: asymcheck.Store, tmp_path: Path, words: str, method: str, problem: str
) -> None:
    """Test the message, and that nothing is saved."""
    with pair, pytest.raises(InvalidInputError, match=problem):
        search(pair, [0, 1], Evaluation(words, tmp_path / "study.log", trials=2), method=method)
    with asymcheck.Store.open(pair.path, read_only=True) as opened:
        assert opened.runs() == ["default"]


def test_the_folder_of_a_killed_search_is_removed(pair: asymcheck.Store, tmp_path: Path) -> None:
    """Test that the next search removes the folder, which has two models."""
    own = make_temporary_folder(pair.path.parent / "asymcheck-merge")
    killed = own.rename(own.with_name(own.name.replace(f".{os.getpid()}-", ".1-")))
    with pytest.raises(InvalidInputError, match="exit status 1"):
        search(pair, [0, 1], Evaluation("false {folder}", tmp_path / "study.log", trials=1))
    assert not killed.exists()
    assert [path.name for path in (tmp_path / "stores").iterdir()] == ["pair"]


@pytest.mark.slow
def test_a_search_with_another_base_has_its_own_trials(pair: asymcheck.Store, command: str, tmp_path: Path) -> None:
    """Test that results of one base do not count for another one in the same file."""
    seen: list[float] = []
    evaluation = Evaluation(command, tmp_path / "study.log", trials=1)
    for base in (0, 1):
        search(pair, [0, 1], evaluation, method="ties", base=base, note=lambda _number, value, _: seen.append(value))
    assert len(seen) == 2


@pytest.mark.slow
@pytest.mark.parametrize("change", ["direction", "weights"])
def test_trials_of_another_direction_or_save_do_not_count(
    pair: asymcheck.Store, command: str, tmp_path: Path, change: str
) -> None:
    """Test --maximize with the file of a search for the smallest number, and a step that was saved again."""
    seen: list[float] = []
    study = tmp_path / "study.log"

    def found(*, maximize: bool) -> float:
        evaluation = Evaluation(command, study, trials=2, maximize=maximize)
        return search(pair, [0, 1], evaluation, note=lambda _number, value, _settings: seen.append(value)).best

    assert found(maximize=False) == min(seen)
    if change == "weights":
        pair.save({"model": {"weight": torch.full((100,), 9.0)}}, step=1)
    assert found(maximize=change == "direction") == (max(seen[2:]) if change == "direction" else min(seen[2:]))
    assert len(seen) == 4
