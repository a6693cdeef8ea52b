"""Test intact captures that a start cannot commit: their ring stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from asymcheck import Store
from asymcheck.errors import SkippedCheckpointWarning
from asymcheck.format import manifest_reader
from tests.checkpointer.loops import rings
from tests.crash.dead_rings import CAPTURED, DURABLE, kill_when_ready, refuse_rings
from tests.crash.trainer import assert_restored, train
from tests.zygote import Zygote


@pytest.mark.slow
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_recoverable_capture_stays_in_memory(zygote: Zygote, tmp_path: Path, how: str) -> None:
    """Test a capture whose head record is damaged: it is reported, and recovered after the repair of the record."""
    kill_when_ready(zygote.start(train, path=str(tmp_path), steps=1, durable=1), tmp_path)
    (done,) = rings(tmp_path)
    done.unlink()
    zygote.start(train, path=str(tmp_path), kill="capture.complete", number=1).wait_killed()
    (ring,) = rings(tmp_path)
    head = tmp_path / "store/heads/default/00000002.head"
    record = head.read_bytes()
    if how == "missing":
        head.unlink()
    else:
        head.write_bytes(bytes(len(record)))
    packs = sorted((tmp_path / "store/packs").iterdir())
    for _ in range(2):
        with Store.open(tmp_path / "store", create=True) as store, store.training.adopting(ring.parent) as adopted:
            (kept,) = adopted
            assert (kept.step, kept.ref) == (1, None)
            assert "the ring is kept" in kept.problem
    assert rings(tmp_path) == [ring]
    assert sorted((tmp_path / "store/packs").iterdir()) == packs, "it was written though it has no place"
    head.write_bytes(record)
    assert_restored(tmp_path, 1, 1)
    assert rings(tmp_path) == []


@pytest.mark.slow
def test_a_capture_of_another_line_of_the_same_number_is_not_committed(zygote: Zygote, tmp_path: Path) -> None:
    """Test a store restored from a copy that lacks the generation, in which training has opened another one."""
    kill_when_ready(zygote.start(train, path=str(tmp_path), steps=1, durable=1), tmp_path)
    (done,) = rings(tmp_path)
    done.unlink()
    zygote.start(train, path=str(tmp_path), kill="capture.complete", number=1).wait_killed()
    (ring,) = rings(tmp_path)
    (tmp_path / "store/heads/default/00000002.head").unlink()
    with Store.open(tmp_path / "store", create=True) as store:
        assert store.training.begin_generation(store.checkpoints()[-1]) == 2
        with store.training.adopting(ring.parent) as adopted:
            (kept,) = adopted
            assert (kept.step, kept.ref) == (1, None)
            assert "another line" in kept.problem
    assert rings(tmp_path) == [ring]
    ring.unlink()


def test_capture_of_a_newer_version_stays_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the warning, and that the newer version can recover the capture."""
    (ring,) = rings(folder)
    with monkeypatch.context() as newer:
        newer.setattr(manifest_reader, "check_reader_features", refuse_rings)
        with pytest.warns(SkippedCheckpointWarning, match=r"a checkpoint of run 'default' in memory: .*newer.*kept"):
            assert_restored(folder, DURABLE - 1, DURABLE - 1)
    assert rings(folder) == [ring]
    with Store.open(folder / "store", create=True) as store, store.training.adopting(ring.parent) as adopted:
        assert [one.step for one in adopted if one.ref is not None] == list(range(DURABLE, CAPTURED))
    assert rings(folder) == []
