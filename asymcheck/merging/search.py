"""Search for the settings of the best merge by Bayesian optimisation (optuna).

With two sources, the search is the pairwise one for checkpoints of one training: ``theta = w x_2 + (1 - w) x_1`` with
``w`` from 0.5 to 1. Each trial merges into a temporary store, exports the model, and runs a command on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asymcheck.config import DEFAULT_RUN
from asymcheck.convert.convert import Output, export_checkpoint
from asymcheck.convert.export_target import make_temporary_folder
from asymcheck.errors import InvalidInputError
from asymcheck.format.digest import digest
from asymcheck.inspect.diff import find_checkpoint
from asymcheck.merging.merge import MERGED_RUN, Merged, merge
from asymcheck.merging.sources import SourceName, named
from asymcheck.store import Store

FOLDER = "{folder}"
"""Placeholder in the command for the folder of the model."""
_STARTS = 4
_PAIR = 2
_LEAST_WEIGHT = 0.5
"""Smallest weight of the newer of two sources, for the method ``weighted``."""
_SHOWN = 500
_SEARCHED = {
    "ema": {"alpha": (0.0, 1.0)},
    "slerp": {"t": (0.0, 1.0)},
    "ties": {"density": (0.05, 1.0), "scale": (0.2, 1.5)},
    "dare": {"density": (0.05, 1.0), "scale": (0.2, 1.5)},
}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Command that prints the quality of a model."""

    command: str
    """A command line with ``{folder}``. The last word that it prints is a number. No shell interprets it."""
    study: Path
    """File of the study, by which an interrupted search continues."""
    trials: int = 20
    """Number of trials, including those of earlier calls."""
    maximize: bool = False
    """Whether a larger number is better."""
    part: str | None = "model"
    """Part of the state to export; None for all."""
    files_from: Path | None = None
    """Folder whose small files (configuration, tokenizer) are copied to the model."""


@dataclasses.dataclass(frozen=True)
class Searched:
    """Result of a search."""

    merged: Merged
    """The best merge, saved in the store."""
    best: float
    """Its number."""
    trials: int
    """Number of complete trials in the study."""
    settings: Mapping[str, object]
    """Settings of the best merge."""


def search(  # noqa: PLR0913 - arguments of merge()
    store: Store,
    steps: Sequence[int | str | SourceName],
    evaluation: Evaluation,
    *,
    method: str = "weighted",
    base: int | str | SourceName | None = None,
    run: str = DEFAULT_RUN,
    to_run: str = MERGED_RUN,
    step: int | None = None,
    note: Callable[[int, float, Mapping[str, object]], object] = lambda _number, _value, _settings: None,
) -> Searched:
    """Search the settings of ``method`` whose merge has the best number, and save that merge.

    Trials need space for two models beside the store. Their temporary stores are removed. ``method`` is ``weighted``,
    ``ema``, ``slerp``, ``ties`` or ``dare``. ``note`` is called with the number of each trial, its result and its
    settings. The other arguments are those of :func:`asymcheck.merge`.

    Raises:
        InvalidInputError: optuna is missing, the method has nothing to search, or the command failed.
        AsymcheckError: as :func:`asymcheck.merge`. The study keeps complete trials, and no merge is saved.
    """
    if FOLDER not in evaluation.command:
        raise InvalidInputError(f"evaluation command {evaluation.command!r} has no {FOLDER}; add it as an argument")
    ranges = _ranges(method, len(steps))
    names = [named(store, item) for item in steps]
    start = None if base is None else named(store, base)
    given = [*names, *([] if start is None else [start])]
    subject = [method, str(ranges), str(evaluation.part), *(_identity(item, run) for item in given)]
    optuna = _optuna()
    study = _study(optuna, evaluation, subject)
    complete = (optuna.trial.TrialState.COMPLETE,)

    def settings_of(parameters: Mapping[str, float]) -> dict[str, Any]:
        if method != "weighted":
            return dict(parameters)
        shares = [parameters[name] for name in ranges]
        return {"weights": tuple([1 - shares[0], shares[0]] if len(names) == _PAIR else shares)}

    def value_of(trial: Any) -> float:  # noqa: ANN401 - optuna may be missing
        settings = settings_of({name: trial.suggest_float(name, *bounds) for name, bounds in ranges.items()})
        folder = make_temporary_folder(store.path.parent / "asymcheck-merge")
        try:
            with Store.open(folder / "store", config=store.resources.tier.config, create=True) as scratch:
                merge(scratch, names, method=method, base=start, run=run, **settings)
                output = Output(folder / "model", files_from=evaluation.files_from)
                export_checkpoint(scratch, output, run=MERGED_RUN, part=evaluation.part)
            return _evaluated(evaluation.command, folder / "model")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def note_trial(_study: object, trial: Any) -> None:  # noqa: ANN401 - as above
        note(trial.number, trial.value, settings_of(trial.params))

    left = evaluation.trials - len(study.get_trials(states=complete))
    study.optimize(value_of, left, callbacks=[note_trial])
    settings = settings_of(study.best_params)
    merged = merge(store, names, method=method, base=start, run=run, to_run=to_run, step=step, **settings)
    return Searched(merged, study.best_value, len(study.get_trials(states=complete)), settings)


def _identity(source: SourceName, run: str) -> str:
    """Return the save of a source. A step may be saved again, and then earlier trials are those of other weights."""
    with source.store.resources.source() as tier:
        files, _ = find_checkpoint(tier, source.name, run)
    return f"{source.store.location} {files.run} {files.ref.save_id.hex()}"


def _ranges(method: str, sources: int) -> dict[str, tuple[float, float]]:
    if method == "weighted" and sources == _PAIR:
        return {"weight": (_LEAST_WEIGHT, 1.0)}
    if method == "weighted":
        return {f"weight_{number}": (0.0, 1.0) for number in range(sources)}
    if method not in _SEARCHED:
        known = ", ".join(["weighted", *_SEARCHED])
        raise InvalidInputError(f"method {method} has no setting to search; choose one of {known}")
    return _SEARCHED[method]


def _optuna() -> Any:  # noqa: ANN401 - optuna may be missing
    try:
        import optuna
    except ImportError as error:
        raise InvalidInputError("a search needs optuna; pip install 'asymcheck[merge]'") from error
    # The error of a failed trial is raised.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _study(optuna: Any, evaluation: Evaluation, subject: Sequence[str]) -> Any:  # noqa: ANN401 - as above
    """Open or create the study of one search; other searches may be in the same file."""
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(evaluation.study)))
    direction = "maximize" if evaluation.maximize else "minimize"
    # The name includes the direction, because optuna keeps the direction of a study that exists.
    name = digest("\0".join([*subject, evaluation.command, direction]).encode()).hex()
    study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True, direction=direction)
    # A seed that depends on the trials, so that a continued search does not repeat its random ones.
    seed = len(study.trials)
    study.sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=_STARTS)
    return study


def _evaluated(command: str, folder: Path) -> float:
    """Run the command, and return the last word of its output as a number."""
    try:
        words = [word.replace(FOLDER, str(folder)) for word in shlex.split(command)]
    except ValueError as error:
        raise InvalidInputError(f"cannot split evaluation command {command!r} into words: {error}") from error
    try:
        # The output before the number may have any encoding.
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise InvalidInputError(f"cannot run evaluation command {words[0]!r}: {error.strerror}") from error
    last = (done.stdout.split() or [""])[-1]
    value = math.nan
    with contextlib.suppress(ValueError):
        value = float(last)
    if done.returncode or not math.isfinite(value):
        problem = f"exit status {done.returncode}" if done.returncode else f"last word {last!r:.50} is no finite number"
        shown = (done.stderr or done.stdout).strip()[-_SHOWN:]
        output = f"; it printed: {shown}" if shown else ""
        raise InvalidInputError(f"evaluation command {command!r} failed: {problem}{output}")
    return value
