"""Test drafts of killed exports: the next export removes them, and restores replaced folders."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from asymcheck import Store
from asymcheck.convert import export_target
from asymcheck.convert.convert import Output, export_checkpoint
from asymcheck.convert.export_target import Draft
from asymcheck.errors import InvalidInputError
from tests.zygote import Zygote

KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import asymcheck.cli
from asymcheck.convert import export_target as target

def stop(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def rename(self, target, rename=Path.rename):
    if self.name.endswith(".partial"):
        stop()
    return rename(self, target)

where = sys.argv.pop(1)
if where == "while it is written":
    target.TargetFile.sync = stop
elif where == "between the renames":
    Path.rename = rename
elif where == "before the old one is removed":
    target.shutil.rmtree = stop
asymcheck.cli.main()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder for exports, next to a store with one checkpoint."""
    with Store.open(tmp_path / "store", create=True) as store:
        store.save({"w": torch.full((300,), 2.0)}, step=1)
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def _kill(zygote: Zygote, place: Path, name: str, where: str) -> list[str]:
    """Kill an export to ``name``; return the leftovers."""
    words = ("restore", str(place.parent / "store"), "--to", str(place / name), "--overwrite")
    done = zygote.run_script(KILLED, where, *words)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return sorted(path.name for path in place.iterdir())


def _export(place: Path, name: str, *, overwrite: bool = False) -> list[str]:
    """Export again; return the files."""
    with Store.open(place.parent / "store", read_only=True) as store:
        export_checkpoint(store, Output(place / name, overwrite=overwrite))
    return sorted(path.name for path in place.iterdir())


def _old_model(place: Path) -> None:
    (place / "m").mkdir()
    safetensors.torch.save_file({"w": torch.ones(3)}, place / "m" / "model.safetensors")


def _weights(place: Path) -> float:
    return float(safetensors.torch.load_file(place / "m" / "model.safetensors")["w"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m", "[*].pt"])
def test_a_draft_of_a_killed_process_is_removed(zygote: Zygote, place: Path, name: str) -> None:
    """Test that only drafts of the same target are removed, which are hidden and as large as a checkpoint."""
    others = _kill(zygote, place, "m.other.pt", "while it is written")
    left = set(_kill(zygote, place, name, "while it is written")) - set(others)
    assert (len(others), len(left)) == (1, 1)
    assert left.pop().startswith(f".{name}.")
    assert _export(place, name) == sorted([*others, name])


def test_drafts_of_running_processes_stay(place: Path) -> None:
    """Test drafts of this process, another one, and another machine, and files that are no drafts."""
    waiting = f"""
import sys
from pathlib import Path
from asymcheck.convert.export_target import Draft
Draft(Path({str(place / "m.pt")!r}), overwrite=False).file()
print(flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        own = Draft(place / "m.pt", overwrite=False)
        own.file()
        for name in (".m.pt.1234567-5-00000000000000aa-01234567.partial", ".m.pt.01234567.partial", ".m.pt.x"):
            (place / name).touch()
        before = sorted(path.name for path in place.iterdir())
        assert len(before) == 5
        assert _export(place, "m.pt") == sorted([*before, "m.pt"])
        process.communicate()
    assert len(_export(place, "m.pt", overwrite=True)) == len(before)
    own.discard()


@pytest.mark.slow
def test_a_folder_whose_replacement_was_killed_is_given_back(zygote: Zygote, place: Path) -> None:
    """Test a kill between two renames: the next export finds the old folder and restores its name."""
    _old_model(place)
    left = _kill(zygote, place, "m", "between the renames")
    assert [name.rpartition(".")[2] for name in left] == ["partial", "old"]
    with pytest.raises(InvalidInputError, match="m exists; choose another name"):
        _export(place, "m")
    assert [path.name for path in place.iterdir()] == ["m"]
    assert _weights(place) == 1
    assert _export(place, "m", overwrite=True) == ["m"]
    assert _weights(place) == 2


@pytest.mark.slow
def test_a_folder_that_was_replaced_is_not_given_back(zygote: Zygote, place: Path) -> None:
    """Test a kill after the renames: the old folder is removed, also if the new one was deleted since."""
    _old_model(place)
    left = _kill(zygote, place, "m", "before the old one is removed")
    assert [name for name in left if not name.endswith(".partial")] == ["m"]
    assert len(left) == 2
    assert _weights(place) == 2
    (place / "m").rename(place / "moved")
    assert _export(place, "m") == ["m", "moved"]
    assert _weights(place) == 2


@pytest.mark.slow
def test_undeletable_draft_is_no_error(zygote: Zygote, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a draft of another user."""
    left = _kill(zygote, place, "m.pt", "while it is written")

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(export_target.Path, "unlink", refuse)
    assert _export(place, "m.pt") == [*left, "m.pt"]
