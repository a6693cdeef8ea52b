"""Test the choice of the newest checkpoint: the line of training, branches, and steps out of order."""

import threading
import warnings
from collections.abc import Callable

import pytest

from asymcheck import Checkpoint, Retention, Store
from asymcheck.commit import save_request
from asymcheck.errors import (
    CheckpointNotFoundError,
    HeadRecordError,
    InconsistentCheckpointError,
    InvalidInputError,
    SkippedCheckpointWarning,
    StepOrderWarning,
)
from tests.damage.flips import flip


def _save(store: Store, step: int, value: object = None, generation: int | None = None) -> Checkpoint:
    return store.save({"value": f"{step}" if value is None else value}, step=step, generation=generation)


def _value(state: object) -> object:
    assert isinstance(state, dict)
    return state["value"]


def _listing(store: Store) -> list[tuple[int, int, bool]]:
    return [(c.generation, c.step, c.on_line) for c in store.checkpoints()]


def _checkpoint(store: Store, generation: int, step: int) -> Checkpoint:
    (found,) = [c for c in store.checkpoints() if (c.generation, c.step) == (generation, step)]
    return found


def test_the_newest_is_the_highest_step(store: Store) -> None:
    """Test one line without restores, which is listed oldest first."""
    for step in (1, 5, 10):
        assert _save(store, step).on_line
    assert _value(store.load()) == "10"
    assert _listing(store) == [(1, 1, True), (1, 5, True), (1, 10, True)]


def test_an_earlier_step_warns_and_is_not_the_newest(store: Store) -> None:
    """Test the warning, which points at the caller and says how to continue from an earlier step."""
    _save(store, 10)
    with pytest.warns(StepOrderWarning, match="restore that step with a Checkpointer first") as caught:
        store.save({"value": "late"}, step=4)
    assert caught[0].filename == __file__
    assert _value(store.load()) == "10"
    assert _value(store.load(4)) == "late"


def test_step_saved_twice_has_two_checkpoints(store: Store) -> None:
    """Test that the later save counts, by step and as the newest."""
    first, second = _save(store, 3, "first"), _save(store, 3, "second")
    assert first.save_id < second.save_id
    assert _value(store.load()) == _value(store.load(3)) == "second"
    assert [c.save_id for c in store.checkpoints()] == [first.save_id, second.save_id]


def test_step_saved_again_after_the_clock_was_set_back_is_the_newest(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test two processes that save the same step, and a clock that is an hour behind in the second one."""
    first = _save(store, 3, "first")
    monkeypatch.setattr(save_request, "now_ns", lambda: first.created_ns - 3600 * 10**9)
    second = _save(store, 3, "second")
    assert first.save_id < second.save_id
    assert _value(store.load()) == _value(store.load(3)) == "second"
    assert [c.save_id for c in store.prune(Retention(keep_last=1)).removed] == [first.save_id]


def test_resuming_from_an_older_step_abandons_later_ones(store: Store) -> None:
    """Test that the newest checkpoint is on the new line, and that abandoned steps can be loaded by step."""
    for step in range(1, 6):
        _save(store, step)
    assert store.training.begin_generation(_checkpoint(store, 1, 2)) == 2
    assert _listing(store) == [(1, 1, True), (1, 2, True), (1, 3, False), (1, 4, False), (1, 5, False)]
    assert _value(store.load()) == "2"
    _save(store, 3, "again")
    assert _value(store.load()) == "again"
    assert _value(store.load(3)) == "again"
    assert _value(store.load(5)) == "5"
    restored = store.restore(5)
    assert (restored.checkpoint.generation, restored.checkpoint.on_line) == (1, False)
    assert store.restore(3).checkpoint.on_line


def test_a_new_line_from_nothing_abandons_everything(store: Store) -> None:
    """Test that the first save on the new line is the newest checkpoint, although its step is lower."""
    _save(store, 100)
    store.training.begin_generation(None)
    with pytest.raises(CheckpointNotFoundError, match=r"all 1 checkpoints .* up to step 100, are abandoned.*step=100"):
        store.load()
    _save(store, 1, "new")
    assert _value(store.load()) == "new"
    assert _listing(store) == [(1, 100, False), (2, 1, True)]


@pytest.mark.slow
def test_the_line_is_followed_through_many_generations(store: Store) -> None:
    """Test many restores, each of which abandons some steps."""
    for generation in range(1, 6):
        base = 10 * generation
        for step in range(base, base + 4):
            _save(store, step)
        store.training.begin_generation(_checkpoint(store, generation, base + 1))
    assert [step for _, step, on_line in _listing(store) if on_line] == [10, 11, 20, 21, 30, 31, 40, 41, 50, 51]
    assert _value(store.load()) == "51"


def test_an_abandoned_branch_can_be_taken_up_again(store: Store) -> None:
    """Test that the branch is on the line again, and that the other branch is abandoned."""
    for step in (1, 2, 3):
        _save(store, step)
    store.training.begin_generation(_checkpoint(store, 1, 1))
    _save(store, 2, "other")
    store.training.begin_generation(_checkpoint(store, 1, 3))
    assert _listing(store) == [(1, 1, True), (1, 2, True), (1, 3, True), (2, 2, False)]
    assert _value(store.load()) == "3"
    assert _value(store.load(2)) == "2"


def test_step_off_the_line_comes_from_its_newest_generation(store: Store) -> None:
    """Test two abandoned branches with the same step; the later one is returned."""
    for generation in (1, 2):
        _save(store, 7, f"branch {generation}")
        store.training.begin_generation(None)
    assert _value(store.load(7)) == "branch 2"


def test_saves_of_the_limiting_step_are_distinct(store: Store) -> None:
    """Test that the line ends at one save of a step, so that a later save of this step is abandoned."""
    first = _save(store, 5, "first")
    _save(store, 5, "second")
    store.training.begin_generation(first)
    assert _value(store.load()) == _value(store.load(5)) == "first"


def test_deleting_the_parent_keeps_the_line(store: Store) -> None:
    """Test that the head record stays, and that the previous checkpoint is the newest."""
    for step in (1, 2, 3):
        _save(store, step)
    store.training.begin_generation(_checkpoint(store, 1, 2))
    store.delete(2)
    assert _value(store.load()) == "1"
    _save(store, 3, "new")
    assert _value(store.load()) == "new"


def test_a_save_can_go_to_an_abandoned_generation_and_says_so(store: Store) -> None:
    """Test that the saves of an outdated trainer are kept, and not on the line."""
    _save(store, 1)
    store.training.begin_generation(None)
    assert not _save(store, 2, "stale", generation=1).on_line
    assert _save(store, 1, "present", generation=2).on_line
    assert _value(store.load()) == "present"
    assert _value(store.load(2)) == "stale"


@pytest.mark.parametrize("generation", [0, -1, 2, 99_999_999, 100_000_000, 1.0, "1", True], ids=repr)
def test_a_generation_that_was_never_opened_is_refused(store: Store, generation: int) -> None:
    """Test a generation that would make it impossible to know the newest checkpoint."""
    _save(store, 1)
    with pytest.raises(InvalidInputError, match="generation"):
        _save(store, 2, generation=generation)
    assert _listing(store) == [(1, 1, True)]


def test_generations_that_are_opened_at_once_get_different_numbers(store: Store) -> None:
    """Test that the creation of the file reserves the number, also for two processes at once."""
    _save(store, 1)
    numbers: list[int] = []
    start = threading.Barrier(8)

    def open_some() -> None:
        start.wait()
        numbers.extend([store.training.begin_generation(None) for _ in range(5)])

    threads = [threading.Thread(target=open_some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(2, 42))


def test_runs_have_lines_of_their_own(store: Store) -> None:
    """Test that a new generation of one run does not change the other run."""
    for run in ("a", "b"):
        store.save({"value": run}, step=1, run=run)
    store.training.begin_generation(None, run="a")
    with pytest.raises(CheckpointNotFoundError):
        store.load(run="a")
    assert _value(store.load(run="b")) == "b"


def _damage_newest(store: Store) -> None:
    newest = max((store.path / "manifests").rglob("*.manifest"))
    flip(newest, 8 * -20)


def _lose_newest_rank(store: Store) -> None:
    newest = max((store.path / "manifests").rglob("*.manifest"))
    newest.rename(newest.with_name(newest.name.replace("of-00001", "of-00002")))


@pytest.mark.parametrize("damage", [_damage_newest, _lose_newest_rank])
def test_a_checkpoint_that_cannot_be_restored_is_passed_over_with_a_warning(
    store: Store, damage: Callable[[Store], None]
) -> None:
    """Test the loaded checkpoint, the warning that names caller and step, and the result of `restore`."""
    for step in (1, 2):
        _save(store, step)
    damage(store)
    with pytest.warns(SkippedCheckpointWarning, match="step 2") as caught:
        assert _value(store.load()) == "1"
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = store.restore()
    assert restored.checkpoint.step == 1
    assert [reason.split(" ")[:2] for reason in restored.skipped] == [["step", "2"]]


def test_asked_for_a_step_no_other_is_given(store: Store) -> None:
    """Test that a request for a damaged step raises an error that lists the reasons."""
    for step in (1, 2):
        _save(store, step)
    _damage_newest(store)
    with pytest.raises(InconsistentCheckpointError) as caught:
        store.load(2)
    assert len(caught.value.reasons) == 1
    assert "step 2" in caught.value.reasons[0]


def test_a_lost_head_record_is_not_guessed_at(store: Store) -> None:
    """Test that the newest checkpoint is unknown, and that a unique step can still be loaded."""
    _save(store, 1)
    store.training.begin_generation(None)
    _save(store, 2)
    store.training.begin_generation(_checkpoint(store, 2, 2))
    heads = sorted((store.path / "heads" / "default").iterdir())
    heads[0].unlink()
    with pytest.raises(HeadRecordError, match="generation 2 has no head record"):
        store.load()
    assert _value(store.load(1)) == "1"
    assert {c.on_line for c in store.checkpoints()} == {None}
    heads[1].unlink()
    with pytest.raises(HeadRecordError, match="generation 2 has no head record; fetch the record"):
        store.load()


def test_with_a_lost_head_record_no_step_of_another_training_is_given(store: Store) -> None:
    """Test a step of two generations, of which the wanted one is unknown."""
    first = _save(store, 1)
    _save(store, 2)
    store.training.begin_generation(first)
    _save(store, 2)
    (head,) = (store.path / "heads" / "default").iterdir()
    head.unlink()
    problem = r"of step 2 is meant: generation 2 has no head.*name one of the saves .*\(save:DIGITS, .* log --all"
    with pytest.raises(HeadRecordError, match=problem):
        store.load(2)
    assert _value(store.load(1)) == "1"


def test_one_of_several_saves_of_a_step_is_named_by_its_save_id(store: Store) -> None:
    """Test with and without a known line, for every method that reads one checkpoint."""
    first = _save(store, 1)
    saves = [_save(store, 2)]
    store.training.begin_generation(first)
    saves.append(_save(store, 2))
    (head,) = (store.path / "heads" / "default").iterdir()
    head.unlink()
    for one in saves:
        name = f"save:{one.save_id}"
        assert store.restore(name).checkpoint.save_id == one.save_id
        assert store.values(name)[0].save_id == store.tensors(name)[0].save_id == one.save_id
    with pytest.raises(InvalidInputError, match=r"matches 3 checkpoints of run 'default'; give more digits"):
        store.load(f"save:{first.save_id[:2]}")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of run 'default' whose save id is 0"):
        store.load("save:0")
    for wrong in ("2", "save:", "save:xyz", f"save:{first.save_id}0"):
        with pytest.raises(InvalidInputError, match="give an integer, save:DIGITS"):
            store.load(wrong)


def test_parent_is_the_previous_checkpoint_on_the_line(store: Store) -> None:
    """Test parents within a generation, and across a restore."""
    refs = [_save(store, step).ref for step in (1, 2, 3)]
    store.training.begin_generation(_checkpoint(store, 1, 2))
    refs.append(_save(store, 3).ref)
    manifests = store.resources.tier.manifests
    parents = [
        manifests.read(listing.run, listing.ref, listing.manifests[0]).header.parent
        for listing in manifests.checkpoints("default")
    ]
    assert parents == [None, refs[0], refs[1], refs[1]]
