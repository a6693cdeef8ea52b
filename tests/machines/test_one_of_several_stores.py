"""The store of one machine of several, by itself: what is unreadable, deleted, repaired or pulled there."""

from __future__ import annotations

import dataclasses
from pathlib import Path, PurePath

import pytest
import torch

from asymcheck import Part, Retention, Store
from asymcheck.errors import StorageError
from asymcheck.tiers.files import Files
from tests.ranks.launched import CONFIG

STEPS = 3


@pytest.fixture
def stores(tmp_path: Path) -> list[Path]:
    """Return the stores of two machines with a rank each, with the same steps."""
    paths = [tmp_path / f"machine-{rank}" for rank in range(2)]
    for rank, path in enumerate(paths):
        with Store.open(path, config=CONFIG) as store:
            request = store.request

            def of_a_part(*words: object, request: object = request, rank: int = rank) -> object:
                return dataclasses.replace(request(*words), store_ranks=((rank, rank),))  # type: ignore[operator]  # as it was

            store.request = of_a_part  # type: ignore[method-assign, assignment]  # as a Checkpointer of several makes it
            for step in range(STEPS):
                state = {"all": torch.full((9000,), step), f"rank-{rank}": torch.full((9000,), 10.0 * step + rank)}
                store.save(state, step=step, part=Part(rank, 2, f"{step + 1:016x}{7:016x}"))
    return paths


@pytest.fixture
def there(stores: list[Path], tmp_path: Path) -> str:
    """Return the location to which both have pushed."""
    location = (tmp_path / "there").as_uri()
    for path in stores:
        with Store.open(path, config=CONFIG) as store:
            assert len(store.push(location, everything=True).committed) == STEPS
    return location


def manifest_of(store: Path, step: int) -> Path:
    """Return the one manifest of a step."""
    (found,) = (store / "manifests" / "default").glob(f"00000001-{step:012d}-*/*")
    return found


def steps_in(path: Path | str, **more: str) -> list[tuple[int, str]]:
    """Return the complete steps of a store without damage, and whose parts it has."""
    with Store.open(path, config=CONFIG, **more) as store:  # type: ignore[arg-type]  # remote
        assert not store.verify()
        return [(one.step, one.ranks) for one in store.checkpoints() if one.complete]


def test_what_the_device_does_not_give_now_does_not_count_as_unfinished(
    stores: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that says which ranks save there cannot be read: nothing is deleted for that."""
    read_small, refused = Files.read_small, manifest_of(stores[0], 1)

    def read(files: Files, path: PurePath, limit: int) -> bytes | None:
        if path == refused:
            raise StorageError(f"cannot read {path}: Input/output error")
        return read_small(files, path, limit)

    with monkeypatch.context() as patch, Store.open(stores[0], config=CONFIG) as store:
        patch.setattr(Files, "read_small", read)
        with pytest.raises(StorageError, match="Input/output error"):
            store.prune(Retention(keep_last=2))
    assert steps_in(stores[0]) == [(0, "0 of 2"), (1, "0 of 2"), (2, "0 of 2")]


def test_a_repair_brings_what_belongs_there(stores: list[Path], there: str) -> None:
    """The only manifest is damaged: the one at the location says which ranks save there."""
    path = manifest_of(stores[1], 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with Store.open(stores[1], config=CONFIG, remote=there) as store:
        assert not store.repair().left
    assert steps_in(stores[1]) == [(0, "1 of 2"), (1, "1 of 2"), (2, "1 of 2")]


def test_a_pull_brings_what_others_saved(stores: list[Path], there: str) -> None:
    """A part of a checkpoint is not the checkpoint."""
    with Store.open(stores[1], config=CONFIG) as store:
        assert len(store.pull(there, 1).committed) == 1
        assert store.pull(there, 1).present == 1
        state = store.load(1)
    assert isinstance(state, dict)
    assert [float(state[f"rank-{rank}"][0]) for rank in range(2)] == [10.0, 11.0]
    assert steps_in(stores[1]) == [(0, "1 of 2"), (1, "2"), (2, "1 of 2")]
