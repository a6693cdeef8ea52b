"""Test the line of training against a model that follows checkpoints one by one."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asymcheck import Store
from asymcheck.config import WRITER, StoreConfig
from asymcheck.errors import HeadRecordError
from asymcheck.format import registry
from asymcheck.format.record import HeadRecord
from asymcheck.fsck.verify import Severity, verify
from asymcheck.restore.lineage import Lineage, begin_generation, read_line
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import CheckpointRef, SaveId
from tests.damage.flips import flip

Ref = CheckpointRef


def _ref(generation: int, step: int, attempt: int = 0) -> CheckpointRef:
    return CheckpointRef(generation, step, SaveId(attempt.to_bytes(16, "big")))


@pytest.fixture
def tier(store_path: Path) -> Iterator[NvmeTier]:
    """Return the tier of a new store."""
    tier = NvmeTier(store_path, StoreConfig())
    yield tier
    tier.close()


def _open(tier: NvmeTier, generation: int, parent: CheckpointRef | None) -> None:
    assert tier.manifests.publish_head(HeadRecord("run", generation, parent, 1, WRITER))


def test_a_run_without_head_records_is_in_its_first_generation(tier: NvmeTier) -> None:
    """Test that all checkpoints are on the line."""
    line = read_line(tier, "run")
    assert line.generation == 1
    assert _ref(1, 10**12 - 1) in line
    assert _ref(2, 0) not in line


def test_the_parent_is_the_last_of_its_generation(tier: NvmeTier) -> None:
    """Test that later checkpoints are abandoned, including another save of the same step."""
    _open(tier, 2, _ref(1, 5, attempt=3))
    line = read_line(tier, "run")
    assert [step for step in range(10) if _ref(1, step) in line] == [0, 1, 2, 3, 4, 5]
    assert [attempt for attempt in range(6) if _ref(1, 5, attempt) in line] == [0, 1, 2, 3]
    assert _ref(2, 0) in line
    assert _ref(3, 0) not in line


def test_new_generation_from_scratch_has_no_parent(tier: NvmeTier) -> None:
    """Test a new generation after any earlier generations."""
    _open(tier, 2, _ref(1, 5))
    _open(tier, 3, None)
    line = read_line(tier, "run")
    assert line.generation == 3
    assert _ref(2, 1) not in line
    assert _ref(1, 1) not in line


def test_a_generation_may_skip_others(tier: NvmeTier) -> None:
    """Test that generation 2 is not on the line if training continues from generation 1."""
    _open(tier, 2, _ref(1, 5))
    _open(tier, 3, _ref(1, 7))
    line = read_line(tier, "run")
    assert _ref(1, 7) in line
    assert _ref(2, 1) not in line


def test_a_missing_head_record_on_the_line_is_an_error(tier: NvmeTier) -> None:
    """Test that a missing head record of another generation is no error."""
    _open(tier, 3, _ref(2, 5))
    with pytest.raises(HeadRecordError, match="generation 2 has no head record"):
        read_line(tier, "run")
    _open(tier, 4, _ref(1, 5))
    assert _ref(1, 5) in read_line(tier, "run")


def test_damaged_head_record_is_an_error_when_needed(tier: NvmeTier, store_path: Path) -> None:
    """Test that one intact copy is sufficient."""
    _open(tier, 2, _ref(1, 5))
    path = store_path / "heads" / "run" / "00000002.head"
    flip(path, 8 * 10)
    assert _ref(1, 5) in read_line(tier, "run")
    flip(path, 8 * (4096 + 10))
    with pytest.raises(HeadRecordError, match="both copies"):
        read_line(tier, "run")


def test_numbers_of_generations_are_never_used_again(tier: NvmeTier) -> None:
    """Test that the next number is above every head record of the run, and above the parent."""
    assert [begin_generation(tier, "run", parent) for parent in (None, None, _ref(7, 1), None)] == [1, 2, 8, 9]
    assert begin_generation(tier, "other", None) == 1
    # The directory of a checkpoint whose manifests and head record were lost: its number may be known elsewhere.
    tier.manifests.directory("run", _ref(20, 1)).mkdir(parents=True)
    assert begin_generation(tier, "run", None) == 21


def test_last_generation_has_no_successor(tier: NvmeTier) -> None:
    """Test the limit of eight digits."""
    _open(tier, registry.GENERATION_MAX, None)
    with pytest.raises(HeadRecordError, match="the maximum"):
        begin_generation(tier, "run", None)


def test_the_name_of_one_file_makes_no_hundred_million_generations(tier: NvmeTier) -> None:
    """Test that a verification and a repair list missing generations of the line, and only some of the others."""
    _open(tier, registry.GENERATION_MAX, _ref(50_000_000, 1))
    found, _ = verify(tier)
    assert {finding.kind for finding in found} == {"missing-head", "no-checkpoint"}
    assert len(found) == 1002
    (error,) = [finding for finding in found if finding.severity == Severity.ERROR]
    assert "generation 50000000 has no head record" in error.message
    with Store.open(tier.root, create=True) as store:
        assert len(store.repair().left) == 1000


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A checkpoint in the model, with its predecessor."""

    ref: CheckpointRef
    before: "_Saved | None"


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_line_matches_the_training_history(tmp_path: Path, data: st.DataObject) -> None:
    """Test random saves and restores against the model."""
    number = len(list(tmp_path.iterdir()))
    tier = NvmeTier(tmp_path / str(number), StoreConfig())
    saved: list[_Saved] = []
    present, generation, step = None, 1, 0
    for action in data.draw(st.lists(st.sampled_from(["save", "save", "save", "restore", "fresh"]), max_size=25)):
        if action == "save":
            step += data.draw(st.integers(1, 3))
            present = _Saved(_ref(generation, step), present)
            saved.append(present)
        elif action == "fresh":
            generation += 1
            _open(tier, generation, None)
            present, step = None, 0
        elif saved:
            present = data.draw(st.sampled_from(saved))
            generation, step = generation + 1, present.ref.step
            _open(tier, generation, present.ref)
    expected = set()
    while present is not None:
        expected.add(present.ref)
        present = present.before
    line: Lineage = read_line(tier, "run")
    assert {one.ref for one in saved if one.ref in line} == expected
    tier.close()
