"""Pushing beside a training: it never stops one, and what is durable arrives."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import asymcheck.migration.pushing as module
from asymcheck import Checkpointer, Moved, Store, UnreachableRemoteWarning
from asymcheck.errors import InvalidInputError, RemoteUnreachableError
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.reading import ReadTier
from asymcheck.tiers.remote import RemoteTier
from asymcheck.tiers.remote.files import RemoteFiles
from tests.crash.zygote import wait_until
from tests.remote.conftest import CONFIG, check_location, check_state, config, state_of

NOWHERE = "hdfs://127.0.0.1:1/x"
IMPATIENT = config(deadline_s=20.0, options={"dfs.client.failover.max.attempts": "1"})


def test_every_so_many_steps_arrive(store_path: Path, place: str) -> None:
    """While the training saves in the background; the others stay here."""
    state = dict(state_of(0))
    with Store.open(store_path, config=CONFIG) as store, store.pushing(place, every=2) as pushing:
        with Checkpointer(store, state) as checkpointer:
            for step in range(5):
                state.update(state_of(step))
                checkpointer.step(step)
            checkpointer.wait()
        wait_until(lambda: pushing.statistics().pushed > 0, "a checkpoint to be pushed before the end")
    assert pushing.statistics() == pushing.close()
    assert (pushing.statistics().pushed, pushing.statistics().backlog, pushing.statistics().problem) == (3, 0, "")
    check_location(place, 0, 2, 4)


def test_the_newest_goes_first(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When there is a backlog: it is what a lost machine would need."""
    order: list[int] = []
    real = module.push

    def push(here: ReadTier, there: RemoteTier, listings: list[CheckpointFiles], *words: object) -> Moved:
        order.extend(listing.ref.step for listing in listings)
        return real(here, there, listings, *words)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(module, "push", push)
    with Store.open(store, config=CONFIG) as opened:
        opened.pushing(folder).close()
    assert order == [2, 1]


def test_a_location_that_does_not_answer_stops_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves go on, the backlog grows and can be seen, and the end warns once."""
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    with Store.open(store, config=IMPATIENT) as opened:
        pushing = opened.pushing(NOWHERE)
        wait_until(lambda: pushing.statistics().failures > 0, "a push to fail")
        assert pushing.statistics().backlog == 2
        opened.save(state_of(3), step=3)
        wait_until(lambda: pushing.statistics().backlog == 3, "the backlog to grow")
        assert "RemoteUnreachableError" in pushing.statistics().problem
        with pytest.warns(UnreachableRemoteWarning, match="3 checkpoints were not pushed"):
            pushing.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pushing.close()
        check_state(opened.load(), 3)


def test_it_goes_on_when_the_location_is_back(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself."""
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    whole = RemoteFiles.write
    left = [3]

    def write(self: RemoteFiles, *words: object) -> int:
        if left[0]:
            left[0] -= 1
            raise RemoteUnreachableError("not now")
        return whole(self, *words)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(RemoteFiles, "write", write)
    with Store.open(store, config=config(attempts=1)) as opened, opened.pushing(folder) as pushing:
        wait_until(lambda: pushing.statistics().pushed == 2, "the checkpoints to be pushed")
    assert pushing.statistics().failures == 3
    check_location(folder, 1, 2)


def test_one_that_is_damaged_here_does_not_hold_up_the_others(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, and not tried for ever."""
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    newest = max((store / "packs").iterdir(), key=lambda pack: pack.stat().st_mtime_ns)
    newest.unlink()
    with Store.open(store, config=CONFIG) as opened:
        pushing = opened.pushing(folder)
        wait_until(lambda: pushing.statistics().pushed == 1, "the other one to be pushed")
        pushing.close()
    assert pushing.statistics().failures == 1
    check_location(folder, 1)


@pytest.mark.parametrize("every", [0, True, 1.5])
def test_an_interval_that_is_none(store: Path, folder: str, every: object) -> None:
    """It is refused at once."""
    with Store.open(store, config=CONFIG) as opened, pytest.raises(InvalidInputError, match="every="):
        opened.pushing(folder, every=every)  # type: ignore[arg-type]  # wrong on purpose
