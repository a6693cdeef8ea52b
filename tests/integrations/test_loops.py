"""Test that killed and resumed loops with Accelerate and Fabric have the same numbers as uninterrupted ones."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from asymcheck import Store
from asymcheck.errors import InvalidInputError
from asymcheck.integrations.accelerate import accelerator_state
from tests.integrations import launch_ranks
from tests.zygote import Zygote

# The ranks of all tests are forked from one process, which has imported torch.
pytestmark = pytest.mark.xdist_group("loops")
_PROGRAM = "tests.integrations.loop_ranks"


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Start the parent of all ranks."""
    imported = ("asymcheck", "accelerate", "asymcheck.integrations.accelerate", _PROGRAM)
    with contextlib.closing(Zygote(tmp_path_factory.mktemp("zygote"), *imported)) as parent:
        yield parent


@pytest.mark.slow(long=["*zero*", "fabric*"])
@pytest.mark.parametrize(
    ("trainer", "kind", "kill_at"),
    [
        ("accelerate", "ddp", 7),
        ("accelerate", "stateful", 9),  # the checkpoint before is at the end of an epoch
        ("accelerate", "fsdp2", 7),
        ("accelerate", "zero2", 7),
        ("fabric", "ddp", 7),
        ("fabric", "fsdp2", 7),
    ],
)
def test_ranks_are_killed_and_resume_as_never_killed(
    trainer: str, kind: str, kill_at: int, tmp_path: Path, zygote: Zygote
) -> None:
    """Test SIGKILL on one of two ranks, within or after an epoch: every loss and every bit is equal."""
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed")
    launch_ranks.one_is_killed(zygote, tmp_path, [trainer, kind, "kill", tmp_path, kill_at], _PROGRAM)
    zygote.run_ranks(2, _PROGRAM, [trainer, kind, "compare", tmp_path, kill_at], tmp_path)
    reports = [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(2)]
    assert [report["first"] for report in reports] == [kill_at - 1] * 2
    assert reports[0]["random"] != reports[1]["random"]


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """Return an accelerator of this process, which no other test sees."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_an_accelerator_that_cannot_be_resumed_exactly_is_refused(accelerator: Any) -> None:  # noqa: ANN401 - see above
    """Test an accelerator before prepare(), and rows that are shuffled in an order of which no state knows."""
    with pytest.raises(InvalidInputError, match="prepared no model"):
        accelerator_state(accelerator)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.prepare(DataLoader(TensorDataset(torch.randn(4, 2)), shuffle=True))
    with pytest.raises(InvalidInputError, match="use_seedable_sampler=True"):
        accelerator_state(accelerator)


def test_accumulated_gradients_are_not_saved(accelerator: Any, tmp_path: Path) -> None:  # noqa: ANN401 - see above
    """Test that a save between two micro steps is refused."""
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.gradient_accumulation_steps = 2
    with (
        Store.open(tmp_path / "store", create=True) as store,
        accelerator.accumulate(),
        pytest.raises(InvalidInputError, match="accumulated gradients"),
    ):
        store.save(accelerator_state(accelerator), step=1)


def test_only_the_last_restore_sets_random_numbers(accelerator: Any) -> None:  # noqa: ANN401 - see above
    """Test a restore of a checkpoint within an epoch, and then of one at the end of an epoch, as after damage."""
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    random: Any = accelerator_state(accelerator)["rng"]
    within = random.state_dict() | {"in_epoch": True}
    torch.rand(1)
    at_end, expected = random.state_dict(), torch.get_rng_state()
    random.load_state_dict(within)
    random.load_state_dict(at_end)
    model(torch.ones(1, 2))
    assert torch.equal(torch.get_rng_state(), expected)
