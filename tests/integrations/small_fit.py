"""Run a Lightning fit of a small model with a resumable loader; as a script, it is killed at a step."""

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset, RandomSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from asymcheck import Store
from asymcheck.integrations.lightning import AsymcheckCallback

EPOCHS, ROWS, BATCH, ACCUMULATE = 3, 46, 4, 2
BATCHES = -(-ROWS // BATCH)
STEPS_IN_EPOCH = -(-BATCHES // ACCUMULATE)
STEPS = EPOCHS * STEPS_IN_EPOCH


class Module(LightningModule):
    """A model with dropout, running statistics, and two kinds of schedules, one of which uses validations."""

    def __init__(self, *, plateau: bool) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Dropout(0.3), torch.nn.Linear(12, 1)
        )
        self.plateau = plateau
        self.losses: list[tuple[int, float]] = []

    def configure_model(self) -> None:
        """Shard the parameters, if the strategy has a mesh of devices."""
        if self.device_mesh is not None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        """Train one batch."""
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append((self.trainer.fit_loop.total_batch_idx, loss.item()))
        return loss

    def validation_step(self, batch: list[torch.Tensor], _index: int) -> None:
        """Validate one batch, and draw a random number."""
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]) + 0 * torch.rand(()))

    def configure_optimizers(self) -> object:
        """Return AdamW, with a rate that falls after each step, or when validations stop improving."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if self.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
            return [optimizer], [{"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch"}]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class KillAt(Callback):
    """Sends SIGKILL after a batch, when the checkpoints in flight are complete in memory."""

    def __init__(self, step: int, checkpoints: AsymcheckCallback, settles_at: int = -1) -> None:
        self.step, self.settles_at = step, settles_at
        self.checkpoints = checkpoints

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Kill the process."""
        if trainer.global_step == self.settles_at:
            self.checkpoints._fit.checkpointer.wait()
        if trainer.global_step == self.step:
            self.checkpoints._fit.checkpointer.wait("memory")
            os.kill(os.getpid(), signal.SIGKILL)


class Differing(Callback):
    """Gives each rank different random numbers."""

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        """Draw some numbers."""
        torch.rand(trainer.global_rank)


def data(seed: int, rows: int) -> TensorDataset:
    """Return rows that depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(rows, 6, generator=generator), torch.randn(rows, 1, generator=generator))


def loader(seed: int, rows: int, *, shuffle: bool, ranks: int = 1) -> StatefulDataLoader:
    """Return a loader of rows that depend only on the seed; Lightning shuffles them for several ranks."""
    found = data(seed, rows)
    if shuffle and ranks > 1:
        return StatefulDataLoader(found, batch_size=BATCH, sampler=RandomSampler(found))
    return StatefulDataLoader(found, batch_size=BATCH, shuffle=shuffle)


def fit(
    folder: Path,
    *callbacks: Callback,
    plateau: bool = False,
    ranks: int = 1,
    rows: object = None,
    strategy: object = None,
    **options: object,
) -> tuple[Trainer, Module]:
    """Train with shuffled data, accumulation, and two validations in an epoch."""
    seed_everything(5, verbose=False)
    given = {"max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATE, "val_check_interval": 0.5} | options
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    where = {"accelerator": "cpu", "devices": ranks, "strategy": strategy or ("auto" if ranks == 1 else "ddp")}
    trainer = Trainer(**given, **quiet, **where, default_root_dir=folder, callbacks=[*callbacks])
    module = Module(plateau=plateau)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
        # Hide warnings of torch about torchdata and Lightning.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated")
        if rows is None:
            rows = loader(1, ROWS, shuffle=True, ranks=ranks)
        elif isinstance(rows, Dataset):
            rows = StatefulDataLoader(rows, batch_size=BATCH)
        trainer.fit(module, rows, loader(2, 8, shuffle=False))
    return trainer, module


def outcome(trainer: Trainer, module: Module) -> dict[str, Any]:
    """Return everything that a resume must not change."""
    return {
        "model": dict(module.state_dict()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "where": (trainer.global_step, trainer.current_epoch),
    }


def main(folder: Path, every: int, kill_at: int) -> None:
    """Train from the newest checkpoint; kill the process at a step."""
    torch.set_num_threads(1)
    callback = AsymcheckCallback(Store.open(folder / "store", create=True), every=every, keep=None)
    fit(folder, callback, KillAt(kill_at, callback))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
