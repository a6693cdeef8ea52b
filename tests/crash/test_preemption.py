"""Test signals that announce a kill: the newest complete step is durable before the process ends."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asymcheck import Store
from tests.checkpointer.loops import rings
from tests.crash.states import Journal
from tests.zygote import REPOSITORY, Child, Zygote, wait_until

GRACE_S = 10.0
ENDED = 143
SIZE, SIGNALS = 1_500_000_000, int(os.environ.get("ASYMCHECK_SIGNALS", "100"))
USUAL = (signal.SIGTERM, signal.SIGUSR1)


def _steps(folder: Path, name: str = "journal") -> list[int]:
    return [int(str(line["step"])) for line in Journal(folder / name).lines("step")]


def _stored(folder: Path) -> list[int]:
    with Store.open(folder / "store", create=True) as store:
        assert store.verify() == []
        return [checkpoint.step for checkpoint in store.checkpoints()]


def _start(zygote: Zygote, folder: Path, way: str, **options: int | float) -> Child:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [way, folder, json.dumps(options)]
    return zygote.start_program("tests.crash.preempted", words, environment, folder / "output.txt")


def _begun(folder: Path, at_least: int = 3, name: str = "journal") -> None:
    wait_until(lambda: (folder / name).exists() and len(_steps(folder, name)) >= at_least, "steps")


def _status(child: Child, limit_s: float = GRACE_S) -> int:
    """Return the exit status; kill the process at the deadline, as a scheduler does."""
    if not child.has_ended(limit_s):
        child.kill()
    return child.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3), ids=str)
def test_signal_at_a_random_moment_leaves_the_newest_step(zygote: Zygote, tmp_path: Path, number: int) -> None:
    """Test eight signals in a row, each to a restart of the training, which continues with the same bytes."""
    rng = random.Random(number)
    for attempt in range(8):
        before = len(_steps(tmp_path)) if attempt else 0
        every = rng.choice([1, 5, 1000])
        child = _start(zygote, tmp_path, "train", seed=8 * number + attempt, every=every, delay_s=0.0005)
        _begun(tmp_path, before + 1)
        time.sleep(rng.uniform(0.0, 0.2))
        os.kill(child.pid, rng.choice(USUAL))
        assert _status(child) == ENDED, child.output.read_text()
        assert _stored(tmp_path)[-1] == _steps(tmp_path)[-1]
        assert rings(tmp_path) == []
    journal = Journal(tmp_path / "journal")
    prints = {line["step"]: line["fingerprint"] for line in journal.lines("step")}
    restored = journal.lines("restored")
    assert len(restored) == 7
    assert all(prints[line["step"]] == line["fingerprint"] for line in restored)


@pytest.mark.slow(quick=["every step"])
@pytest.mark.parametrize("push", [1, 1000], ids=["every step", "other steps"])
def test_newest_step_is_pushed_before_the_deadline(zygote: Zygote, tmp_path: Path, push: int) -> None:
    """Test that the last checkpoint is at the remote location, also if no rule of the push selects its step."""
    child = _start(zygote, tmp_path, "train", push=push)
    _begun(tmp_path)
    os.kill(child.pid, signal.SIGTERM)
    assert _status(child) == ENDED, child.output.read_text()
    with Store.open(f"file://{tmp_path}/remote") as remote:
        assert remote.verify() == []
        assert remote.checkpoints()[-1].step == _steps(tmp_path)[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "number", "status"),
    [
        ("plain", signal.SIGUSR1, ENDED),
        ("handled", signal.SIGTERM, ENDED),
        ("replaced", signal.SIGTERM, ENDED),
        ("replaced", signal.SIGUSR1, ENDED),
        ("raising", signal.SIGTERM, 3),
        ("interrupt", signal.SIGINT, 1),
        ("thread", signal.SIGTERM, ENDED),
        ("called", signal.SIGUSR2, ENDED),
        ("polled", None, ENDED),
    ],
)
def test_program_decides_how_the_process_ends(
    zygote: Zygote, tmp_path: Path, way: str, number: signal.Signals | None, status: int
) -> None:
    """Test handlers of the program, which are called once the step is durable, other signals and other notices."""
    child = _start(zygote, tmp_path, way)
    _begun(tmp_path)
    if number is None:
        (tmp_path / "notice").touch()
    else:
        os.kill(child.pid, number)
    assert _status(child) == status, child.output.read_text()
    assert _stored(tmp_path)[-1:] == _steps(tmp_path)[-1:]
    handled = Journal(tmp_path / "journal").lines("handled")
    assert len(handled) == (way in ("handled", "replaced") and number == signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("number", USUAL)
def test_signal_to_all_processes_spares_the_workers(zygote: Zygote, tmp_path: Path, number: signal.Signals) -> None:
    """Test a signal to the process group, as Slurm sends it: workers of a data loader live until the step is saved."""
    child = _start(zygote, tmp_path, "workers")
    _begun(tmp_path)
    for pid in (Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text()).split():
        os.kill(int(pid), number)
    os.kill(child.pid, number)
    assert _status(child) == ENDED, child.output.read_text()
    assert _stored(tmp_path)[-1] == _steps(tmp_path)[-1]


@pytest.mark.slow
def test_second_signal_ends_the_process_at_once(zygote: Zygote, tmp_path: Path) -> None:
    """Test a loop that never calls step() again: a copy of the signal is ignored, and a later one ends the process."""
    child = _start(zygote, tmp_path, "stuck")
    wait_until(lambda: bool(Journal(tmp_path / "journal").lines("stuck")), "the loop")
    for pause_s in (0.2, 2.3):
        os.kill(child.pid, signal.SIGTERM)
        assert not child.has_ended(pause_s)
    os.kill(child.pid, signal.SIGUSR1)
    assert _status(child) == -signal.SIGUSR1
    assert "a second signal ends the process at once" in child.output.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_end_after_the_same_step(zygote: Zygote, tmp_path: Path, rank: int) -> None:
    """Test a notice to a single rank."""
    children = zygote.start_ranks(2, "tests.crash.preempted", ["ranks", tmp_path], tmp_path)
    for other in range(2):
        _begun(tmp_path, 20, f"journal-{other}")
    os.kill(children[rank].pid, signal.SIGUSR1)
    assert [_status(child, 30.0) for child in children] == [ENDED, ENDED], children[0].output.read_text()
    _assert_same_step(tmp_path)


def _assert_same_step(folder: Path) -> None:
    last = [_steps(folder, f"journal-{rank}")[-1] for rank in range(2)]
    assert last == [_stored(folder)[-1]] * 2


@pytest.mark.long
def test_launcher_forwards_the_signal(tmp_path: Path) -> None:
    """Test torchrun, which forwards SIGTERM and would kill after 30 seconds, with a signal to all processes."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "tests.crash.preempted"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (tmp_path / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command, "ranks", str(tmp_path)],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=output,
        )
    for rank in range(2):
        _begun(tmp_path, 20, f"journal-{rank}")
    workers = [int(str(Journal(tmp_path / f"journal-{rank}").lines("pid")[0]["pid"])) for rank in range(2)]
    for pid in (*workers, process.pid):
        os.kill(pid, signal.SIGTERM)
    assert process.wait(60) != 0
    _assert_same_step(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_newest_step_of_a_large_state_is_durable_within_the_grace_period(zygote: Zygote, tmp_path: Path) -> None:
    """Test 100 signals at random moments to a training of 1.5 GB, each with 10 s until the kill."""
    rng, late, taken_s = random.Random(0), [], []
    for attempt in range(SIGNALS):
        before = len(_steps(tmp_path))
        child = _start(zygote, tmp_path, "train_large", seed=attempt, size=SIZE)
        _begun(tmp_path, before + 1)
        time.sleep(rng.uniform(0.0, 3.0))
        began = time.monotonic()
        os.kill(child.pid, rng.choice(USUAL))
        status = _status(child)
        taken_s.append(time.monotonic() - began)
        with Store.open(tmp_path / "store", create=True) as store:
            stored = store.checkpoints()[-1].step if store.checkpoints() else 0
        if (status, stored) != (ENDED, _steps(tmp_path)[-1]):
            late.append(f"attempt {attempt}: status {status}, step {stored} of {_steps(tmp_path)[-1]}")
        print(attempt, f"{taken_s[-1]:.1f} s", late, flush=True)  # noqa: T201 - a long test
    taken_s.sort()
    print(f"median {taken_s[len(taken_s) // 2]:.1f} s, slowest {taken_s[-1]:.1f} s")  # noqa: T201 - a measurement
    assert all(line["exact"] for line in Journal(tmp_path / "journal").lines("restored"))
    assert late == []
