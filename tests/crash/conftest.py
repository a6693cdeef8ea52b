"""Fixtures: stores as starting points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from asymcheck.store import Store
from tests.crash.actions import Action, open_store, perform
from tests.crash.dead_rings import CAPTURED, DURABLE, copied, kill_when_ready
from tests.crash.trainer import train
from tests.zygote import Zygote

Template = Callable[[Sequence[Action]], Path]
"""Function that returns a folder with a store after some actions, and its journal. It is shared: copy it."""


@pytest.fixture(scope="session")
def template(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Template:
    """Return folders with a store and its journal, by the actions that made them."""
    made: dict[str, Path] = {}

    def make(actions: Sequence[Action]) -> Path:
        if repr(actions) not in made:
            folder = tmp_path_factory.mktemp("template")
            if actions:
                # Otherwise, no pack might be mostly garbage, and the collection would not copy frames.
                zygote.start(perform, path=str(folder), actions=actions, slots=1).finish()
            made[repr(actions)] = folder
        return made[repr(actions)]

    return make


@pytest.fixture
def stores(store_path: Path) -> Iterator[tuple[Store, Store]]:
    """Return one store opened twice."""
    with open_store(store_path) as one, open_store(store_path) as other:
        yield one, other


@pytest.fixture(scope="session")
def dead(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store, and the ring of a killed training that is ahead of it; copy it."""
    folder = tmp_path_factory.mktemp("dead")
    kill_when_ready(zygote.start(train, path=str(folder), steps=CAPTURED, durable=DURABLE), folder)
    return folder


@pytest.fixture
def folder(dead: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder."""
    return copied(dead, tmp_path / "copy")
