"""Test that encoded saves restore exact bytes, and keep their bases."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asymcheck import CaptureConfig, Checkpointer, Store, StoreConfig
from asymcheck.codecs.encode import Encoded
from asymcheck.commit import encoder
from asymcheck.events import Event, observe
from asymcheck.format.registry import DELTA_DEPTH_MAX, KIND_DELTA, KIND_DERIVED, KIND_FULL
from asymcheck.fsck.verify import Severity
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import Digest

CONFIG = StoreConfig(
    compression="smallest", partition_bytes=1 << 18, bundle_below_bytes=1 << 16, deferred_bytes_min=1 << 16
)
STEPS = 2 * DELTA_DEPTH_MAX + 3
WIDTH = 90_000


class MixedPrecision(torch.optim.Optimizer):
    """Trains float32 masters, with parameters that are rounded copies."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        """Create the masters and round the parameters from them."""
        super().__init__(parameters, {})
        for parameter in parameters:
            master = torch.randn(parameter.shape) * 0.02
            parameter.data.copy_(master)
            self.state[parameter] = {"master": master, "exp_avg": torch.randn_like(master)}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # closures are not used
        """Run a small update."""
        with torch.no_grad():
            for parameter, state in self.state.items():
                state["exp_avg"].mul_(0.9).add_(torch.randn_like(state["exp_avg"]), alpha=0.1)
                state["master"].add_(state["exp_avg"], alpha=1e-6)
                parameter.copy_(state["master"])


@pytest.fixture
def training() -> tuple[dict[str, object], MixedPrecision, Callable[[], object]]:
    """Return a state, its optimizer, and a function that copies its tensors."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = MixedPrecision(parameters)
    frozen = torch.randn(WIDTH)
    state: dict[str, object] = {
        "model": {"a": parameters[0], "b": parameters[1], "frozen": frozen},
        "optimizer": optimizer,
    }
    return state, optimizer, lambda: copy.deepcopy({"model": state["model"], "optimizer": optimizer.state_dict()})


def frames(path: Path) -> dict[Digest, tuple[int, Digest]]:
    """Return kind and base of every partition in a store."""
    tier = NvmeTier(path, StoreConfig(), read_only=True)
    found = {}
    for pack_id in tier.pack_ids():
        pack = tier.open_pack(pack_id)
        for entry in pack.entries:
            found[Digest(entry["digest"].tobytes())] = int(entry["kind"]), Digest(entry["base_digest"].tobytes())
        pack.close()
    return found


def same(one: object, other: object) -> bool:
    """Return whether two states have the same tensors."""
    tensors, other_tensors = (torch.utils._pytree.tree_leaves(state) for state in (one, other))
    pairs = zip(tensors, other_tensors, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def train(
    path: Path,
    training: tuple[dict[str, object], MixedPrecision, Callable[[], object]],
    capture: CaptureConfig | None = None,
) -> dict[int, object]:
    """Save every step, each durable before the next; return the saved states."""
    state, optimizer, copied = training
    expected = {}
    with (
        Store.open(path, config=CONFIG, create=True) as store,
        Checkpointer(store, state, capture=capture, every=1, keep=None) as checkpointer,
    ):
        for step in range(STEPS):
            optimizer.step()
            checkpointer.step(step)
            expected[step] = copied()
            checkpointer.wait()
    return expected


@pytest.mark.slow
def test_every_step_comes_back_from_deltas_and_copies(
    tmp_path: Path, training: tuple[dict[str, object], MixedPrecision, Callable[[], object]]
) -> None:
    """Test masters as deltas on the previous step, parameters as derived copies, and the maximum chain length."""
    expected = train(tmp_path, training)
    with Store.open(tmp_path, create=True) as store:
        assert all(same(store.load(step=step), expected[step]) for step in expected)
        assert store.verify() == []
    found = frames(tmp_path)
    kinds = Counter(kind for kind, _ in found.values())
    assert kinds[KIND_DELTA] >= STEPS
    assert kinds[KIND_DERIVED] >= STEPS

    def depth(name: Digest) -> int:
        kind, base = found[name]
        return 0 if kind == KIND_FULL else (kind == KIND_DELTA) + depth(base)

    assert max(depth(name) for name in found) == DELTA_DEPTH_MAX


@pytest.mark.slow
def test_bases_outlive_their_checkpoints(
    tmp_path: Path, training: tuple[dict[str, object], MixedPrecision, Callable[[], object]]
) -> None:
    """Test that bases are removed once no partition needs them."""
    expected = train(tmp_path, training)
    newest = max(expected)
    with Store.open(tmp_path, create=True) as store:
        for step in expected:
            if step != newest:
                store.delete(step)
        store.gc()
        assert same(store.load(), expected[newest])
        assert store.verify() == []
        store.delete(newest)
        store.gc()
    assert frames(tmp_path) == {}


@pytest.mark.slow
def test_delta_is_reused_for_equal_bytes(
    tmp_path: Path, training: tuple[dict[str, object], MixedPrecision, Callable[[], object]]
) -> None:
    """Test that a save of the same state with the same boundaries writes nothing."""
    train(tmp_path, training, CaptureConfig(schedule="eager"))
    state = training[0]
    with Store.open(tmp_path, config=CONFIG, create=True) as store:
        assert store.save(state, step=1000).written_bytes == 0
        for step in range(STEPS):
            store.delete(step)
        store.gc()
        assert store.verify() == []
        assert torch.equal(
            store.load()["optimizer"]["state"][0]["master"], training[1].state_dict()["state"][0]["master"]
        )


@pytest.mark.parametrize("point", ["frame.written", "pack.sealed"])
def test_a_base_that_is_collected_during_a_save_costs_no_checkpoint(
    tmp_path: Path, training: tuple[dict[str, object], MixedPrecision, Callable[[], object]], point: str
) -> None:
    """Test that a partition whose base was collected is stored in full."""
    state, optimizer, copied = training
    # Reuse would show that the pack was collected, so the partitions must differ.
    del state["model"]["frozen"]  # type: ignore[attr-defined]  # a dict
    collected = threading.Event()

    def collect(event: Event) -> None:
        if event.name == point and armed.is_set() and not collected.is_set():
            collected.set()
            with Store.open(tmp_path, create=True) as other:
                other.delete(0)
                other.gc()

    armed = threading.Event()
    with (
        Store.open(tmp_path, config=CONFIG, create=True) as store,
        Checkpointer(store, state, every=1, keep=None) as checkpointer,
        observe(collect),
    ):
        optimizer.step()
        checkpointer.step(0)
        checkpointer.wait()
        armed.set()
        optimizer.step()
        checkpointer.step(1)
        expected = copied()
        checkpointer.wait()
        assert collected.is_set()
        assert same(store.load(), expected)
        # Verification reports that the discarded deltas cannot be read and that no checkpoint needs them.
        assert [finding for finding in store.verify() if finding.severity is not Severity.WARNING] == []


@pytest.mark.slow(long=["3145728"])
@pytest.mark.filterwarnings("ignore:the ring of:asymcheck.errors.CaptureWarning")
@pytest.mark.parametrize("ring_bytes", [1 << 20, 3 << 20, 5 << 20])
def test_rings_of_any_size_give_the_same_checkpoints(
    tmp_path: Path,
    training: tuple[dict[str, object], MixedPrecision, Callable[[], object]],
    ring_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test rings that stream captures, and rings that would free old captures while these are bases."""
    state, optimizer, copied = training

    def late(*arguments: object) -> Encoded | None:
        time.sleep(0.02)
        return encode(*arguments)  # type: ignore[arg-type]  # passed on as they came

    encode = encoder._encode
    monkeypatch.setattr(encoder, "_encode", late)
    expected = {}
    capture = CaptureConfig(ring_bytes=ring_bytes)
    with Store.open(tmp_path, config=CONFIG, create=True) as store:
        with Checkpointer(store, state, capture=capture, every=1, keep=None) as checkpointer:
            for step in range(12):
                optimizer.step()
                checkpointer.step(step)
                expected[step] = copied()
                if step % 3 == 0:
                    checkpointer.wait()
        assert all(same(store.load(step=step), expected[step]) for step in expected)
        assert store.verify() == []
