"""Test containers on one node: processes of different PID namespaces share one store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from asymcheck import Store
from tests.checkpointer.loops import folder_for_rings

_KILLED = """
import os, signal, sys
import torch
from asymcheck import Store
from asymcheck.events import observe

def die(event):
    if event.name == "catalog.pinned":
        os.kill(os.getpid(), signal.SIGKILL)

with Store.open(sys.argv[1], create=True) as store, observe(die):
    store.save({"w": torch.randn(100_000)}, step=1)
"""
_LIVING = """
import sys
import torch
from asymcheck import Store

run = sys.argv[2]
with Store.open(sys.argv[1], create=True) as store:
    for step in range(5):
        store.save({"w": torch.full((100_000,), float(step))}, step=step, run=run)
        store.gc()
    print("saved", flush=True)
    sys.stdin.readline()
"""
_TRAINING = """
import os, sys, time
import torch
from asymcheck import CaptureConfig, Checkpointer, Store

with Store.open(sys.argv[1], create=True) as store:
    capture = CaptureConfig(ring_folder=sys.argv[2])
    options = {"save_on_signal": True} if sys.argv[3] == "grace" else {}
    with Checkpointer(store, {"w": torch.ones(100_000)}, every=1, capture=capture, **options) as checkpointer:
        checkpointer.step(7)
        print(os.getpid(), flush=True)
        time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a PID namespace")
    done = subprocess.run([*_container(), "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no PID namespace can be made here: {done.stderr.strip()}")


def _container(*, second: bool = False) -> list[str]:
    """Return a command that runs in a PID namespace, as process 1 or as a later process."""
    shell = ["sh", "-c", 'true; "$@"; exit $?', "sh"] if second else []
    return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *shell]


def _start(path: Path, run: str, *, second: bool) -> subprocess.Popen[str]:
    command = [*_container(second=second), sys.executable, "-c", _LIVING, str(path), run]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_container_killed_before_holds_nothing(store_path: Path) -> None:
    """Test a restart in another namespace: pins and marks of the killed container belong to dead processes."""
    with Store.open(store_path, create=True) as store:
        store.save({"w": torch.randn(10)}, step=0)
    for _ in range(2):
        command = [*_container(second=True), sys.executable, "-c", _KILLED, str(store_path)]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 128 + 9
    (store_path / "catalog" / "open" / "damaged").touch()
    with Store.open(store_path, create=True) as store:
        assert store.gc().freed_packs == 2
        assert len(list((store_path / "catalog" / "open").iterdir())) == 1
        store.save({"w": torch.randn(10)}, step=2)


@pytest.mark.slow
def test_containers_save_to_one_store_when_their_numbers_differ(store_path: Path) -> None:
    """Test that processes with equal process ids cannot be distinguished, so the later one is refused."""
    with _start(store_path, "a", second=False) as first, _start(store_path, "b", second=True) as second:
        for child in (first, second):
            assert child.stdout is not None
            assert child.stdout.readline() == "saved\n"
        with _start(store_path, "c", second=False) as third:
            _, error = third.communicate("\n", timeout=60)
            assert "a process with the same PID 1, in another PID namespace" in error
        with Store.open(store_path, create=True) as store:
            store.gc()
            assert store.verify() == []
        for child in (first, second):
            child.communicate("\n", timeout=60)
            assert child.returncode == 0
    with Store.open(store_path, create=True) as store:
        for run in ("a", "b"):
            assert [one.step for one in store.checkpoints(run)] == [0, 1, 2, 3, 4]
            assert torch.equal(store.load(run=run)["w"], torch.full((100_000,), 4.0))
    assert list((store_path / "catalog" / "open").iterdir()) == []


@pytest.mark.slow(quick=["plain"])
@pytest.mark.parametrize("way", ["plain", "grace"])
def test_sigterm_ends_the_first_process_of_a_container(store_path: Path, tmp_path: Path, way: str) -> None:
    """Test that SIGTERM drains and ends a busy process 1, and with ``save_on_signal`` that a second one ends it."""
    command = [*_container(), sys.executable, "-c", _TRAINING, str(store_path), str(folder_for_rings(tmp_path)), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "1\n"
        first = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
        os.kill(first, signal.SIGTERM)
        if way == "grace":
            # An earlier second signal counts as a copy of the first one.
            time.sleep(2.1)
            os.kill(first, signal.SIGTERM)
        try:
            assert outer.wait(timeout=30) == 128 + signal.SIGTERM
        finally:
            outer.kill()
    with Store.open(store_path) as store:
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [7]
