"""Test that a training with typed values in its state resumes in another process, bit for bit."""

from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from tests.zygote import Zygote

_TRAINING = """
import dataclasses, datetime, enum, os, random, sys
from collections import defaultdict, deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import asymcheck


class Phase(enum.Enum):
    WARM = "warm"
    MAIN = "main"


class Best(NamedTuple):
    step: int
    weight: torch.Tensor


@dataclasses.dataclass
class Average:
    weight: torch.Tensor
    updates: int = 0


path, first, last, kill = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
model = torch.nn.Linear(200, 100)
optimizer = torch.optim.AdamW(model.parameters())
generators = [torch.Generator().manual_seed(1), np.random.default_rng(2), random.Random(3)]
state = {
    "model": model,
    "optimizer": optimizer,
    "generators": generators,
    "losses": deque(maxlen=4),
    "counts": defaultdict(int),
    "seen": set(),
    "average": Average(torch.zeros(100, 200)),
    "best": Best(-1, torch.zeros(100, 200)),
    "phase": Phase.WARM,
    "folder": Path("none"),
    "began": datetime.datetime(1970, 1, 1),
}
with asymcheck.Store.open(path, create=True) as store:
    checkpointer = asymcheck.Checkpointer(store, state, every=1, keep=None)
    restored = checkpointer.restore()
    assert (restored is None) == (first == 0)
    assert restored is None or restored.step == first - 1
    for step in range(first, last):
        torch_generator, numpy_generator, python_random = generators
        x = torch.randn(8, 200, generator=torch_generator) * python_random.gauss(0, 1) + numpy_generator.normal()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["losses"].append(loss.detach())
        state["counts"][step % 3] += 1
        state["seen"].add(("step", step))
        state["average"].weight += model.weight.detach()
        state["average"].updates += 1
        state["best"] = Best(step, model.weight.detach().clone())
        state["phase"] = Phase.MAIN
        state["folder"] = Path(f"runs/{step}")
        state["began"] = datetime.datetime(2026, 1, 1 + step)
        checkpointer.step(step)
    checkpointer.wait()
    if kill:
        os._exit(0)
    checkpointer.close()
print([type(value).__name__ for value in state.values()])
print(state["losses"], dict(state["counts"]), sorted(state["seen"]), state["average"].updates, state["phase"])
print(state["average"].weight.double().sum().item(), state["best"].step)
print(torch.equal(state["best"].weight, model.weight), state["folder"], state["began"])
print(torch.rand(1, generator=generators[0]), generators[1].random(), generators[2].random())
"""


def _train(zygote: Zygote, path: Path, first: int, last: int, *, kill: bool = False) -> str:
    """Train from a step to another in a new process; return what the process prints at its end."""
    done = zygote.run_script(_TRAINING, path, first, last, int(kill))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_training_with_typed_values_resumes_in_another_process(zygote: Zygote, tmp_path: Path) -> None:
    """Test that captures in the background restore generators, windows and classes bit for bit."""
    whole = _train(zygote, tmp_path / "whole", 0, 7)
    _train(zygote, tmp_path / "parts", 0, 5, kill=True)
    assert _train(zygote, tmp_path / "parts", 5, 7) == whole
    assert "'deque', 'defaultdict', 'set', 'Average', 'Best', 'Phase', 'PosixPath', 'datetime'" in whole


def test_generator_is_rolled_back_in_memory(store_path: Path) -> None:
    """Test that a rollback restores a generator from the ring."""
    state = {"generator": torch.Generator().manual_seed(3), "weight": torch.zeros(1000)}
    with (
        Store.open(store_path, create=True) as store,
        Checkpointer(store, state, every=1, keep=None) as checkpointer,
    ):
        checkpointer.step(0)
        checkpointer.wait("memory")
        expected = torch.rand(4, generator=state["generator"])
        checkpointer.rollback()
        assert torch.equal(torch.rand(4, generator=state["generator"]), expected)


def test_nested_tensor_is_captured_in_each_step(store_path: Path) -> None:
    """Test steps whose state is compared with a template: new elements in place, and then other lengths."""
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    state = {"nested": nested, "weight": torch.zeros(1000)}
    with (
        Store.open(store_path, create=True) as store,
        Checkpointer(store, state, every=1, keep=None) as checkpointer,
    ):
        for step in range(4):
            state["nested"].values().fill_(step)
            checkpointer.step(step)
            checkpointer.wait()
        state["nested"] = torch.nested.nested_tensor([torch.ones(5, 3)], layout=torch.jagged)
        checkpointer.step(4)
        checkpointer.wait()
        found = [store.load(step)["nested"].unbind() for step in range(5)]
    assert [[tuple(part.shape) for part in parts] for parts in found] == [[(2, 3), (4, 3)]] * 4 + [[(5, 3)]]
    assert [parts[0].unique().tolist() for parts in found] == [[0], [1], [2], [3], [1]]
