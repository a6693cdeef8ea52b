"""Test SIGTERM during a fit of Lightning and a training of transformers, each in a process of its own."""

import contextlib
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
from tests.zygote import Zygote


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Start the parent of the trainings."""
    with contextlib.closing(Zygote(tmp_path_factory.mktemp("zygote"), "asymcheck", __name__)) as parent:
        yield parent


class _Lightning(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


class _Transformers(TrainerCallback):
    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(path: str) -> None:
    """Fit with Lightning until the signal. Runs in a child."""
    with Store.open(Path(path) / "store", create=True) as store:
        callback = lightning.AsymcheckCallback(store, every=1000, save_on_signal=True)
        with pytest.raises(Preempted) as ended:
            small_fit.fit(Path(path), callback, _Lightning())
        _check(store, ended.value)


def fit_to_the_end(path: str) -> None:
    """Fit with Lightning, and get the signal after the fit. Runs in a child."""
    with Store.open(Path(path) / "store", create=True) as store:
        small_fit.fit(Path(path), lightning.AsymcheckCallback(store, save_on_signal=True), max_epochs=1)
        os.kill(os.getpid(), signal.SIGTERM)


def train(path: str) -> None:
    """Train with transformers until the signal. Runs in a child."""
    trainer = small_trainer.make_trainer(Path(path))
    with Store.open(Path(path) / "store", create=True) as store:
        callback = transformers.AsymcheckCallback(store, every=1000, save_on_signal=True)
        trainer.add_callback(_Transformers())
        with pytest.raises(Preempted) as ended:
            trainer.train(resume_from_checkpoint=callback.resume(trainer))
        _check(store, ended.value)


def _check(store: Store, ended: Preempted) -> None:
    assert (ended.code, ended.step) == (143, 5)
    assert store.checkpoints()[-1].step == 5


@pytest.mark.slow
def test_lightning_saves_the_step_of_the_signal(zygote: Zygote, tmp_path: Path) -> None:
    """Test a fit, in which Lightning sets its own handler of SIGTERM."""
    zygote.start(fit, path=str(tmp_path)).finish()


@pytest.mark.slow
def test_a_signal_after_a_fit_ends_the_process(zygote: Zygote, tmp_path: Path) -> None:
    """Test that the handler of Lightning, which it removes at the end of the fit, swallows no later SIGTERM."""
    assert zygote.start(fit_to_the_end, path=str(tmp_path)).wait() == -signal.SIGTERM


@pytest.mark.slow
def test_transformers_saves_the_step_of_the_signal(zygote: Zygote, tmp_path: Path) -> None:
    """Test a training whose checkpoint is captured at the start of the next step."""
    zygote.start(train, path=str(tmp_path)).finish()
