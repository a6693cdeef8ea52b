"""Test that `asymcheck verify --on ray` prints what `asymcheck verify` prints, also if workers of the cluster die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome, run_command
from tests.damage.flips import flip
from tests.fsck.damages import flip_payload, packs

Call = Callable[..., Outcome]
ROOT = Path(__file__).resolve().parents[2]
SHARDS = 6
LIMIT_S = 240


@pytest.fixture
def damaged(store: Path) -> Path:
    """Return a store with a damaged frame, a lost pack and a damaged record."""
    flip_payload(packs(store)[0], 0)
    packs(store)[1].unlink()
    flip(store / "asymcheck.store", 20 * 8)
    return store


@contextlib.contextmanager
def verifying(store: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command on a cluster of its own in another process."""
    # Ray creates sockets below its folder, and the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:
        environment = {"RAY_TMPDIR": scratch, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "asymcheck", "verify", os.path.relpath(store, store.parent), *words]
        process = subprocess.Popen(
            [*command, "--on", "ray"],
            env={**os.environ, **environment},
            cwd=store.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def outcome_of(process: subprocess.Popen[str]) -> Outcome:
    """Return the result of the command."""
    out, err = process.communicate(timeout=LIMIT_S)
    return Outcome(process.returncode, out, err)


def kill_a_worker(process: subprocess.Popen[str], spared: set[int]) -> None:
    """Kill a worker of the cluster that runs a shard, but none of ``spared``, and add it to them."""
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        for pid in _below(process.pid) - spared:
            with contextlib.suppress(OSError):
                if b"ray::_run" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    spared.add(pid)
                    return
        time.sleep(0.002)
    pytest.fail("no worker ran a shard")


def _below(pid: int) -> set[int]:
    """Return the children of a process, and theirs."""
    with contextlib.suppress(OSError):
        children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return {each for child in children for each in (child, *_below(child))}
    return set()


@pytest.mark.slow
def test_lost_workers_change_nothing(damaged: Path) -> None:
    """Test the report, the text and the status of a damaged store, while two workers are killed."""
    pytest.importorskip("ray")
    with verifying(damaged, "--shards", str(SHARDS), "--json") as process:
        killed: set[int] = set()
        for _ in range(2):
            kill_a_worker(process, killed)
        outcome = outcome_of(process)
    whole = run_command("verify", damaged, "--json")
    assert outcome.json == {**whole.json, "store": damaged.name}
    assert (outcome.status, len(killed)) == (whole.status, 2)


@pytest.mark.slow
def test_an_error_of_a_shard_is_that_of_the_command(damaged: Path) -> None:
    """Test a run that does not exist."""
    pytest.importorskip("ray")
    with verifying(damaged, "--run", "none") as process:
        outcome = outcome_of(process)
    alone = run_command("verify", damaged, "--run", "none")
    assert (outcome.status, outcome.out) == (alone.status, alone.out) == (3, "")
    assert outcome.err.endswith(alone.err)  # after lines of Ray


def test_ray_is_missing(store: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the advice where Ray is not installed."""
    monkeypatch.setitem(sys.modules, "ray", None)
    outcome = call("verify", store, "--on", "ray")
    assert (outcome.status, outcome.out) == (2, "")
    assert "asymcheck[ray]" in outcome.err


@pytest.mark.parametrize(
    "words", [("--shard", "0/2", "--on", "ray"), ("--shards", "2"), ("--repair", "--on", "ray"), ("--on", "dask")]
)
def test_options_that_contradict_each_other(store: Path, call: Call, words: tuple[str, ...]) -> None:
    """Test that the command line is refused before anything is read."""
    assert call("verify", store, *words).status == 2
