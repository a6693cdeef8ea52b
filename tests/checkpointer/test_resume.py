"""Test that a stopped and resumed training has the same numbers as an uninterrupted one."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asymcheck import Checkpointer, RngState, Store
from tests.store.equality import assert_same
from tests.zygote import Zygote

STEPS = 30


class Net(torch.nn.Module):
    """A small model with dropout, running statistics and a tied weight, which a resume must restore."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.hidden = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Predict a token from the previous token."""
        hidden = self.norm(torch.nn.functional.dropout(self.embedding(tokens), 0.2, self.training))
        hidden = torch.nn.functional.dropout(torch.relu(self.hidden(hidden)), 0.2, self.training)
        return torch.as_tensor(self.head(hidden))


def _parts() -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "average": average,
        "rng": RngState(),
        "seen": {"samples": 0},
    }


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the global generator takes part


def _train(state: dict[str, Any], checkpointer: Checkpointer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        tokens = torch.randint(50, (16,)) + 0 * random.randrange(2) + 0 * np.random.randint(2)  # noqa: NPY002 - as above
        loss = torch.nn.functional.cross_entropy(state["model"](tokens), (tokens + 1) % 50)
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["average"].update_parameters(state["model"])
        state["seen"]["samples"] += len(tokens)
        losses.append(loss.item())
        checkpointer.step(step)
    return losses


def _final(state: dict[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() if hasattr(part, "state_dict") else dict(part) for name, part in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4, 7])
def test_losses_and_the_final_state_are_the_same_to_the_bit(tmp_path: Path, every: int) -> None:
    """Test two stops, between two checkpoints and at one; each resume begins with objects that have other values."""
    _seed(0)
    whole = _parts()
    with Store.open(tmp_path / "whole", create=True) as store:
        expected = _train(whole, Checkpointer(store, whole, every=every, keep=None), 0, STEPS)

    losses: dict[int, float] = {}
    with Store.open(tmp_path / "stopped", create=True) as store:
        for number, stop in enumerate((10, 22, STEPS)):
            _seed(0 if number == 0 else 1000 + number)
            state = _parts()
            checkpointer = Checkpointer(store, state, every=every, keep=None)
            restored = checkpointer.restore()
            assert (restored is None) == (number == 0)
            first = restored.step + 1 if restored else 0
            losses |= dict(enumerate(_train(state, checkpointer, first, stop), first))
    assert [losses[step] for step in range(STEPS)] == expected
    assert_same(_final(state), _final(whole))


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from pathlib import Path
from tests.checkpointer.test_resume import _stretch
torch.set_num_threads(1)
for loss in _stretch(Path(sys.argv[2]), 0, 13):
    print(loss.hex())
"""


def _stretch(path: Path, seed: int, stop: int) -> list[float]:
    """Train up to a step, from the newest checkpoint or, in an empty store, from the seed."""
    _seed(seed)
    state = _parts()
    with Store.open(path, create=True) as store:
        checkpointer = Checkpointer(store, state, every=5, keep=None)
        restored = checkpointer.restore()
        return _train(state, checkpointer, restored.step + 1 if restored else 0, stop)


@pytest.mark.slow
def test_another_process_goes_on_where_the_first_stopped(zygote: Zygote, tmp_path: Path) -> None:
    """Test that a resume needs nothing from the process: the losses after step 10 are the same."""
    root = str(Path(__file__).parents[2])
    done = zygote.run_script(CHILD, root, tmp_path / "stopped")
    assert done.returncode == 0, done.stderr
    whole = _stretch(tmp_path / "whole", 0, STEPS)
    assert [float.fromhex(loss) for loss in done.stdout.split()] == whole[:13]
    assert _stretch(tmp_path / "stopped", 77, STEPS) == whole[11:]
