"""Test large states: more than 2 GiB in one tensor, and bounded peak memory."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture
def large_path(store_path: Path) -> Iterator[Path]:
    """Return a path for a store that is deleted after the test, because pytest keeps the folders of three runs."""
    yield store_path
    shutil.rmtree(store_path)


@pytest.mark.slow
def test_a_tensor_of_more_than_2_gib(large_path: Path) -> None:
    """Test offsets beyond 31 bits, saved and filled in place, with different content in every page."""
    size = 2 * GIB + 5 * MIB + 3
    tensor = torch.zeros(size, dtype=torch.uint8)
    marks = torch.arange(0, size, 1_000_003)
    tensor[marks] = (marks % 251 + 1).to(torch.uint8)
    tensor[-1] = 255
    expected, count = tensor[marks].clone(), int(tensor.count_nonzero())
    with Store.open(large_path, config=StoreConfig(compression="off"), create=True) as store:
        saved = store.save({"x": tensor}, step=1)
        tensor.fill_(7)
        store.load(into={"x": tensor})
    assert saved.state_bytes == saved.written_bytes == size
    assert torch.equal(tensor[marks], expected)
    assert tensor[-1] == 255
    assert int(tensor.count_nonzero()) == count


CHILD = """
import json, os, resource, sys
import torch
from asymcheck import Store

def high():
    # VmHWM, not ru_maxrss: the latter is inherited from the parent.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

def reset():
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")

torch.set_num_threads(1)
path, part = sys.argv[1], sys.argv[2]
shapes = [(16 << 20,)] * 9 + [(1 << 12, 1 << 12)] + [(1000,)] * 3000
if part == "strided":
    shapes = [(1 << 12, 1 << 12)] * 10
make = (lambda shape: torch.ones(shape).t()) if part == "strided" else torch.ones
state = {"model": [make(shape) for shape in shapes]}
state_bytes = sum(tensor.numel() * 4 for tensor in state["model"])
with Store.open(path, create=True) as store:
    for tensor in state["model"]:
        tensor.add_(torch.arange(tensor.shape[-1]))
    reset()
    before = high()
    store.save(state, step=1)
    saving = high() - before
    for tensor in state["model"]:
        tensor.zero_()
    reset()
    before = high()
    store.load(into=state)
    filling = high() - before
    right = all(torch.equal(t, make(t.shape[::-1] if part == "strided" else t.shape) + torch.arange(t.shape[-1]))
                for t in state["model"])
    del state, tensor
    reset()
    before = high()
    loaded = store.load()
    loading = high() - before
print(json.dumps([state_bytes, saving, filling, loading, right]))
"""


def _memory(path: Path, part: str) -> list[int]:
    command = [sys.executable, "-c", CHILD, str(path), part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_the_peak_of_memory_is_the_state_and_little_more(large_path: Path) -> None:
    """Test 640 MiB: saving and filling use at most 256 MiB more, and a load of new tensors 256 MiB beyond these."""
    state_bytes, saving, filling, loading, right = _memory(large_path, "plain")
    assert right
    assert state_bytes > 640 * MIB
    assert saving < 256 * MIB
    assert filling < 256 * MIB
    assert loading < state_bytes + 256 * MIB


@pytest.mark.slow
def test_strided_tensors_cost_a_copy_of_one_at_a_time(large_path: Path) -> None:
    """Test that the memory of each gathered tensor is freed before the next."""
    state_bytes, saving, filling, _loading, right = _memory(large_path, "strided")
    assert right
    assert state_bytes == 640 * MIB
    assert saving < 384 * MIB
    assert filling < 384 * MIB
