"""Test error messages: file, frame, tensor, step, and remedy."""

import errno
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from asymcheck import Store
from asymcheck.errors import (
    INCONCLUSIVE,
    AsymcheckError,
    DamagedPartitionError,
    HeadRecordError,
    InconsistentCheckpointError,
    LockTimeoutError,
    PartialRestoreError,
    RefusedStateError,
    RemoteUnreachableError,
    SkippedCheckpointWarning,
    UnsupportedVersionError,
)
from asymcheck.restore import frame_reader, resolve
from asymcheck.storage.local_files import translated
from asymcheck.storage.nvme import Files, NvmeTier
from tests.damage.flips import content, flip, flipped
from tests.damage.small_store import CONFIG, SmallStore, make_store, same

WHICH = r"step 2 \(generation 1, save [0-9a-f]{12}\)"
FRAME = r"frame \d+ of pack [0-9a-f]{32}"


@pytest.fixture
def small(tmp_path: Path) -> SmallStore:
    """Return a store with three checkpoints."""
    return make_store(tmp_path / "store", steps=3)


def _frame_of(small: SmallStore, step: int, tensor: str) -> tuple[Path, int, int]:
    """Return the pack with the first bytes of a tensor, the number of the frame, and its offset."""
    with small.open() as store:
        tier = store.resources.tier
        (listing,) = (listing for listing in tier.manifests.checkpoints("default") if listing.ref.step == step)
        manifest = tier.manifests.read("default", listing.ref, listing.manifests[0])
        name = manifest.extents(manifest.names().index(tensor))[0].digest
        for pack_id in tier.pack_ids():
            pack = tier.open_pack(pack_id)
            pack.close()
            if name in pack.digests():
                sequence = pack.digests().index(name)
                return pack.path, sequence, int(pack.entries[sequence]["offset"])
    raise AssertionError("no pack has it")


def _reasons(small: SmallStore, step: int | None = 2) -> str:
    with small.open() as store, pytest.raises(InconsistentCheckpointError) as caught:
        store.load(step)
    assert len(caught.value.reasons) == 1
    assert caught.value.reasons[0] in str(caught.value)
    assert "run 'default'" in str(caught.value)
    assert str(small.path) in str(caught.value)
    assert "run asymcheck verify" in str(caught.value)
    return caught.value.reasons[0]


def test_a_damaged_payload(small: SmallStore) -> None:
    """Test that the error names frame, pack, tensor, step and the next command, like the warning of the fallback."""
    path, sequence, offset = _frame_of(small, 2, "model.embed")
    with flipped(path, (offset + 200) * 8):
        reason = _reasons(small)
    where = f"frame {sequence} of pack {path.stem}"
    assert re.fullmatch(
        rf"{WHICH}: digest mismatch in {where}; needed by tensor model\.embed of {WHICH}; run asymcheck verify", reason
    )
    path, sequence, offset = _frame_of(small, 3, "model.embed")
    with flipped(path, (offset + 200) * 8), small.open() as store:
        where = f"store {small.path}, run 'default': skipped step 3 .*frame {sequence} of pack {path.stem}"
        with pytest.warns(SkippedCheckpointWarning, match=where):
            state = store.load()
        assert same(state, small.states[2])


def test_a_damaged_frame_header_and_padding(small: SmallStore) -> None:
    """Test that the error names the damaged structure and the tensor."""
    path, sequence, offset = _frame_of(small, 2, "model.embed")
    where = f"frame {sequence} of pack {path.stem}"
    for at, what in ((0, "not a frame"), (16, "frame header checksum mismatch"), (110, "placement checksum")):
        with flipped(path, (offset + at) * 8):
            assert re.fullmatch(
                rf"{WHICH}: {where}: {what}.*; needed by tensor model\.embed of {WHICH}; run asymcheck verify",
                _reasons(small),
            )


def test_bundled_tensors_are_named_together(small: SmallStore) -> None:
    """Test a partition with several tensors, of which three are named."""
    path, _, offset = _frame_of(small, 2, "moments.0")
    with flipped(path, (offset + 200) * 8):
        assert "needed by tensor moments.0" in _reasons(small)


def test_a_pack_that_is_cut_short_or_gone(small: SmallStore) -> None:
    """Test that the error names the pack file, the tensor, the step and the next command."""
    path, sequence, offset = _frame_of(small, 2, "model.embed")
    data = path.read_bytes()
    with content(path, data[: offset + 500]):
        assert f"pack {path.name}" in _reasons(small)
    path.unlink()
    reason = _reasons(small)
    assert f"pack {path.name} does not exist" in reason
    assert re.search(
        rf"; needed by (tensor model\.\w+ of {WHICH}|\d+ tensors of {WHICH}: model\..*); run asymcheck verify$", reason
    )
    assert sequence >= 0


def test_a_frame_that_the_device_cannot_read(small: SmallStore) -> None:
    """Test that an I/O error also names the frame and the tensors."""
    path, sequence, offset = _frame_of(small, 2, "model.embed")

    class Worn(Files):
        def pread(self, descriptor: int, buffers: Sequence[memoryview], at: int, name: Path) -> int:
            """Raise an error for one frame."""
            if name == path and at == offset:
                with translated("read", name):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().pread(descriptor, buffers, at, name)

    with Store(NvmeTier(small.path, CONFIG, read_only=True, files=Worn())) as store:
        with pytest.raises(InconsistentCheckpointError) as caught:
            store.load(2)
        (finding,) = store.verify()
    (reason,) = caught.value.reasons
    assert re.search(f"frame {sequence} of pack {path.stem}.*Input/output error", reason)
    assert "needed by tensor model.embed" in reason
    assert "model.embed" in finding.tensors
    assert "Input/output error" in finding.message


def test_a_damaged_manifest(small: SmallStore) -> None:
    """Test that the error names the path of the file in the store, and the step."""
    (path,) = (path for path in small.files("manifests/*/*/*.manifest") if "-000000000002-" in path.parent.name)
    with flipped(path, 4000):
        assert re.fullmatch(
            rf"{WHICH}: manifest default/{path.parent.name}/{path.name}: "
            "the content does not have the digest in the name",
            _reasons(small),
        )


def test_a_damaged_head_record(small: SmallStore) -> None:
    """Test that the error names the record, and advises to restore a step by number."""
    path = small.path / "heads" / "default" / "00000002.head"
    with flipped(path, 80), flipped(path, 8 * 4096 + 80), small.open() as store:
        with pytest.raises(HeadRecordError, match=r"default/00000002\.head: both copies .*name the step .*step=") as no:
            store.load()
        assert str(no.value).startswith(f"store {small.path}: cannot tell which checkpoint of run default is newest")
        assert same(store.load(3), small.states[3])


def test_findings_of_a_lost_tensor(small: SmallStore) -> None:
    """Test that verify names file, frame, tensor and checkpoint, with the same digest mismatch."""
    path, sequence, offset = _frame_of(small, 2, "model.embed")
    with flipped(path, (offset + 200) * 8), small.open() as store:
        (finding,) = store.verify()
    assert finding.kind == "damaged-frame"
    assert finding.where == f"packs/{path.name} frame {sequence}"
    assert finding.message == f"digest mismatch in frame {sequence} of pack {path.stem}"
    assert finding.tensors == ("model.embed",)
    assert re.fullmatch(rf"run default, {WHICH}", finding.checkpoints[0])


def _filled(small: SmallStore) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.zeros(1000) for number in range(6)}


def test_failed_fill_lists_overwritten_tensors(tmp_path: Path) -> None:
    """Test that listed tensors have new bytes, and other tensors old bytes."""
    states = {step: {f"t{number}": torch.full((1000,), step * 10.0 + number) for number in range(6)} for step in (1, 2)}
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        for step, state in states.items():
            store.save(state, step=step)
    small = SmallStore(tmp_path / "store", states)
    order = sorted((*_frame_of(small, 2, f"t{number}")[:2], f"t{number}") for number in range(6))
    path, _, offset = _frame_of(small, 2, order[3][2])
    flip(path, (offset + 200) * 8)
    target = {name: torch.zeros(1000) for name in states[2]}
    with small.open() as store:
        with pytest.raises(PartialRestoreError) as caught:
            store.load(into=target)
        error = caught.value
        assert sorted(error.overwritten) == sorted(name for *_, name in order[:3])
        for name, tensor in target.items():
            assert same(tensor, states[2][name] if name in error.overwritten else torch.zeros(1000))
        assert error.next_step == 1
        assert re.search(
            rf"digest mismatch in {FRAME}; needed by tensor {order[3][2]} of {WHICH}; run asymcheck verify\. "
            r"3 tensors were overwritten already: t\d, t\d, t\d; restore step 1 \(.*\) instead \(step=1\)",
            str(error),
        )
        store.load(error.next_step, into=target)
        assert same(target, states[1])
        store.load(1, into=target)
    # If the first frame is damaged, nothing was overwritten, so the older checkpoint is restored immediately.
    path, _, offset = _frame_of(small, 2, order[0][2])
    flip(path, (offset + 200) * 8)
    with small.open() as store, pytest.warns(SkippedCheckpointWarning, match="step 2"):
        assert same(store.load(into=target), states[1])


class _Refusing:
    def state_dict(self) -> dict[str, object]:
        return {"x": 1}

    def load_state_dict(self, _state: dict[str, object]) -> None:
        raise ValueError("not this one")


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "No tensor was overwritten"),
        (1, "1 tensor was overwritten already: t0"),
        (2, "2 tensors were overwritten already: t0, t1"),
    ],
)
def test_overwritten_tensors_are_counted_after_a_refusal(tmp_path: Path, count: int, told: str) -> None:
    """Test the number of tensors, also one and none."""
    state = {f"t{number}": torch.zeros(1000) for number in range(count)}
    with Store.open(tmp_path / "store", create=True) as store:
        store.save({**state, "object": _Refusing()}, step=1)
        with pytest.raises(RefusedStateError) as caught:
            store.load(into={**state, "object": _Refusing()})
    assert str(caught.value).endswith(f". {told}")


@pytest.mark.parametrize("kind", INCONCLUSIVE)
def test_a_fill_that_is_cut_off_says_that_the_state_is_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[AsymcheckError]
) -> None:
    """Test an interrupted fill, which raises the same error and restores no older checkpoint."""
    state = {f"t{number}": torch.full((1000,), 5.0 + number) for number in range(6)}
    whole, calls = frame_reader.read_checked, itertools.count()

    def read_checked(*arguments: object) -> memoryview:
        if next(calls) == 3:
            raise kind("it went away")
        return whole(*arguments)  # type: ignore[arg-type]  # handed on

    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        store.save(state, step=1)
        store.save(state, step=2)
        target = {name: torch.zeros(1000) for name in state}
        monkeypatch.setattr(frame_reader, "read_checked", read_checked)
        with pytest.raises(kind, match=r"it went away\. 3 tensors were overwritten already: t\d, .* is a mixture"):
            store.restore(into=target, fall_back=True)
        assert sum(bool(tensor.any()) for tensor in target.values()) == 3


@pytest.mark.parametrize("falls_back", [False, True])
@pytest.mark.parametrize("kind", [RemoteUnreachableError, LockTimeoutError, UnsupportedVersionError])
def test_a_damaged_fill_is_reported_if_no_older_checkpoint_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[AsymcheckError], *, falls_back: bool
) -> None:
    """Test that an error about the older checkpoint does not hide that the state is a mixture."""
    states = {step: {f"t{number}": torch.full((1000,), step * 10.0 + number) for number in range(6)} for step in (1, 2)}
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        for step, state in states.items():
            store.save(state, step=step)
    small = SmallStore(tmp_path / "store", states)
    *_, last = sorted((*_frame_of(small, 2, name), name) for name in states[2])
    flip(last[0], (last[2] + 200) * 8)
    whole, calls = resolve.resolve_one, itertools.count()

    def resolve_one(*arguments: object, **options: object) -> object:
        if next(calls):
            raise kind("it went away")
        return whole(*arguments, **options)  # type: ignore[arg-type]  # handed on

    monkeypatch.setattr(resolve, "resolve_one", resolve_one)
    with small.open() as store, pytest.raises(PartialRestoreError, match="cannot be read: it went away") as caught:
        store.restore(into={name: torch.zeros(1000) for name in states[2]}, fall_back=falls_back)
    assert len(caught.value.overwritten) == 5
    assert caught.value.next_step is None
    assert "5 tensors were overwritten already: t" in str(caught.value)


def test_a_fill_with_no_older_checkpoint_says_so(tmp_path: Path) -> None:
    """Test that the error does not advise to restore an older step."""
    state = {f"t{number}": torch.full((1000,), 5.0 + number) for number in range(3)}
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        store.save(state, step=1)
    small = SmallStore(tmp_path / "store", {1: state})
    *_, last = sorted((*_frame_of(small, 1, name), name) for name in state)
    flip(last[0], (last[2] + 200) * 8)
    with small.open() as store:
        with pytest.raises(PartialRestoreError, match="no older checkpoint is consistent") as caught:
            store.load(into={name: torch.zeros(1000) for name in state})
        assert str(small.path) in str(caught.value)
        assert caught.value.next_step is None
        assert len(caught.value.overwritten) == 2
        with pytest.raises(InconsistentCheckpointError) as plain:
            store.load()
        assert issubclass(DamagedPartitionError, Exception)
        assert "needed by tensor" in plain.value.reasons[0]
