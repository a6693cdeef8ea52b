"""Test run names, metrics, and listings."""

import math
import struct

import numpy as np
import pytest
import torch

from asymcheck import Store
from asymcheck.errors import CheckpointNotFoundError, InvalidInputError
from tests.store.equality import assert_same, directory_content

GOOD = ["a", "Z9", "gpt2-run1", "v1.0_final", "0", "a" * 64, "a..b", "CON", "x."]
BAD = ["", ".", "..", ".hidden", "-x", "_x", "a/b", "../a", "a b", "ü", "a" * 65, "a\n", "a\0", "a\\b", "a.tmp", "*"]


@pytest.mark.parametrize("run", GOOD)
def test_a_run_can_be_named_so(store: Store, run: str) -> None:
    """Test letters, digits, dots, dashes and underscores, up to 64 characters."""
    store.save({"x": 1}, step=1, run=run)
    assert store.load(run=run) == {"x": 1}
    assert [checkpoint.run for checkpoint in store.checkpoints()] == [run]
    assert store.training.begin_generation(None, run=run) == 2
    assert store.verify() == []


@pytest.mark.parametrize("run", BAD)
def test_a_run_cannot_be_named_so(store: Store, run: str) -> None:
    """Test names that leave the store as a folder, or that look like temporary files."""
    before = directory_content(store.path)
    calls = [
        lambda: store.save({"x": 1}, step=1, run=run),
        lambda: store.load(run=run),
        lambda: store.restore(run=run),
        lambda: store.checkpoints(run),
        lambda: store.delete(1, run=run),
        lambda: store.training.begin_generation(None, run=run),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match="run name"):
            call()
    assert directory_content(store.path) == before


@pytest.mark.parametrize("run", [None, 5, b"run"])
def test_invalid_run_name_is_refused_everywhere(store: Store, run: str) -> None:
    """Test that all methods raise the same message."""
    for call in (
        lambda: store.save({}, step=1, run=run),
        lambda: store.load(run=run),
        lambda: store.delete(1, run=run),
    ):
        with pytest.raises(InvalidInputError, match="run name"):
            call()


def test_runs_do_not_see_each_other(store: Store) -> None:
    """Test that runs are listed together, and loaded and deleted separately."""
    for run in ("b", "a"):
        for step in (2, 3):
            store.save({"x": f"{run}{step}"}, step=step, run=run)
    assert [(c.run, c.step) for c in store.checkpoints()] == [("a", 2), ("a", 3), ("b", 2), ("b", 3)]
    assert [(c.run, c.step) for c in store.checkpoints("b")] == [("b", 2), ("b", 3)]
    assert store.checkpoints("c") == []
    store.delete(3, run="a")
    assert store.load(run="a") == {"x": "a2"}
    assert store.load(run="b") == {"x": "b3"}


def test_missing_run_lists_existing_ones(store: Store) -> None:
    """Test that a mistyped name is visible."""
    store.save({}, step=1, run="resnet")
    with pytest.raises(CheckpointNotFoundError, match="it has runs resnet"):
        store.load(run="resent")


METRICS = {
    "loss": 0.1,
    "tiny": 5e-324,
    "negative zero": -0.0,
    "huge": 1.7976931348623157e308,
    "infinite": math.inf,
    "minus infinite": -math.inf,
    "integer": 3,
    "bool": True,
    "": 1.5,
    "größe 💾": 2.5,
    "numpy": np.float32(0.1),
    "tensor": torch.tensor(2.5),
}


def test_metrics_come_back_to_the_bit(store: Store) -> None:
    """Test the result of the save, the listing and the restore; all metrics are floats."""
    saved = store.save({"x": 1}, step=1, metrics=METRICS)
    expected = {name: struct.pack(">d", float(value)) for name, value in METRICS.items()}
    for checkpoint in (saved, store.checkpoints()[0], store.restore().checkpoint):
        assert {name: struct.pack(">d", value) for name, value in checkpoint.metrics.items()} == expected


def test_a_metric_may_be_no_number(store: Store) -> None:
    """Test a loss that is NaN, which must be visible in the listing."""
    store.save({"x": 1}, step=1, metrics={"loss": math.nan})
    assert math.isnan(store.checkpoints()[0].metrics["loss"])


@pytest.mark.parametrize(
    "value",
    [None, "high", [1.0], {}, 1j, 10**400, 10**5000, torch.ones(2), object()],
    ids=["None", "str", "list", "dict", "complex", "large", "too large to write", "tensor", "object"],
)
def test_invalid_metric_is_refused(store: Store, value: float) -> None:
    """Test that the error names the metric, before anything is written."""
    before = directory_content(store.path)
    with pytest.raises(InvalidInputError, match="metric 'loss'"):
        store.save({"x": torch.ones(2_000_000)}, step=1, metrics={"loss": value})
    assert directory_content(store.path) == before


def test_a_name_that_could_not_be_read_again_is_refused(store: Store) -> None:
    """Test half a surrogate pair, which would make the manifest unreadable."""
    before = directory_content(store.path)
    with pytest.raises(InvalidInputError, match="not valid Unicode"):
        store.save({"x": torch.ones(2_000)}, step=1, metrics={"loss\ud800": 1.0})
    assert directory_content(store.path) == before


def test_at_most_256_metrics(store: Store) -> None:
    """Test the limit of the format."""
    store.save({}, step=1, metrics={str(i): i for i in range(256)})
    with pytest.raises(InvalidInputError, match="257 metrics"):
        store.save({}, step=2, metrics={str(i): i for i in range(257)})
    assert [len(checkpoint.metrics) for checkpoint in store.checkpoints()] == [256]


@pytest.mark.parametrize("state", [{}, [], (), None, 0, "", b""], ids=repr)
def test_an_empty_state_is_a_checkpoint(store: Store, state: object) -> None:
    """Test a checkpoint without tensors and packs."""
    saved = store.save(state, step=1)
    assert (saved.state_bytes, saved.written_bytes, saved.complete) == (0, 0, True)
    assert_same(store.load(), state)
    assert list((store.path / "packs").iterdir()) == []
    assert store.verify() == []


def test_a_checkpoint_describes_itself(store: Store) -> None:
    """Test that save, listing and restore return the same, except for the written bytes."""
    state = {"x": torch.ones(1000), "y": torch.ones(2000, dtype=torch.int16), "z": 1}
    saved = store.save(state, step=12, run="r", metrics={"loss": 1.5})
    (listed,) = store.checkpoints()
    restored = store.restore(run="r").checkpoint
    assert (saved.run, saved.step, saved.generation, saved.world_size) == ("r", 12, 1, 1)
    assert (saved.complete, saved.on_line, saved.state_bytes, saved.written_bytes) == (True, True, 8000, 8000)
    assert saved.created_ns == int(saved.save_id[:16], 16)
    for other in (listed, restored):
        assert {**vars(other), "written_bytes": 8000} == vars(saved)
    assert saved.ref == listed.ref


def test_a_damaged_checkpoint_is_listed_as_incomplete(store: Store) -> None:
    """Test that the listing shows both the checkpoint and its status."""
    store.save({"x": torch.ones(1000)}, step=1)
    (manifest,) = (store.path / "manifests").rglob("*.manifest")
    manifest.write_bytes(b"damaged")
    (listed,) = store.checkpoints()
    assert (listed.step, listed.complete, listed.state_bytes) == (1, False, 0)
