"""Test SIGTERM during a fit of Lightning and a training of transformers."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import Callback, Trainer
from transformers import TrainerCallback, TrainerControl, TrainerState

from asymcheck import Store
from asymcheck.errors import Preempted
from asymcheck.integrations import lightning, transformers
from tests.integrations import small_fit, small_trainer


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    """Restore the handler of SIGTERM: the process of a real training ends instead."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class _Lightning(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


class _Transformers(TrainerCallback):
    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_lightning_saves_the_step_of_the_signal(tmp_path: Path) -> None:
    """Test a fit, in which Lightning sets its own handler of SIGTERM."""
    with Store.open(tmp_path / "store", create=True) as store:
        callback = lightning.AsymcheckCallback(store, every=1000, save_on_signal=True)
        with pytest.raises(Preempted) as ended:
            small_fit.fit(tmp_path, callback, _Lightning())
        assert (ended.value.code, ended.value.step) == (143, 5)
        assert store.checkpoints()[-1].step == 5


@pytest.mark.slow
def test_transformers_saves_the_step_of_the_signal(tmp_path: Path) -> None:
    """Test a training whose checkpoint is captured at the start of the next step."""
    trainer = small_trainer.make_trainer(tmp_path)
    with Store.open(tmp_path / "store", create=True) as store:
        callback = transformers.AsymcheckCallback(store, every=1000, save_on_signal=True)
        trainer.add_callback(_Transformers())
        with pytest.raises(Preempted) as ended:
            trainer.train(resume_from_checkpoint=callback.resume(trainer))
        assert (ended.value.code, ended.value.step) == (143, 5)
        assert store.checkpoints()[-1].step == 5
