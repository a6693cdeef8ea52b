"""Test ZeroRedundancyOptimizer: each rank saves its part of the optimizer state."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.xdist_group("torchrun"), pytest.mark.timeout(300)]


def _train(store: Path, last: int, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", "tests.distributed.zero_trainer", str(store), str(last)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        cwd=ROOT,
        check=False,
    )


@pytest.mark.slow
def test_resumed_training_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Test parts of the optimizer on two ranks, with a learning rate that a schedule has changed before the resume."""
    whole = _train(tmp_path / "whole", 8)
    assert whole.returncode == 0, whole.stderr[-4000:]
    started, resumed = _train(tmp_path / "parts", 5), _train(tmp_path / "parts", 8)
    assert started.returncode == 0, started.stderr[-4000:]
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert resumed.stdout.split()[:2] == ["from", "5:"]
    assert resumed.stdout.split()[2] == whole.stdout.split()[2]


@pytest.mark.slow
def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """Test one process, whose part of the optimizer is larger."""
    assert _train(tmp_path / "store", 2).returncode == 0
    alone = _train(tmp_path / "store", 3, ranks=1)
    assert alone.returncode != 0
    assert "groups of [4] parameters are given, but of [" in alone.stderr
