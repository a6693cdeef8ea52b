"""Test processes that exit without close(), or by SIGTERM: the last step is durable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from tests.checkpointer.loops import rings
from tests.crash.trainer import train_two_until_terminated, train_until_terminated
from tests.zygote import REPOSITORY, Zygote

EXITING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.checkpointer.disks import Disk, open_on
from tests.checkpointer.loops import linear_loop
from tests.crash.trainer import config_for
from asymcheck import Checkpointer

def train(folder):
    disk = Disk()
    store = open_on(disk, folder / "store")
    _, _, loop = linear_loop()
    checkpointer = Checkpointer(store, loop.state, capture=config_for(folder), every=1, keep=None)
    for step in range(4):
        loop.iterate(step)
        disk.delay_s = 0.01
        checkpointer.step(step)
    return store, checkpointer

kept = train(Path(sys.argv[2]))
if sys.argv[3] == "dropped":
    del kept
if sys.argv[3] == "failed":
    raise SystemExit(7)
"""


def _steps(folder: Path) -> list[int]:
    with Store.open(folder / "store", create=True) as store:
        assert store.verify() == []
        return [checkpoint.step for checkpoint in store.checkpoints()]


@pytest.mark.slow(long=["kept"])
@pytest.mark.parametrize("how", ["kept", "dropped", "failed"])
def test_an_exit_without_close_saves_the_last_step(tmp_path: Path, how: str) -> None:
    """Test with and without a reference to the checkpointer."""
    command = [sys.executable, "-c", EXITING, str(REPOSITORY), str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (7 if how == "failed" else 0, "")
    assert _steps(tmp_path) == [0, 1, 2, 3]
    assert rings(tmp_path) == []


def test_a_large_last_step_is_saved_without_new_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the end of a program, when Python starts no thread: the last step was not fenced before."""

    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    # Several threads would compare as many bytes.
    weight = torch.nn.Parameter(torch.zeros(6 << 20))
    with Store.open(tmp_path / "store", create=True) as store:
        checkpointer = Checkpointer(store, {"weight": weight, "optimizer": torch.optim.SGD([weight])}, every=1)
        checkpointer.step(0)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
        monkeypatch.setattr(threading.Thread, "start", refuse)
        checkpointer._exit_handler.drain()
        monkeypatch.undo()
    assert _steps(tmp_path) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["outside", "inside", "fence", "window", "pushed", "trace", "closing"])
def test_sigterm_saves_the_last_step_and_ends_the_process(zygote: Zygote, tmp_path: Path, where: str) -> None:
    """Test SIGTERM between calls, inside a call, and in hooks that hold locks of the background threads.

    The exit status is that of the signal.
    """
    child = zygote.start(train_until_terminated, path=str(tmp_path), where=where)
    assert child.wait() == -signal.SIGTERM, child.output.read_text()
    assert child.output.read_text() == ""
    assert _steps(tmp_path) == [0, 1]
    assert rings(tmp_path) == []
    if where == "trace":
        # The end of this record was not written.
        traced = json.loads((tmp_path / "trace.json").read_text("utf-8") + "]")
        assert [line["args"]["step"] for line in traced if line.get("cat") == "commit"] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "of_the_second"), [("outside", 2), ("inside 0", 1), ("inside 1", 2)])
def test_sigterm_saves_the_last_step_of_every_run(
    zygote: Zygote, tmp_path: Path, where: str, of_the_second: int
) -> None:
    """Test that both checkpointers of a process are drained, in any call."""
    child = zygote.start(train_two_until_terminated, path=str(tmp_path), where=where)
    assert child.wait() == -signal.SIGTERM, child.output.read_text()
    assert child.output.read_text() == ""
    assert _steps(tmp_path) == [0, 1, *range(of_the_second)]
    assert rings(tmp_path) == []


def test_a_handler_of_the_program_stays(zygote: Zygote, tmp_path: Path) -> None:
    """Test that the handler decides how the process ends, and that complete captures can be recovered."""
    child = zygote.start(train_until_terminated, path=str(tmp_path), where="handled")
    assert child.wait() == 3, child.output.read_text()


FORKING = """
import os, signal, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from tests.checkpointer.disks import Disk, open_on
from tests.checkpointer.loops import linear_loop, rings
from tests.crash.trainer import config_for
from asymcheck import Checkpointer

folder = Path(sys.argv[2])
disk = Disk()
store = open_on(disk, folder / "store")
_, _, loop = linear_loop()
with Checkpointer(store, loop.state, capture=config_for(folder), every=1, keep=None) as checkpointer:
    disk.delay_s = 0.05
    for step in range(2):
        loop.iterate(step)
        checkpointer.step(step)
        for way in ("killed", "ended", "trained", "closed") if step else ():
            child = os.fork()
            if child:
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                assert status == (-signal.SIGTERM if way == "killed" else 0), (way, status)
                assert len(rings(folder)) == 1, way
                continue
            signal.alarm(20)
            if way == "killed":
                os.kill(os.getpid(), signal.SIGTERM)
            elif way == "trained":
                # A small one: torch's own threads do not survive a fork.
                weight = torch.zeros(1, requires_grad=True)
                weight.grad = torch.ones(1)
                torch.optim.SGD([weight]).step()
            elif way == "closed":
                checkpointer.close()
                store.close()
            sys.exit(0)
"""


@pytest.mark.slow
def test_a_forked_child_leaves_the_capture_to_its_parent(tmp_path: Path) -> None:
    """Test a forked worker that is terminated, ends, computes or closes its copy: no process waits for it."""
    command = [sys.executable, "-c", FORKING, str(REPOSITORY), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert _steps(tmp_path) == [0, 1]
    assert rings(tmp_path) == []
