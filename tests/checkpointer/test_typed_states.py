"""Test that a training with typed values in its state resumes in another process, bit for bit."""

import dataclasses
import enum
import warnings
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.errors import StateDifferenceWarning, StateMismatchError
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


class Step(NamedTuple):
    """A step of an agent."""

    seen: torch.Tensor
    reward: float


@dataclasses.dataclass
class Score:
    """A score."""

    value: float


class Level(enum.Enum):
    """A level."""

    EASY = 1
    HARD = 2


class Replay:
    """An object with a buffer of steps, and any other values."""

    def __init__(self, *other: object) -> None:
        """Begin without steps."""
        self.content: dict[str, object] = {"memory": deque[Step](maxlen=5), "other": [*other]}

    def state_dict(self) -> dict[str, object]:
        """Return the content."""
        return self.content

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take a content."""
        self.content = state


def _grown(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with values that a new process lacks."""
    steps = [Step(torch.full((300,), float(number)), number) for number in range(3)]
    state["memory"].extend(steps)
    state["scores"]["last"] = [Score(0.5), Score(0.25)]
    state["levels"] += [Level.EASY, Level.HARD]
    state["replay"].content["memory"].extend(steps)
    return state


def _fresh(*instances: object) -> dict[str, Any]:
    return {"memory": deque(maxlen=5), "scores": {}, "levels": [], "replay": Replay(), "first": [*instances]}


def test_values_that_a_new_process_lacks_have_the_classes_of_given_instances(store_path: Path) -> None:
    """Test a replay buffer, a list and a mapping that are empty at the start, in the state and in an object."""
    instances = (Step(torch.zeros(1), 0.0), Score(0), Level.EASY)
    expected = _grown(_fresh(*instances))
    with Store.open(store_path, create=True) as store:
        with Checkpointer(store, expected, every=1, keep=None) as checkpointer:
            checkpointer.step(1)
        state = _fresh(*instances)
        with Checkpointer(store, state, every=1, keep=None) as checkpointer, warnings.catch_warnings():
            warnings.simplefilter("error", StateDifferenceWarning)
            checkpointer.restore()
    for steps in (state["memory"], state["replay"].content["memory"]):
        assert [type(step) for step in steps] == [Step] * 3
        assert [(step.seen.unique().tolist(), step.reward) for step in steps] == [([n], n) for n in range(3)]
    assert state["scores"] == {"last": [Score(0.5), Score(0.25)]}
    assert state["levels"] == [Level.EASY, Level.HARD]


def test_unknown_classes_are_named(store_path: Path) -> None:
    """Test that a restore does not replace namedtuples, dataclasses and members in silence."""
    with Store.open(store_path, create=True) as store:
        with Checkpointer(store, _grown(_fresh()), every=1, keep=None) as checkpointer:
            checkpointer.step(1)
        state = _fresh()
        with Checkpointer(store, state, every=1, keep=None) as checkpointer:
            with pytest.raises(StateMismatchError, match="the given state has no instance of Step"):
                checkpointer.restore(strict=True)
            with pytest.warns(StateDifferenceWarning) as caught:
                checkpointer.restore()
    (told,) = [str(warning.message) for warning in caught]
    for place, name in (
        ("memory", "Step"),
        ("scores.last", "Score"),
        ("levels", "Level.EASY, Level.HARD"),
        ("replay", "Step"),
    ):
        assert f"  {place}: the given state has no instance of {name}: a dict of the fields" in told
    assert (state["levels"], state["scores"]["last"]) == ([1, 2], [{"value": 0.5}, {"value": 0.25}])


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
