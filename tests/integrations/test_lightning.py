"""Test that a killed and resumed Lightning fit has the same numbers as an uninterrupted one."""

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from asymcheck import Store
from asymcheck.errors import (
    AbandonedCheckpointsWarning,
    CheckpointNotFoundError,
    InvalidInputError,
    StateDifferenceWarning,
)
from asymcheck.integrations.lightning import AsymcheckCallback
from tests.checkpointer.loops import copy_late
from tests.integrations import launch_ranks, small_fit
from tests.integrations.small_fit import ACCUMULATE, BATCHES, ROWS, STEPS, STEPS_IN_EPOCH, Trainer, fit, outcome
from tests.store.equality import assert_same

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

KINDS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "steps": {"max_steps": STEPS, "max_epochs": -1},
    "plateau": {"plateau": True},
}


class Run:
    """An uninterrupted run with a checkpoint of each step."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.options = KINDS[kind]
        self.folder = folder
        plain = fit(folder, **self.options)
        self.losses, self.outcome = dict(plain[1].losses), outcome(*plain)
        with Store.open(folder / "store", create=True) as store:
            saved = fit(folder, AsymcheckCallback(store, every=1, keep=None), **self.options)
        assert dict(saved[1].losses) == self.losses
        assert_same(outcome(*saved), self.outcome)


class LogsEachClass(Callback):
    """Logs more metrics than a checkpoint can have."""

    def on_validation_end(self, trainer: Trainer, *_: object) -> None:
        """Log a metric for each class."""
        trainer.callback_metrics.update({f"accuracy/{number}": torch.tensor(0.5) for number in range(1000)})


def test_a_thousand_metrics_do_not_end_the_fit(tmp_path: Path) -> None:
    """Test that a checkpoint has as many metrics as the format allows."""
    with Store.open(tmp_path / "store", create=True) as store:
        fit(tmp_path, AsymcheckCallback(store, every=4), LogsEachClass(), max_epochs=1)
        metrics = store.checkpoints()[-1].metrics
    assert (len(metrics), "val_loss" in metrics) == (256, True)


class LogsOnDevice(Callback):
    """Logs a metric that counts how often it is read."""

    reads = 0

    def __float__(self) -> float:
        """Return the value, as from a device."""
        self.reads += 1
        return 0.5

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Log the metric."""
        trainer.callback_metrics["cost"] = self


def test_metrics_are_read_for_saved_steps_only(tmp_path: Path) -> None:
    """Test that other steps do not wait for the device."""
    metric = LogsOnDevice()
    with Store.open(tmp_path / "store", create=True) as store:
        fit(tmp_path, AsymcheckCallback(store, every=4), metric, max_epochs=1)
        assert [checkpoint.metrics["cost"] for checkpoint in store.checkpoints()] == [0.5, 0.5]
    assert metric.reads == 2


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run for each kind of end and schedule."""
    return Run(request.param, tmp_path_factory.mktemp("whole"))


@pytest.mark.slow(quick=["steps-17"])
@pytest.mark.parametrize("step", [1, 3, STEPS_IN_EPOCH, STEPS_IN_EPOCH + 1, 2 * STEPS_IN_EPOCH, STEPS - 1])
def test_resumed_at_any_place(step: int, run: Run) -> None:
    """Test positions within an epoch, after a validation and at the end of an epoch: the losses are equal."""
    with Store.open(run.folder / "store", create=True) as store:
        trainer, module = fit(run.folder, AsymcheckCallback(store, every=1, resume=step, keep=None), **run.options)
    first = step // STEPS_IN_EPOCH * BATCHES + step % STEPS_IN_EPOCH * ACCUMULATE
    assert dict(module.losses) == {index: loss for index, loss in run.losses.items() if index >= first}
    assert_same(outcome(trainer, module), run.outcome)


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_averaged_weights_are_restored(tmp_path: Path) -> None:
    """Test the averages of Lightning's callback, which its state lacks."""
    averages: list[Any] = []
    for step in (False, STEPS_IN_EPOCH + 1):
        with Store.open(tmp_path / "store", create=True) as store:
            averaging = EMAWeightAveraging(decay=0.9)
            fit(tmp_path, AsymcheckCallback(store, every=1, resume=step, keep=None), averaging, max_epochs=2)
        averages.append(averaging._average_model.state_dict())
    assert_same(*averages)


class SwapsWeights(Callback):
    """Validates with other weights, and lets the Checkpointer copy the state meanwhile."""

    def __init__(self, checkpoints: AsymcheckCallback) -> None:
        self.checkpoints = checkpoints
        self.kept: list[torch.Tensor] = []

    def on_validation_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Replace the weights."""
        self.kept = [parameter.detach().clone() for parameter in module.parameters()]
        for parameter in module.parameters():
            parameter.data.zero_()
        self.checkpoints._fit.checkpointer.wait()

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Put the weights back."""
        for parameter, kept in zip(module.parameters(), self.kept, strict=True):
            parameter.data.copy_(kept)


class Wide(small_fit.Module):
    """A module whose weights are too large for a manifest, so that they are copied in the background."""

    def __init__(self, *, plateau: bool) -> None:
        super().__init__(plateau=plateau)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 4096), torch.nn.Linear(4096, 1))


def test_weights_that_a_validation_swaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a validation between two batches of one step, while a capture is in flight."""
    copy_late(monkeypatch)
    monkeypatch.setattr(small_fit, "Module", Wide)
    with Store.open(tmp_path / "store", create=True) as store:
        callback = AsymcheckCallback(store, every=1, keep=None)
        fit(tmp_path, callback, SwapsWeights(callback), max_epochs=1, val_check_interval=3)
        stored: Any = store.load(1)
    assert all(weight.count_nonzero() for name, weight in stored["model"].items() if "weight" in name)


@pytest.mark.slow
def test_killed_and_resumed_is_as_never_killed(tmp_path: Path) -> None:
    """Test SIGKILL in the second epoch, after a checkpoint: every loss and every bit is equal."""
    whole = fit(tmp_path)
    script = str(Path(small_fit.__file__).resolve())
    killed = subprocess.run([sys.executable, script, str(tmp_path), "4", "10"], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with Store.open(tmp_path / "store", create=True) as store:
        trainer, module = fit(tmp_path, AsymcheckCallback(store, every=4, keep=None))
        assert [item.step for item in store.checkpoints()] == [4, 8, 12, 16, STEPS]
        assert store.checkpoints()[-1].metrics.keys() == {"val_loss"}
    losses = dict(whole[1].losses)
    assert min(dict(module.losses)) == STEPS_IN_EPOCH * 2 + 2 * ACCUMULATE
    assert dict(module.losses).items() <= losses.items()
    assert_same(outcome(trainer, module), outcome(*whole))


def test_resumed_when_all_is_done(tmp_path: Path) -> None:
    """Test that nothing is trained, that the model is the trained one, and that signals are those of the program."""
    before = signal.getsignal(signal.SIGTERM)
    with Store.open(tmp_path / "store", create=True) as store:
        _, trained = fit(tmp_path, AsymcheckCallback(store, keep=None))
        _, again = fit(tmp_path, AsymcheckCallback(store, keep=None, save_on_signal=True))
        assert signal.getsignal(signal.SIGTERM) == before
    assert again.losses == []
    assert_same(dict(again.state_dict()), dict(trained.state_dict()))


def test_states_of_other_callbacks(tmp_path: Path) -> None:
    """Test that a callback for early stopping continues its count."""

    def stopping() -> EarlyStopping:
        return EarlyStopping("val_loss", patience=100, min_delta=10)

    with Store.open(tmp_path / "store", create=True) as store:
        whole, again = stopping(), stopping()
        fit(tmp_path, AsymcheckCallback(store, every=1, keep=None), whole)
        fit(tmp_path, AsymcheckCallback(store, every=1, resume=8, keep=None), again)
    assert again.wait_count == whole.wait_count > 1


@pytest.mark.parametrize("step", [5, 8])
def test_limited_epochs_are_resumed(step: int, tmp_path: Path) -> None:
    """Test epochs of 7 of 12 batches, which are 4 steps: the next epoch has other rows, and as many."""
    with Store.open(tmp_path / "store", create=True) as store:
        whole = fit(tmp_path, AsymcheckCallback(store, every=1, keep=None), limit_train_batches=7)
        callback = AsymcheckCallback(store, every=100, resume=step, keep=None)
        again = fit(tmp_path, callback, limit_train_batches=7)
    assert dict(again[1].losses).items() <= dict(whole[1].losses).items()
    assert_same(outcome(*again), outcome(*whole))


@pytest.mark.parametrize("step", [BATCHES + 2, BATCHES + STEPS_IN_EPOCH])
def test_scheduled_accumulation_is_restored(step: int, tmp_path: Path) -> None:
    """Test a resume within and after the epoch in which the number of accumulated batches changes."""

    def scheduled() -> GradientAccumulationScheduler:
        return GradientAccumulationScheduler({0: 1, 1: ACCUMULATE})

    with Store.open(tmp_path / "store", create=True) as store:
        options: dict[str, Any] = {"accumulate_grad_batches": 1, "max_epochs": 3}
        whole = fit(tmp_path, AsymcheckCallback(store, every=1, keep=None), scheduled(), **options)
        again = fit(tmp_path, AsymcheckCallback(store, every=100, resume=step, keep=None), scheduled(), **options)
    assert dict(again[1].losses).items() <= dict(whole[1].losses).items()
    assert_same(outcome(*again), outcome(*whole))


class Counts(Callback):
    """Counts batches, and adds the number to Lightning's own checkpoints only."""

    def on_load_checkpoint(self, _trainer: Trainer, _module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the number."""
        self.count = checkpoint["count"]


class CountsInState(small_fit.Module):
    """Counts batches in its state_dict(), as the warning advises."""

    count = 0

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Train one batch with a loss that depends on the number."""
        self.count += 1
        return super().training_step(batch, index) * self.count

    def get_extra_state(self) -> dict[str, int]:
        """Return the number."""
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Restore the number."""
        self.count = state["count"]


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_state_that_only_hooks_restore_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a warning about hooks that are not called, except those of Lightning, and the advice that it gives."""
    with Store.open(tmp_path / "store", create=True) as store:
        options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 2}
        callback = AsymcheckCallback(store, run="other")
        with pytest.warns(StateDifferenceWarning, match=r"on_load_checkpoint\(\) of Counts are not called"):
            fit(tmp_path, callback, Counts(), EMAWeightAveraging(), **options)
        monkeypatch.setattr(small_fit, "Module", CountsInState)
        whole = fit(tmp_path, AsymcheckCallback(store, every=1, keep=None))
        again = fit(tmp_path, AsymcheckCallback(store, every=1, keep=None, resume=8))
    assert_same(outcome(*again), outcome(*whole))


class Estimates(small_fit.Module):
    """Has a schedule of a known length, for which Lightning sets up the loader before a fit is resumed."""

    def configure_optimizers(self) -> object:
        """Return AdamW with a schedule for all steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_a_loader_that_was_set_up_early_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a resume within an epoch goes on with the next rows."""
    monkeypatch.setattr(small_fit, "Module", Estimates)
    with Store.open(tmp_path / "store", create=True) as store:
        whole = fit(tmp_path, AsymcheckCallback(store, every=1, keep=None))
        again = fit(tmp_path, AsymcheckCallback(store, every=100, keep=None, resume=STEPS_IN_EPOCH + 2))
    assert dict(again[1].losses).items() <= dict(whole[1].losses).items()
    assert_same(outcome(*again), outcome(*whole))


class Stream(IterableDataset[list[torch.Tensor]]):
    """Rows of unknown number. A new iterator begins where the last one stopped."""

    def __init__(self) -> None:
        self.data = small_fit.data(1, ROWS)
        self.next = 0

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        """Yield the rows that are left."""
        while self.next < ROWS:
            self.next += 1
            yield self.data[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the position."""
        self.next = state["next"]


class Noisy(Dataset[list[torch.Tensor]]):
    """Rows with random noise."""

    def __init__(self) -> None:
        self.data = small_fit.data(1, ROWS)

    def __len__(self) -> int:
        """Return the number of rows."""
        return ROWS

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        """Return a row, to which noise is added."""
        inputs, target = self.data[index]
        return [inputs + torch.rand(6), target]


def assert_resumed(folder: Path, step: int, data: Callable[[], object], **options: Any) -> None:  # noqa: ANN401 - options of the Trainer
    """Resume at a step, and compare with an uninterrupted fit."""
    options = {"val_check_interval": 1.0} | options
    with Store.open(folder / "store", create=True) as store:
        saves = AsymcheckCallback(store, every=1, keep=None)
        whole = fit(folder, saves, rows=data(), **options)
        resumes = AsymcheckCallback(store, every=100, keep=None, resume=step)
        again = fit(folder, resumes, rows=data(), **options)
    assert dict(again[1].losses).items() <= dict(whole[1].losses).items()
    assert_same(outcome(*again), outcome(*whole))


@pytest.mark.parametrize("step", [2, BATCHES + 1, 2 * BATCHES - 1])
def test_rows_of_unknown_length_are_resumed(step: int, tmp_path: Path) -> None:
    """Test places within an epoch: Lightning fetches one batch ahead, which is not trained twice or skipped."""
    assert_resumed(tmp_path, step, Stream, accumulate_grad_batches=1)


@pytest.mark.parametrize(("step", "limit"), [(STEPS_IN_EPOCH, 1.0), (4, 7)])
def test_epochs_of_unknown_length_are_resumed(step: int, limit: float, tmp_path: Path) -> None:
    """Test the end of an epoch that the rows end, and of one with 7 batches, after which the next one goes on."""
    assert_resumed(tmp_path, step, Stream, limit_train_batches=limit)


def test_random_rows_are_resumed(tmp_path: Path) -> None:
    """Test a dataset that draws random numbers in the process of the fit."""
    assert_resumed(tmp_path, STEPS_IN_EPOCH + 2, Noisy)


class Fails(Callback):
    """Raises an error after some steps."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Raise the error."""
        if trainer.global_step == 5:
            raise InvalidInputError("on purpose")


def test_captures_are_durable_after_a_failed_fit(tmp_path: Path) -> None:
    """Test that the error is raised, and that earlier checkpoints are in the store."""
    with Store.open(tmp_path / "store", create=True) as store:
        with pytest.raises(InvalidInputError, match="on purpose"):
            fit(tmp_path, AsymcheckCallback(store, every=2, keep=None), Fails())
        assert [item.step for item in store.checkpoints()] == [2, 4]


def test_not_resumed_unless_asked(tmp_path: Path) -> None:
    """Test that resume=False starts from scratch, with a warning about abandoned checkpoints."""
    with Store.open(tmp_path / "store", create=True) as store:
        _, first = fit(tmp_path, AsymcheckCallback(store, keep=None))
        with pytest.warns(AbandonedCheckpointsWarning):
            _, second = fit(tmp_path, AsymcheckCallback(store, resume=False, keep=None))
        assert first.losses == second.losses
        with pytest.raises(CheckpointNotFoundError):
            fit(tmp_path, AsymcheckCallback(store, resume=7, keep=None))


class Adversaries(LightningModule):
    """Two optimizers, of which the second begins later: Lightning counts 4, 5, 7, 9."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)])

    def configure_optimizers(self) -> Any:  # noqa: ANN401 - as Lightning has it
        """Return an optimizer for each layer."""
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in self.layers]

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        """Train one batch."""
        for layer, optimizer in list(zip(self.layers, self.optimizers(), strict=True))[: 1 if index < 5 else 2]:
            optimizer.zero_grad()
            self.manual_backward(layer(batch[0]).square().mean())
            optimizer.step()


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated", "ignore:The '.*_dataloader' does not have many workers"
)
def test_several_optimizers_are_saved_as_often_as_one(tmp_path: Path) -> None:
    """Test step counts that are never a multiple of the interval."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with Store.open(tmp_path / "store", create=True) as store:
        callback = AsymcheckCallback(store, every=10, keep=None)
        trainer = Trainer(**quiet, max_epochs=1, accelerator="cpu", enable_model_summary=False, callbacks=[callback])
        trainer.fit(Adversaries(), DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=1))
        assert [item.step for item in store.checkpoints()] == [11, 21, 31, 35]


@pytest.mark.long
def test_ranks_are_killed_and_resume_as_never_killed(tmp_path: Path) -> None:
    """Test DDP by Lightning's own launcher: one of two ranks is killed, which ends the other; every bit is equal."""
    launch_ranks.by_lightning(tmp_path, "kill", 7, expect=-signal.SIGKILL)
    launch_ranks.by_lightning(tmp_path, "compare", *range(1, 9))
    reports = launch_ranks.reports(tmp_path)
    killed, *others = reports[0]["first"]
    # The first batch; a step needs two. A capture in flight at the kill is restored if both ranks had it in memory.
    assert killed in (8, 12)
    assert others == [0, *range(2, 18, 2)]
    assert reports[1]["first"] == reports[0]["first"]
    assert reports[1]["random"] != reports[0]["random"]
    assert launch_ranks.newest_pushed(tmp_path) == reports[0]["last"]


@pytest.mark.long
def test_sharded_ranks_are_killed_and_resume_as_never_killed(tmp_path: Path) -> None:
    """Test FSDP2 by ModelParallelStrategy: one of two ranks is killed; every bit of every shard is equal."""
    launch_ranks.by_lightning(tmp_path, "kill", 7, expect=-signal.SIGKILL, trainer="model-parallel")
    launch_ranks.by_lightning(tmp_path, "compare", trainer="model-parallel")
    reports = launch_ranks.reports(tmp_path)
    assert [report["first"] for report in reports] in ([[8], [8]], [[12], [12]])


def test_a_sampler_that_lightning_wraps_is_refused(tmp_path: Path) -> None:
    """Test a sampler as Lightning wraps it for ranks: no state of the loader has its random order."""
    drawn = WeightedRandomSampler([1.0] * 8, 8)
    rows = DataLoader(torch.randn(8, 6), sampler=DistributedSamplerWrapper(drawn, num_replicas=1, rank=0))
    with Store.open(tmp_path / "store", create=True) as store, pytest.raises(InvalidInputError, match="RandomSampler"):
        fit(tmp_path, AsymcheckCallback(store, keep=None), rows=rows)


class Unfreezes(BaseFinetuning):
    """Freezes no layer before the first epoch."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """Freeze nothing."""


@pytest.mark.parametrize("callback", [Unfreezes(), StochasticWeightAveraging(swa_lrs=0.01)])
def test_callbacks_that_cannot_be_resumed_are_refused(callback: Callback, tmp_path: Path) -> None:
    """Test callbacks that add parameter groups, or replace the schedule, at the start of an epoch."""
    with Store.open(tmp_path / "store", create=True) as store:
        with pytest.raises(InvalidInputError, match=f"cannot resume exactly: {type(callback).__name__} changes"):
            fit(tmp_path, AsymcheckCallback(store, keep=None), callback)
        assert store.checkpoints() == []


def test_a_search_in_each_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a callback that has set ckpt_path, which the user has not."""
    monkeypatch.setattr(small_fit.Module, "lr", 0.05, raising=False)
    with Store.open(tmp_path / "store", create=True) as store, pytest.raises(InvalidInputError, match="the Tuner"):
        fit(tmp_path, AsymcheckCallback(store, keep=None), LearningRateFinder(num_training_steps=4))


@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
def test_a_fit_that_does_not_resume_takes_all_callbacks(tmp_path: Path) -> None:
    """Test a callback that no resume can repeat."""
    with Store.open(tmp_path / "store", create=True) as store:
        callback = StochasticWeightAveraging(swa_lrs=0.01)
        fit(tmp_path, AsymcheckCallback(store, keep=None, resume=False), callback)
        assert store.checkpoints()
