"""Find the checkpoints in the output folder of a Hugging Face Trainer: sub-folders ``checkpoint-STEP``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from asymcheck.convert.hugging_face import OTHER_BYTES_MAX
from asymcheck.errors import StructureError
from asymcheck.format.record import parse_json
from asymcheck.storage.local_files import translated

_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,18})", re.ASCII)
_STATE = "trainer_state.json"  # written last
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


class TrainerFolder(NamedTuple):
    """Checkpoints in the output folder of a Trainer."""

    complete: dict[int, Path]  # folders by step, oldest first
    incomplete: tuple[str, ...]  # names of sub-folders that a Trainer did not finish, oldest first
    has_weights: bool  # whether the folder itself also contains a model


def trainer_folder(folder: Path) -> TrainerFolder:
    """Return the checkpoints in a folder, without reading their weights."""
    steps: dict[int, Path] = {}
    with translated("list", folder):
        for entry in folder.iterdir() if folder.is_dir() else ():
            match = _CHECKPOINT.fullmatch(entry.name)
            if match is not None and entry.is_dir():
                steps[int(match[1])] = entry
        ordered = {step: steps[step] for step in sorted(steps)}
        complete = {step: path for step, path in ordered.items() if trainer_step(path) == step}
        incomplete = tuple(path.name for step, path in ordered.items() if step not in complete)
        return TrainerFolder(complete, incomplete, any(any(folder.glob(pattern)) for pattern in _WEIGHTS))


def is_checkpoint_folder(path: Path) -> bool:
    """Tell whether a path is a folder with the name of a Trainer's checkpoint."""
    return path.is_dir() and _CHECKPOINT.fullmatch(path.name) is not None


def trainer_step(folder: Path) -> int | None:
    """Return the step of a complete checkpoint folder of a Trainer; None for all other paths."""
    path = folder / _STATE
    with translated("read", path):
        if not path.is_file() or path.stat().st_size > OTHER_BYTES_MAX:
            return None
        text = path.read_bytes()
    try:
        state = parse_json(text, "the state of the Trainer")
    except StructureError:
        return None
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if type(step) is int and step >= 0 else None
