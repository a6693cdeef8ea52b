"""Test that a long training leaks no memory, descriptors, threads or mappings."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.config import MIB, CaptureConfig
from tests.checkpointer.loops import Loop, linear_loop

STEPS, STEPS_LONG = 40, 1000
_KEPT = 10
_SAMPLES = 40
_FLAT_BYTES = 4 * MIB
_ROUNDS = 2
"""Trainings until the memory is flat. A buffer that is first used on a busy machine stays, and a leak grows again."""
_WIDTH = 400
"""Size of a model and two moments of 0.6 MB each."""


@dataclasses.dataclass(frozen=True)
class Use:
    """Resources of the process."""

    memory: int
    """Bytes of memory outside of rings and other files in memory."""
    descriptors: int
    """Number of open files."""
    threads: int
    """Number of threads."""
    mappings: int
    """Number of mapped regions that are files."""


def _use() -> Use:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(status[name].split()[0]) for name in ("VmRSS", "RssShmem")}
    files = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
    return Use(
        1024 * (kib["VmRSS"] - kib["RssShmem"]), len(os.listdir("/proc/self/fd")), int(status["Threads"]), len(files)
    )


def _train(store: Store, loop: Loop, steps: int) -> list[Use]:
    """Train with a checkpoint at each step, and delete old ones; return samples of the used resources."""
    used = []
    with Checkpointer(
        store, loop.state, capture=CaptureConfig(), on_checkpoint=lambda _report: None, every=1, keep=None
    ) as checkpointer:
        for step in range(_ROUNDS * steps):
            if step == steps and _growth([use.memory for use in used[len(used) // 2 :]]) <= _FLAT_BYTES:
                break
            loop.iterate(step)
            checkpointer.step(step)
            if step % (steps // _SAMPLES) == 0:
                checkpointer.wait()
                _let_go(store)
                used.append(_use())
    return used


def _let_go(store: Store) -> None:
    for checkpoint in store.checkpoints()[:-_KEPT]:
        store.delete(checkpoint.step)
    store.gc()


def _growth(values: Sequence[int]) -> float:
    """Return the growth of values from the first to the last, by the median of all slopes (Theil, Sen).

    A single step, such as one more slot on a busy drive, does not count as growth unless it is in the middle.
    """
    slopes = [
        (values[later] - values[earlier]) / (later - earlier)
        for earlier, later in itertools.combinations(range(len(values)), 2)
    ]
    return statistics.median(slopes) * (len(values) - 1)


def _check(store_path: Path, steps: int) -> None:
    _, _, loop = linear_loop(_WIDTH)
    loop.state["buffer"] = torch.zeros(100_000)
    loop.iterate(0)
    with Store.open(store_path, create=True) as store:
        before = _use()
        used = _train(store, loop, steps)
        after = _use()
    half = used[len(used) // 2 :]
    assert max(use.memory for use in used) - before.memory <= 64 * MIB
    assert _growth([use.memory for use in half]) <= _FLAT_BYTES
    for name in ("descriptors", "threads", "mappings"):
        counts = [getattr(use, name) for use in half]
        assert _growth(counts) < 1, f"{name}: {counts}"
    # The store keeps its write slots, its catalog and the thread pool. Resources of the ring must be released.
    assert after.threads == before.threads
    assert after.descriptors <= before.descriptors + 6


@pytest.mark.slow
def test_memory_and_descriptors_stay_flat(store_path: Path) -> None:
    """Test some dozens of checkpoints."""
    _check(store_path, STEPS)


@pytest.mark.long
def test_memory_stays_flat_over_a_thousand_checkpoints(store_path: Path) -> None:
    """Test that a checkpoint leaves nothing behind outside of the ring."""
    _check(store_path, STEPS_LONG)
