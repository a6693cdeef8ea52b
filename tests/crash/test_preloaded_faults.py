"""System calls that fail in a real process: no wrong restore, no other error than the documented ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asymcheck import Store
from asymcheck.fsck.verify import Severity
from tests.crash.preloaded_child import state_of
from tests.store.equality import assert_same

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compiled library that is preloaded."""
    target = tmp_path_factory.mktemp("preload") / "preload.so"
    source = Path(__file__).with_name("preload.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", target, source, "-ldl"], check=True)
    return target


def _check(
    library: Path, folder: Path, *, kind: str, seed: int, steps: int, every: int, durable: int
) -> tuple[int, int]:
    """Run a child with faults, then check its store without faults, and that at least ``durable`` checkpoints are left.

    Returns:
        The number of checkpoints at the end, and of operations that failed.
    """
    store = folder / "store"
    faults = {"FAULT_FOLDER": str(store), "FAULT_KIND": kind, "FAULT_SEED": str(seed), "FAULT_EVERY": str(every)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.preloaded_child", str(store), str(steps)],
        env={**os.environ, **faults, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcome = json.loads(done.stdout)
    with Store.open(store) as opened:
        assert [str(finding) for finding in opened.verify() if finding.severity is Severity.ERROR] == []
        for step in outcome["durable"]:
            assert_same(opened.load(step), state_of(step))
        opened.save(state_of(steps), step=steps)
        opened.gc()
        assert_same(opened.load(), state_of(steps))
    assert len(outcome["durable"]) >= durable, "most saves failed"
    return len(outcome["durable"]), outcome["failed"]


@pytest.mark.slow(long=["edquot-*"])
@pytest.mark.parametrize(
    ("kind", "fails"), [("eio", True), ("enospc", True), ("edquot", True), ("eintr", False), ("short", None)]
)
def test_system_calls_that_fail_cost_no_durable_checkpoint(
    library: Path, tmp_path: Path, kind: str, fails: bool | None
) -> None:
    """Test errors, a full device, interruptions, which are repeated, and short writes, which are continued."""
    _, failed = _check(library, tmp_path, kind=kind, seed=1, steps=40, every=60, durable=10)
    if fails is not None:
        assert bool(failed) is fails


@pytest.mark.long
@pytest.mark.parametrize("kind", ["eio", "enospc", "eintr", "short"])
@pytest.mark.parametrize("every", [7, 40, 300])
def test_system_calls_that_fail_at_length(library: Path, tmp_path: Path, kind: str, every: int) -> None:
    """Test many seeds, and from frequent to rare faults. Few saves are good if each seventh call fails."""
    steps = 100 if every > 10 else 40
    least = 0 if every == 7 and kind in ("eio", "enospc") else steps // 4
    durable = 0
    for seed in range(10):
        folder = tmp_path / str(seed)
        durable += _check(library, folder, kind=kind, seed=seed, steps=steps, every=every, durable=least)[0]
    assert durable >= 1, "all saves failed"
