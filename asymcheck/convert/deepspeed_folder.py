"""Folders of DeepSpeed ZeRO 1, 2 and 3, as ``engine.save_checkpoint()`` writes them.

Each rank has written its range of the flat fp32 weights, and the optimizer's state of this range. The position of a
parameter follows from the order of shapes that rank 0 wrote, as in DeepSpeed's own ``zero_to_fp32.py``. No code in the
files is executed: stand-ins replace DeepSpeed's classes, and all other classes are refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asymcheck.convert.part import MODEL
from asymcheck.convert.source_file import SourceFile
from asymcheck.convert.torch_file import read_torch_file
from asymcheck.errors import ForeignFileError, InvalidInputError
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.state.leaves import TensorBytes

_SHARDED_STAGE = 3  # in this stage each rank has a part of every parameter
_LATEST = "latest"
_OPTIMIZER_FILES = "*_optim_states.pt"
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_FOLDER_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
_AGAIN = "save it again with engine.save_checkpoint()"
_ENGINE = "load it with engine.load_checkpoint(), and save what that gives with a Checkpointer"


class _StandIn:
    """Ignores everything that a file says of an object."""

    def __init__(self, *_arguments: object) -> None:
        pass

    def __setstate__(self, _state: object) -> None:
        pass


class _Stage(int):
    """The stage of ZeRO, which DeepSpeed writes as an enumeration."""

    __slots__ = ()


_STAND_INS: Mapping[str, type] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Stage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _StandIn,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _StandIn,
    "deepspeed.utils.tensor_fragment.fragment_address": _StandIn,
}


def is_deepspeed_folder(path: Path) -> bool:
    """Tell whether a folder is one of DeepSpeed: the folder of a checkpoint, or the one above it."""
    return _tagged(path) is not None


def _tagged(path: Path) -> Path | None:
    """Return the folder of the checkpoint, or of the latest one inside."""
    if any(path.glob(_OPTIMIZER_FILES)):
        return path
    latest = path / _LATEST
    if not latest.is_file():
        return None
    tag = latest.read_text(errors="replace").strip()
    inside = path / tag
    return inside if tag and Path(tag).name == tag and any(inside.glob(_OPTIMIZER_FILES)) else None


def read_deepspeed_folder(path: Path, opened: Callable[[Path], SourceFile]) -> object:
    """Return the content of a folder of DeepSpeed; ``opened`` opens its files, which stay open.

    The state has the fp32 weights and the other tensors of the module under ``model``, the optimizer's state for each
    of the weights and the options of its groups under ``optimizer``, and the progress of training under ``counters``.

    Raises:
        ForeignFileError: files are missing, damaged, or hold values that cannot be stored.
        InvalidInputError: it is no folder of DeepSpeed.
    """
    folder = _tagged(path)
    if folder is None:
        raise InvalidInputError(f"{path} is no folder of DeepSpeed")
    try:
        return _Folder(folder, opened).state()
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        what = f"it is not what engine.save_checkpoint() writes ({type(error).__name__}: {error})"
        raise ForeignFileError(folder, what, _ENGINE) from error


@dataclasses.dataclass(frozen=True)
class _Place:
    """The elements of a parameter that one rank has in the flat tensor of a group."""

    rank: int
    group: int
    first: int
    count: int


class _Folder:
    def __init__(self, folder: Path, opened: Callable[[Path], SourceFile]) -> None:
        self._folder = folder
        self._ranks = [self._read(opened(file)) for file in self._files()]
        states = [one["optimizer_state_dict"] for one in self._ranks]
        # DeepSpeed's optimizer of stage 1 with gradients in fp32 does not name its stage.
        self._stage = int(states[0].get("zero_stage", 1))
        is_sharded = self._stage == _SHARDED_STAGE
        self._flats: list[list[TensorBytes]] = [
            one["fp32_flat_groups" if is_sharded else "single_partition_of_fp32_groups"] for one in states
        ]
        bases = [one["optimizer_state_dict" if is_sharded else "base_optimizer_state"] for one in states]
        if not all(isinstance(base, dict) for base in bases):
            raise ForeignFileError(folder, "its optimizer state is of an elastic checkpoint", _ENGINE)
        self._moments: list[Mapping[int, Mapping[str, object]]] = [base["state"] for base in bases]
        self._groups: list[Mapping[str, Any]] = bases[0]["param_groups"]
        self._paddings: list[list[int]] | None = states[0].get("param_alignment_paddings")
        count = states[0]["partition_count"]
        world_size = max(count) if isinstance(count, (list, tuple)) else count
        if world_size != len(self._ranks):
            raise ForeignFileError(folder, f"it has files of {len(self._ranks)} of {world_size} ranks", _AGAIN)
        prefix = "zero_pp_rank_{}_" if is_sharded else ""
        ranks = range(world_size if is_sharded else 1)
        names = [f"{prefix}mp_rank_00_model_states.pt".format(rank) for rank in ranks]
        self._models: list[Any] = [self._read(opened(folder / name)) for name in names]

    @staticmethod
    def _read(file: SourceFile) -> Any:  # noqa: ANN401 - whatever the file says
        return read_torch_file(file, _STAND_INS)

    def _files(self) -> list[Path]:
        """Return the optimizer files in order of rank."""
        found = {}
        for file in self._folder.glob(_OPTIMIZER_FILES):
            named = _RANK.fullmatch(file.name)
            if named is None:
                problem = f"{file.name} is of a model that is split by experts or tensor parallelism"
                raise ForeignFileError(self._folder, problem, _ENGINE)
            found[int(named[1])] = file
        if sorted(found) != list(range(len(found))):
            raise ForeignFileError(self._folder, f"it has files of ranks {sorted(found)} only", _AGAIN)
        return [found[rank] for rank in sorted(found)]

    def state(self) -> object:
        first = self._models[0]
        model: dict[str, object] = {}
        optimizer: dict[str, object] = {}
        for name, shape, places in self._trained():
            model[name] = self._whole(name, shape, [(self._flats[one.rank][one.group], one) for one in places])
            optimizer[name] = self._state_of(name, shape, places)
        if self._stage == _SHARDED_STAGE:
            model |= self._frozen()
            model |= {name: first["module"][name] for name in first["buffer_names"]}
        else:
            # The low-precision copies of the weights are left out.
            model |= {name: value for name, value in first["module"].items() if name not in model}
        model |= {name: model[other] for name, other in first["shared_params"].items() if other in model}
        return {
            MODEL: model,
            "optimizer": {"state": optimizer, "param_groups": [self._options(group) for group in self._groups]},
            "counters": {name: first[name] for name in _FOLDER_COUNTERS if name in first},
        }

    def _trained(self) -> Iterator[tuple[str, tuple[int, ...], list[_Place]]]:
        """Yield name, shape and places of all trained parameters."""
        shapes = self._models[0]["param_shapes"]
        if self._stage == _SHARDED_STAGE:
            # All ranks have equal shares of each parameter. Subgroups do not share parameters.
            lengths = [flat.shape[0] for flat in self._flats[0]]
            group = first = 0
            for name, shape in itertools.chain.from_iterable(named.items() for named in shapes):
                size = -(-math.prod(shape) // len(self._ranks))
                while group < len(lengths) - 1 and first + size > lengths[group]:
                    group, first = group + 1, 0
                yield name, tuple(shape), [_Place(rank, group, first, size) for rank in range(len(self._ranks))]
                first += size
            return
        for group, named in enumerate(shapes):
            paddings = self._paddings[group] if self._paddings is not None else [0] * len(named)
            offset = 0
            for (name, shape), padding in zip(named.items(), paddings, strict=True):
                length = math.prod(shape)
                yield name, tuple(shape), list(self._cut(group, offset, length))
                offset += length + padding

    def _cut(self, group: int, offset: int, length: int) -> Iterator[_Place]:
        """Yield the places of a range of a group's flat tensor, of which the ranks have consecutive pieces."""
        for rank, flats in enumerate(self._flats):
            here = flats[group].shape[0]
            count = min(here - offset, length)
            if count > 0:
                yield _Place(rank, group, offset, count)
                length -= count
            offset = max(0, offset - here)

    def _state_of(self, name: str, shape: tuple[int, ...], places: Sequence[_Place]) -> dict[str, object]:
        """Return the optimizer's elementwise state of a parameter."""
        found: dict[str, object] = {}
        for key, value in self._moments[places[0].rank].get(places[0].group, {}).items() if places else ():
            if isinstance(value, TensorBytes) and value.shape:
                parts: list[tuple[Any, _Place]] = [(self._moments[one.rank][one.group][key], one) for one in places]
                found[key] = self._whole(f"{name}.{key}", shape, parts)
        return found

    def _options(self, group: Mapping[str, Any]) -> dict[str, object]:
        """Return the options of a group of parameters, and the optimizer's state that is not elementwise."""
        state = self._moments[0].get(group["params"][0], {}) if group["params"] else {}
        once = {key: value for key, value in state.items() if not isinstance(value, TensorBytes) or not value.shape}
        return {**{key: value for key, value in group.items() if key != "params"}, **once}

    def _frozen(self) -> dict[str, object]:
        """Return the parameters of stage 3 that were not trained, of which each rank has a share."""
        found: dict[str, object] = {}
        for name, shape in (self._models[0].get("frozen_param_shapes") or {}).items():
            parts = [one["frozen_param_fragments"][name] for one in self._models]
            placed = [(part, _Place(rank, 0, 0, part.shape[0])) for rank, part in enumerate(parts)]
            found[name] = self._whole(name, tuple(shape), placed)
        return found

    def _whole(self, name: str, shape: tuple[int, ...], parts: Sequence[tuple[TensorBytes, _Place]]) -> TensorBytes:
        """Join parts, of which the last may have padding."""
        there = sum(min(place.count, max(0, part.shape[0] - place.first)) for part, place in parts)
        if there < math.prod(shape) or len({part.dtype for part, _ in parts}) > 1:
            what = f"it has {there} of the {math.prod(shape)} elements of {name}"
            raise ForeignFileError(self._folder, what, _AGAIN)
        dtype = parts[0][0].dtype if parts else "float32"
        return _Chain(dtype, shape, [(part, place.first, place.count) for part, place in parts])


class _Chain(TensorBytes):
    """A tensor that is the concatenation of ranges of other tensors."""

    def __init__(self, dtype: str, shape: tuple[int, ...], parts: Sequence[tuple[TensorBytes, int, int]]) -> None:
        super().__init__(dtype, shape)
        self._parts = parts

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` from the ranges that overlap with it."""
        width, done = DTYPE_BYTES[self.dtype], 0
        for part, first, count in self._parts:
            size = min(count * width - start, len(target) - done)
            if size > 0:
                part.read(first * width + start, target[done : done + size])
                done += size
            start = max(0, start - count * width)
