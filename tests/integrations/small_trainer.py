"""Run a transformers Trainer of a tiny GPT-2; as a script, it is killed at a step."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from asymcheck import Store
from asymcheck.integrations.transformers import AsymcheckCallback

EPOCHS, ROWS, BATCH, ACCUMULATE = 3, 44, 2, 2
STEPS_IN_EPOCH = ROWS // BATCH // ACCUMULATE
STEPS = EPOCHS * STEPS_IN_EPOCH
# Log entries about the machine instead of the training.
TIMES = ("runtime", "per_second")


class Begun(TrainerCallback):
    """Records the number of completed steps at the start of the training."""

    step = -1

    def on_train_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """Record the step."""
        self.step = state.global_step


class KillAt(TrainerCallback):
    """Sends SIGKILL after a step, before it is logged, when the checkpoints in flight are complete in memory."""

    def __init__(self, step: int, checkpoints: AsymcheckCallback, settles_at: int = -1) -> None:
        self.step, self.settles_at = step, settles_at
        self.checkpoints = checkpoints

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Kill the process."""
        if state.global_step == self.settles_at:
            self.checkpoints._training.checkpointer.wait()
        if state.global_step == self.step:
            self.checkpoints._training.checkpointer.wait("memory")
            os.kill(os.getpid(), signal.SIGKILL)


def rows(seed: int) -> list[dict[str, torch.Tensor]]:
    """Return token sequences that depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(50, (ROWS, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_trainer(folder: Path, *, tied: bool = True, **options: object) -> Trainer:
    """Return a Trainer with dropout, shuffled data, accumulation, a schedule, random evaluations and rare logs."""
    set_seed(7)
    config = GPT2Config(
        vocab_size=50,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    given: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "learning_rate": 1e-2,
        "warmup_steps": 5,
        "logging_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 6,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 7,
    }
    arguments = TrainingArguments(**(given | options))
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows(1), eval_dataset=rows(2)[:4])


def log_of(trainer: Trainer) -> list[dict[str, float]]:
    """Return the log without times, to the last bit."""
    return [
        {name: value for name, value in sorted(entry.items()) if not name.endswith(TIMES)}
        for entry in trainer.state.log_history
    ]


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Return everything that a resume must not change; of the final summary, only values of the whole training."""
    log = log_of(trainer)
    return {
        "train_loss": log[-1]["train_loss"],
        "log": log[:-1],
        "model": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "state": (trainer.state.global_step, trainer.state.epoch, trainer.state.total_flos),
    }


def main(folder: Path, every: int, kill_at: int) -> None:
    """Train from the newest checkpoint; kill the process at a step."""
    torch.set_num_threads(1)
    trainer = make_trainer(folder)
    callback = AsymcheckCallback(Store.open(folder / "store", create=True), every=every, keep=None)
    trainer.add_callback(KillAt(kill_at, callback))
    trainer.train(resume_from_checkpoint=callback.resume(trainer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
