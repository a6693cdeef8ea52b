"""A store of a few blocks, small enough to flip each bit, with its promises."""

import shutil
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from asymcheck.config import StoreConfig
from asymcheck.errors import AsymcheckError, HeadRecordError, StepOrderWarning
from asymcheck.fsck.verify import Finding, Severity
from asymcheck.store import Store

CONFIG = StoreConfig(
    partition_bytes=4096,
    bundle_below_bytes=1024,
    inline_bytes=64,
    pack_bytes=16384,
    slots=1,
    catalog_map_bytes=1 << 24,
    read_lock_timeout_s=0.5,
)
"""Configuration with frames of one or two blocks; a checkpoint needs two packs."""


def small_state(step: int) -> dict[str, object]:
    """Return a state whose ``frozen`` tensor is the same at every step, so that checkpoints share a partition."""
    numbers = torch.Generator().manual_seed(step)
    return {
        "model": OrderedDict(
            embed=torch.randn(1500, generator=numbers),
            bias=torch.randn(40, generator=numbers).to(torch.bfloat16),
            frozen=torch.arange(300, dtype=torch.int32),
        ),
        "moments": [torch.randn(7, 9, generator=numbers), np.arange(3.0) + step, (step, 2.5, "x", None, b"\0\1")],
        "empty": torch.empty(0, 3),
    }


def same(left: object, right: object) -> bool:
    """Return whether two states are equal bit for bit, with the same types and the same order of keys."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
        return torch.equal(*bits)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    return left == right


@dataclass(frozen=True)
class SmallStore:
    """A store on disk, and the states that were saved to it."""

    path: Path
    states: Mapping[int, object]
    """States by step; the greatest step is the newest."""
    config: StoreConfig = CONFIG

    def open(self, *, read_only: bool = True) -> Store:
        """Open the store."""
        return Store.open(self.path, read_only=read_only, config=self.config)

    def files(self, *patterns: str) -> list[Path]:
        """Return the files that match one of the globs, by name."""
        return sorted(path for pattern in patterns for path in self.path.glob(pattern) if path.is_file())

    def copy_to(self, path: Path) -> "SmallStore":
        """Return a copy that can be damaged."""
        shutil.copytree(self.path, path)
        return SmallStore(path, self.states, self.config)


def tiny_state(step: int) -> dict[str, object]:
    """Return a state with one partition of less than a block, for slow tests of each bit."""
    return {"w": torch.arange(step, step + 100, dtype=torch.int32), "step": step}


def make_store(path: Path, steps: int = 2, config: StoreConfig = CONFIG, *, tiny: bool = False) -> SmallStore:
    """Save ``steps`` checkpoints, and continue once, so that two head records exist."""
    states: dict[int, object] = {step: tiny_state(step) if tiny else small_state(step) for step in range(1, steps + 1)}
    with Store.open(path, config=config, create=True) as store, warnings.catch_warnings():
        warnings.simplefilter("error", StepOrderWarning)
        generation, last = store.training.begin_generation(None), None
        for step, state in states.items():
            if step == steps:
                generation = store.training.begin_generation(last)
            last = store.save(state, step=step, generation=generation)
    return SmallStore(path, states, config)


@dataclass
class Loads:
    """Results of loading every checkpoint of a damaged store."""

    refused: dict[int, AsymcheckError] = field(default_factory=dict)
    """Steps that could not be restored."""
    newest: int | None = None
    """Step that was restored by default; None if there was none."""
    newest_error: AsymcheckError | None = None
    """Error of the restore."""
    skipped: tuple[str, ...] = ()
    """Skipped checkpoints."""


def load_all(small: SmallStore, open_store: Callable[[], Store] | None = None) -> Loads:
    """Load every checkpoint, and the newest; each load returns the right bytes, or raises a named error."""
    loads = Loads()
    try:
        store = (open_store or small.open)()
    except AsymcheckError as error:
        return Loads(dict.fromkeys(small.states, error), newest_error=error)
    with store:
        for step, state in small.states.items():
            try:
                restored = store.restore(step)
            except AsymcheckError as error:
                loads.refused[step] = error
            else:
                assert restored.checkpoint.step == step
                assert same(restored.state, state), f"step {step} came back with other bytes"
        try:
            restored = store.restore()
        except AsymcheckError as error:
            loads.newest_error = error
        else:
            loads.newest, loads.skipped = restored.checkpoint.step, restored.skipped
            assert same(restored.state, small.states[loads.newest]), "the newest came back with other bytes"
    assert loads.newest not in loads.refused
    expected = max((step for step in small.states if step not in loads.refused), default=None)
    if expected is not None and not isinstance(loads.newest_error, HeadRecordError):
        assert loads.newest_error is None, "no checkpoint was restored though one is intact"
    if loads.newest_error is None:
        assert loads.newest == expected, "an older checkpoint was restored though a newer one is intact"
        passed_over = [step for step in small.states if loads.newest is not None and step > loads.newest]
        assert len(loads.skipped) == len(passed_over)
        for step, reason in zip(reversed(passed_over), loads.skipped, strict=True):
            assert reason.startswith(f"step {step} (")
    return loads


def check_findings(small: SmallStore, loads: Loads, open_store: Callable[[], Store] | None = None) -> list[Finding]:
    """Verify the store; its error findings name exactly the checkpoints that cannot be loaded."""
    with (open_store or small.open)() as store:
        findings = store.verify()
    assert all(map(str, loads.refused.values())), "an error without a text"
    for finding in findings:
        assert finding.where
        assert finding.message
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    lost = {int(name.split(" step ")[1].split(" ")[0]) for finding in errors for name in finding.checkpoints}
    assert lost == set(loads.refused)
    for finding in errors:
        if finding.invariant == "I2":
            assert finding.tensors, "a lost partition, and nobody knows which tensor"
    return findings
