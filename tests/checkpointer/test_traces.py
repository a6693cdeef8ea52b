"""Test traces: a file for Perfetto that shows copies of partitions and waits of the training."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import asymcheck
from asymcheck import Checkpointer, Store
from asymcheck.config import CaptureConfig
from asymcheck.errors import InvalidInputError, StorageError
from tests.checkpointer.loops import Loop, assert_every_step_is_right, linear_loop

STEPS = 8
WIDTH = 32
ROUNDED_US = 0.01


def _deep_loop() -> Loop:
    """Return a model of four blocks, with windows and some dozen partitions to copy."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        model(torch.full((2, WIDTH), 1.0 + step)).square().mean().backward()
        optimizer.step()

    return Loop({"model": model, "optimizer": optimizer}, iterate)


@pytest.fixture
def trained(store: Store, config: CaptureConfig, tmp_path: Path) -> list[dict[str, Any]]:
    """Return the closed trace of a training that saved every step, with windows."""
    config = dataclasses.replace(config, schedule="asymmetric")
    with asymcheck.trace(tmp_path / "trace.json"):
        assert_every_step_is_right(store, _deep_loop(), STEPS, config)
    return _read(tmp_path / "trace.json")


def _read(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text("utf-8"))
    assert isinstance(found, list)
    return found


def _of(trace: list[dict[str, Any]], kind: str, phase: str = "X") -> list[dict[str, Any]]:
    return [record for record in trace if record.get("cat") == kind and record["ph"] == phase]


def test_each_checkpoint_has_all_its_parts(trained: list[dict[str, Any]]) -> None:
    """Test that each partition is copied, digested and written once, with step, fence, commit and checkpoint."""
    for step in range(STEPS):
        mine = [record for record in trained if record.get("args", {}).get("step") == step]
        parts = defaultdict(list)
        for record in mine:
            parts[record["cat"]].append(record["args"].get("partition"))
        partitions = sorted(parts["copy"])
        assert len(partitions) > 4
        assert partitions == list(range(len(partitions)))
        assert sorted(parts["digest"]) == sorted(parts["write"]) == partitions
        assert [len(parts[name]) for name in ("step", "commit", "checkpoint")] == [1, 1, 1]
        # The end waits for the last checkpoint, not an optimizer.
        assert len(parts["fence"]) == 1
        begun, ended = (_of(trained, "checkpoint", phase)[step] for phase in "be")
        assert (begun["id"], begun["name"]) == (ended["id"], ended["name"])
        assert int(begun["id"], 16) < 1 << 64
        assert _of(trained, "step")[step]["ts"] == begun["ts"] < ended["ts"]


def test_overlapping_checkpoints_are_distinct(trained: list[dict[str, Any]]) -> None:
    """Test that a viewer can pair start and end of each checkpoint by its id."""
    assert len({record["id"] for record in _of(trained, "checkpoint", "b")}) == STEPS


def test_intervals_of_a_track_nest_or_follow_each_other(trained: list[dict[str, Any]]) -> None:
    """Test that a viewer can draw all tracks. Windows do not nest: each ends where the next begins."""
    tracks = defaultdict(list)
    for record in trained:
        if record["ph"] == "X":
            assert record["dur"] >= 0
            tracks[record["tid"]].append((record["ts"], record["ts"] + record["dur"]))
    assert len(tracks) >= 4
    for intervals in tracks.values():
        open_until: list[float] = []
        for start, end in sorted(intervals, key=lambda one: (one[0], -one[1])):
            while open_until and open_until[-1] <= start + ROUNDED_US:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + ROUNDED_US
            open_until.append(end)


def test_windows_are_those_of_forward_and_backward(trained: list[dict[str, Any]]) -> None:
    """Test four windows of each kind between two captures, on a separate track and without gaps."""
    windows = _of(trained, "window")
    for step in range(STEPS - 1):
        mine = [window for window in windows if window["args"]["step"] == step]
        assert [window["name"] for window in mine] == ["forward"] * 4 + ["backward"] * 4
        assert [window["args"]["window"] for window in mine] == list(range(8))
        for one, other in itertools.pairwise(mine):
            assert abs(one["ts"] + one["dur"] - other["ts"]) <= ROUNDED_US
    assert {window["tid"] for window in windows}.isdisjoint({copy["tid"] for copy in _of(trained, "copy")})


def test_without_modules_the_trace_has_no_windows(store: Store, config: CaptureConfig, tmp_path: Path) -> None:
    """Test that the end of the forward pass is unknown, and that all other events exist."""
    values = [torch.nn.Parameter(torch.ones(100))]
    optimizer = torch.optim.SGD(values, 0.1)

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        (values[0] * step).sum().backward()
        optimizer.step()

    with asymcheck.trace(tmp_path / "trace.json"):
        assert_every_step_is_right(store, Loop({"values": values, "optimizer": optimizer}, iterate), 3, config)
    trace = _read(tmp_path / "trace.json")
    assert not _of(trace, "window")
    assert len(_of(trace, "fence")) == 3


def test_copies_are_between_step_and_the_next_change(trained: list[dict[str, Any]]) -> None:
    """Test the copies from their release in ``step()`` to the end of the fence, by the tracks alone."""
    begins = {record["args"]["step"]: record["ts"] for record in _of(trained, "step")}
    ends = {record["args"]["step"]: record["ts"] + record["dur"] for record in _of(trained, "fence")}
    for copy in _of(trained, "copy"):
        step = copy["args"]["step"]
        assert begins[step] <= copy["ts"]
        assert copy["ts"] + copy["dur"] <= ends[step] + ROUNDED_US


def test_tracks_are_named_and_in_order(trained: list[dict[str, Any]]) -> None:
    """Test the order: windows, checkpoints, the training thread, and the background threads."""
    names = {record["tid"]: record["args"]["name"] for record in trained if record["name"] == "thread_name"}
    places = {
        record["tid"]: record["args"]["sort_index"] for record in trained if record["name"] == "thread_sort_index"
    }
    assert {record["tid"] for record in trained} == {0, *names}
    ordered = [names[tid] for tid in sorted(names, key=lambda tid: places[tid])]
    assert ordered[:3] == ["forward and backward of run default", "checkpoints of run default", "training thread"]
    assert {"asymcheck-capture", "asymcheck-commit"} < set(ordered[3:])
    assert {names[record["tid"]] for record in _of(trained, "step")} == {"training thread"}


def test_copies_and_writes_report_their_rate(trained: list[dict[str, Any]]) -> None:
    """Test the bytes, the rate and the first tensor of each event."""
    for record in (*_of(trained, "copy"), *_of(trained, "write")):
        about = record["args"]
        assert about["GB/s"] == pytest.approx(about["bytes"] / record["dur"] / 1e3, rel=0.05, abs=0.002)
        assert about["tensor"].startswith(("model.", "optimizer."))
        assert about["run"] == "default"


def test_trace_includes_intervals_of_the_caller(tmp_path: Path) -> None:
    """Test an interval of the caller, for instance of the optimizer."""
    path = tmp_path / "trace.json"
    with asymcheck.trace(path), asymcheck.events.timed("mine", detail=lambda: {"batch": 3}):
        pass
    assert [record["args"] for record in _of(_read(path), "mine")] == [{"batch": 3}]


def test_nothing_is_added_after_the_end(store: Store, config: CaptureConfig, tmp_path: Path) -> None:
    """Test running work and a second close, also without a ``with`` block."""
    path = tmp_path / "trace.json"
    _, _, loop = linear_loop()
    trace = asymcheck.trace(path)
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        trace.close()
        length = len(_read(path))
        loop.iterate(1)
        checkpointer.step(1)
    trace.close()
    assert len(_read(path)) == length > 3
    assert not asymcheck.events.is_watched()


def test_a_forked_child_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the child, which inherits descriptor and watchers, does not spoil the trace of its parent."""
    path = tmp_path / "trace.json"
    trace = asymcheck.trace(path)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with asymcheck.events.timed("mine"):
            asymcheck.events.emit("capture.complete")
        assert path.read_bytes() == before
    with asymcheck.events.timed("mine"):
        asymcheck.events.emit("capture.complete")
    trace.close()
    assert [record["name"] for record in _read(path) if record["ph"] in "Xi"] == ["capture.complete", "mine"]


def test_a_path_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    """Test that the error is raised before any event is watched."""
    with pytest.raises(StorageError, match=r"trace .*/no/trace\.json: No such file or directory; give a writable file"):
        asymcheck.trace(tmp_path / "no" / "trace.json")
    assert not asymcheck.events.is_watched()


def test_another_process_does_not_write_to_the_same_file(tmp_path: Path) -> None:
    """Test that a second rank cannot overwrite the file, and that closing the trace frees the file."""
    path = tmp_path / "trace.json"
    with asymcheck.trace(path):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                asymcheck.trace(path)
            except StorageError as error:
                status = 0 if "by another process; give each rank its own file" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    first = path.read_text("utf-8")
    assert [record["name"] for record in _read(path)] == ["process_name"]
    path.write_text(first * 2)
    asymcheck.trace(path).close()
    assert path.read_text("utf-8") == first


@pytest.mark.parametrize("path", [None, 3, b"trace.json", "a\0b", "\ud800"])
def test_invalid_trace_path_is_refused(path: Any) -> None:  # noqa: ANN401 - whatever users pass
    """Test that the error is an error of this package."""
    with pytest.raises(InvalidInputError, match="give the path of a file"):
        asymcheck.trace(path)


def test_a_full_disk_ends_the_trace_and_not_the_training(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Test that every step is stored, the end reports the error, and the written part is readable."""
    path, write, room = tmp_path / "trace.json", os.write, [2000]

    def limited(descriptor: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") != str(path):
            return write(descriptor, data)
        room[0] -= (taken := write(descriptor, data[: room[0]]))
        return taken

    monkeypatch.setattr(os, "write", limited)
    trace = asymcheck.trace(path)
    assert_every_step_is_right(store, linear_loop()[2], 3, config)
    with pytest.raises(StorageError, match="ends early: No space left on device; free disk space"):
        trace.close()
    assert len(json.loads(path.read_text("utf-8") + "]")) > 5


def test_an_encoding_says_from_where_to_where_and_why(tmp_path: Path) -> None:
    """Test that an encoded partition is shown as one move between two tiers, with the reason."""
    tensor = (torch.arange(1 << 19, dtype=torch.float32) % 997).bfloat16()
    with (
        Store.open(tmp_path / "store", config=asymcheck.StoreConfig(compression="smallest"), create=True) as store,
        asymcheck.trace(tmp_path / "trace.json"),
    ):
        store.save({"weight": tensor}, step=1)
    moves = [record["args"] for record in _of(_read(tmp_path / "trace.json"), "encode")]
    assert moves
    for move in moves:
        assert (move["from"], move["to"]) == ("dram", "nvme")
        assert "times smaller" in move["why"]
