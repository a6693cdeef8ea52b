"""Parts of files of torch.save that also hold objects of custom classes, whose code is never executed."""

from __future__ import annotations

import argparse
import collections
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asymcheck import Store
from asymcheck.convert.convert import foreign_state
from asymcheck.errors import ForeignFileError, InvalidInputError
from tests.store.equality import assert_same


class Plain:
    """An object with attributes."""

    def __init__(self) -> None:
        self.tensor = torch.ones(3)


class Mapping(dict[str, Any]):
    """A subclass of dict, as in many configurations."""


class Sequence(list[Any]):
    """A subclass of list."""


class Trap:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path: Path, function: object = Path.touch) -> None:
        self.path, self.function = path, function

    def __reduce__(self) -> tuple[object, ...]:
        return self.function, (self.path,)


def custom(path: Path) -> dict[str, Any]:
    """Return objects that torch refuses to load."""
    mapping = Mapping(a=1)
    mapping.attribute = 2  # type: ignore[attr-defined]  # an attribute of the subclass
    return {
        "plain": Plain(),
        "mapping": mapping,
        "namespace": argparse.Namespace(lr=0.1),
        "default": collections.defaultdict(list, {"a": [1]}),
        "array": np.arange(3.0),
        "scalar": np.float64(2.5),
        "path": path,
        "deque": collections.deque([1, torch.ones(2)]),
        "list": Sequence([1, 2, 3]),
        "one": Sequence([Plain()]),
        "function": torch.nn.functional.relu,
        "trap": Trap(path / "touched"),
    }


@pytest.mark.parametrize("legacy", [False, True])
def test_part_is_imported_beside_objects_of_custom_classes(store_path: Path, tmp_path: Path, *, legacy: bool) -> None:
    """Test all kinds of objects: only the named parts are stored, and no code of the file runs."""
    state = {
        "model": {"a.w": torch.randn(30), "a.b": torch.ones(2)},
        "optimizer": {"lr": 0.1, "m": {"x": torch.ones(4)}},
    }
    objects = custom(tmp_path)
    torch.save({"hparams": objects, **state}, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    with Store.open(store_path, create=True) as store:
        for parts, expected in (
            (("model", "optimizer"), state),
            (
                ("optimizer.m", "model.a.w"),
                {"model": {"a.w": state["model"]["a.w"]}, "optimizer": {"m": {"x": torch.ones(4)}}},
            ),
        ):
            with foreign_state(tmp_path / "a.pt", parts=parts) as imported:
                store.save(imported, step=1)
            assert_same(store.load(), expected)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", sorted(custom(Path())))
def test_part_with_an_object_of_a_custom_class_is_refused(tmp_path: Path, name: str) -> None:
    """Test each kind of object: the error names the class and suggests all other parts, tensors first."""
    state = {"epoch": 3, "model": {"w": torch.ones(3)}, "odd": {"deep": [custom(tmp_path)[name]]}}
    torch.save(state, tmp_path / "a.pt")
    path = tmp_path / "a.pt"
    problem = r"the part odd holds a pickled object of \S+, which is never"
    with pytest.raises(ForeignFileError, match=problem), foreign_state(path, parts=["odd"]):
        pass
    advice = "pass --part model --part epoch to import only parts without"
    with pytest.raises(ForeignFileError, match=advice), foreign_state(path):
        pass
    assert not (tmp_path / "touched").exists()


def test_module_that_cannot_be_imported_is_no_obstacle(tmp_path: Path) -> None:
    """Test a class of a module that exists only where the file was written, and whose import would write a file."""
    module = types.ModuleType("elsewhere")
    kind = type("Config", (), {"__module__": "elsewhere"})
    module.Config = kind  # type: ignore[attr-defined]  # a new module
    sys.modules["elsewhere"] = module
    try:
        torch.save({"model": torch.ones(3), "config": kind()}, tmp_path / "a.pt")
    finally:
        del sys.modules["elsewhere"]
    with foreign_state(tmp_path / "a.pt", parts=["model"]) as state:
        assert isinstance(state, dict)
        assert list(state) == ["model"]
    assert "elsewhere" not in sys.modules


def test_functions_of_the_operating_system_are_not_called(tmp_path: Path) -> None:
    """Test a file that would call os.system: another part is imported."""
    torch.save({"model": torch.ones(3), "odd": Trap(tmp_path / "made", os.mkdir)}, tmp_path / "a.pt")
    with pytest.raises(ForeignFileError, match=r"posix\.mkdir"), foreign_state(tmp_path / "a.pt"):
        pass
    with foreign_state(tmp_path / "a.pt", parts=["model"]) as state:
        assert isinstance(state, dict)
        assert list(state) == ["model"]
    assert not (tmp_path / "made").exists()


def test_missing_part_is_named_with_the_parts_of_the_file(tmp_path: Path) -> None:
    """Test a name that is only the beginning of a key."""
    torch.save({"model": {"w": torch.ones(3)}, "epoch": 3}, tmp_path / "a.pt")
    problem = "has no part 'mod'; it has model, epoch"
    with pytest.raises(InvalidInputError, match=problem), foreign_state(tmp_path / "a.pt", parts=["model", "mod"]):
        pass
